// Whether gradients can lie where Q, K and V lie: what every backend checks before backward.
#pragma once

#include "absl/status/status.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// UNIMPLEMENTED for problems without gradients: pages (spec.layout), which sequences may share, and
// views (spec.views) that use an element twice, each within itself or two of them, so that it would
// have two gradients. Views that interleave without meeting pass. Only in arrangements far from any
// row-major one, which would cost too long to decide, may views be refused that never meet.
absl::Status CheckGradientViews(const AttentionProblem& problem);

}  // namespace attnd
