// The plain, obvious attention loop: double accumulation, one row at a time. It stays as the oracle
// that every faster path is compared with, and answers where float32 could not hold the products.
#pragma once

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// Computes `problem` for FLOAT32, FLOAT16 and BFLOAT16 inputs with any strides, dense, THD or
// paged:
//   s_j = scale * (q . k_j), capped to cap * tanh(s_j / cap) where there is a soft cap
//   O = sum_j exp(s_j - LSE) v_j,  LSE = ln sum_j exp(s_j)    over the keys that the mask shows
// Every element of out (and of lse, if given) is written. Rows outside the sequences and rows that
// see no key get O = 0, LSE = -inf; no input element that no visible pair needs is read. A row all
// of whose logits are -inf counts as one that sees no key; NaN in a visible logit makes O and LSE
// NaN. Bias, sinks and dropout are not computed: callers refuse them first (INTERNAL here). Uses no
// workspace. Thread-safe for distinct outputs.
absl::Status ReferenceForward(const AttentionProblem& problem, const ForwardBuffers& buffers);

// The same for query row `row` of head `n` of sequence `i` alone: writes that row of out and lse.
void ReferenceForwardRow(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                         int64_t n, int64_t row);

}  // namespace attnd
