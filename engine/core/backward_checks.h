// What a backward request must hold beside what a forward one does.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "engine/core/attention_problem.h"
#include "engine/core/tensor_view.h"

namespace attnd {

// Shapes of what a backward request carries beside what a forward one does; absent where the field
// is not set.
struct BackwardDescs {
  std::optional<TensorDesc> out;
  std::optional<TensorDesc> lse;
  std::optional<TensorDesc> d_out;
};

// INVALID_ARGUMENT where `out`, `lse` or `d_out` is absent or not as forward returned it for
// `problem`.
absl::Status CheckBackwardTensors(const AttentionProblem& problem, const BackwardDescs& descs);

// The same for `d_out` alone: shaped as the problem's out_desc.
absl::Status CheckOutGradient(const AttentionProblem& problem,
                              const std::optional<TensorDesc>& d_out);

}  // namespace attnd
