// What a backward request must hold beside what a forward one does.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "engine/core/attention_problem.h"
#include "engine/core/fp8_scales.h"
#include "engine/core/tensor_view.h"

namespace attnd {

// What a backward request carries beside what a forward one does, of tensors the shapes; absent
// where the field is not set.
struct BackwardDescs {
  std::optional<TensorDesc> out;
  std::optional<TensorDesc> lse;
  std::optional<TensorDesc> d_out;
  std::optional<StatedFp8Scales> fp8;
};

// INVALID_ARGUMENT where `out`, `lse` or `d_out` is absent or not as forward returned it for
// `problem`.
absl::Status CheckBackwardTensors(const AttentionProblem& problem, const BackwardDescs& descs);

// The same for `d_out` alone: shaped as the problem's out_desc.
absl::Status CheckOutGradient(const AttentionProblem& problem,
                              const std::optional<TensorDesc>& d_out);

// Gives the problem the scales of the backward pass that `stated` has. INVALID_ARGUMENT (fp8...)
// where the dtype has no scales, one is out of range, or one of forward differs from the problem's.
absl::Status SetBackwardScales(const StatedFp8Scales& stated, AttentionProblem& problem);

// The same for a problem whose O is still here as forward stored it: what that means is forward's
// to say, and another descale_o is INVALID_ARGUMENT.
absl::Status SetScalesOfRetained(const StatedFp8Scales& stated, AttentionProblem& problem);

}  // namespace attnd
