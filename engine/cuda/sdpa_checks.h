// What cuDNN is known to refuse, or to get wrong, whatever the graph. Private to
// sdpa_description.cc.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/core/attention_problem.h"

namespace attnd {

inline constexpr int64_t kMaxSdpaHeadDim = 256;
inline constexpr int64_t kMaxSdpaExtent = int64_t{1}
                                          << 30;  // Of the batch, an axis or a page pool.

// UNIMPLEMENTED with the field and the nearest form that runs.
absl::Status CheckSdpa(const AttentionProblem& problem);

// The same for ALiBi. `square`: top-left and bottom-right masks are the same.
absl::Status CheckSdpaAlibi(const AttentionProblem& problem, bool square);

}  // namespace attnd
