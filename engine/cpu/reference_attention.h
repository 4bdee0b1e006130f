// The plain, obvious attention loops: double accumulation, one row at a time. They stay as the
// oracle that every faster path is compared with, and answer where float32 could not hold the
// products.
#pragma once

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// Computes `problem` for floating point inputs (others: INTERNAL) with any strides, dense, THD or
// paged. With x_j the logit of AttentionProblem and a sink that is nothing, 0 or the
// head's softmax offset:
//   P_j = exp(x_j - LSE),  LSE = ln(exp(sink) + sum_j exp(x_j))  over the keys that the mask shows
//   O = sum_j keep_j / (1 - p) * P_j v_j
// Every element of out (and of lse, if given) is written. Rows outside the sequences get O = 0,
// LSE = -inf, and rows that see no key O = 0, LSE = sink or -inf; no input element that no visible
// pair needs is read. A row all of whose logits are -inf counts as one that sees no key; NaN in a
// visible logit makes O and LSE NaN. Uses no workspace. Thread-safe for distinct outputs.
absl::Status ReferenceForward(const AttentionProblem& problem, const ForwardBuffers& buffers);

// The same for query row `row` of head `n` of sequence `i` alone: writes that row of out and lse,
// and raises amax (which starts at 0) to what it has.
void ReferenceForwardRow(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                         int64_t n, int64_t row);

// The gradients of the same, for problems that CheckGradientViews passes. P comes from Q and K once
// more: buffers.out and buffers.lse are not read and may be null, and so may d_bias and
// d_softmax_offset where they are not wanted. d_out is read only in rows that see a key; a row that
// sees none contributes nothing. Sums over rows, heads and broadcast axes are rounded once, when
// they are complete. Takes memory of its own: float64 dK and dV of one sequence and head, and
// dBias.
absl::Status ReferenceBackward(const AttentionProblem& problem, const BackwardBuffers& buffers);

}  // namespace attnd
