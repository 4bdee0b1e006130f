// The gradients of tiled attention: P is computed again from LSE, block by block.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"
#include "engine/cpu/thread_team.h"

namespace attnd {

// What TiledBackward needs on a team of `threads`. Depends on the problem's geometry alone, not on
// lengths within it.
int64_t TiledBackwardWorkspaceBytes(const AttentionProblem& problem, int threads);

// What BackwardPlan::Backward promises, for problems that CheckGradientViews passes. Results have
// the same bits on every team, whatever the other sequences of the batch are. d_bias and
// d_softmax_offset may be null where they are not wanted.
//
// INVALID_ARGUMENT (lse) where a row's P does not sum to 1, INTERNAL for a workspace that is too
// small, CANCELLED where the call was cancelled: then the gradients are undefined.
absl::Status TiledBackward(const AttentionProblem& problem, const BackwardBuffers& buffers,
                           ThreadTeam& team);

}  // namespace attnd
