// The fast CPU path: online softmax over tiles of keys, with Highway, on a thread team. No s_q x
// s_kv matrix exists, and tiles that the mask empties are skipped. Each tile of K and V is copied,
// widened to float32 and contiguous, once for many query rows.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"
#include "engine/cpu/thread_team.h"

namespace attnd {

// Bytes that TiledForward needs for `problem`, or any other of its geometry, on `threads` threads.
int64_t TiledWorkspaceBytes(const AttentionProblem& problem, int threads);

// The contract of ReferenceForward, in float32. The bits of the result depend on the problem alone,
// not on the number of threads. Rows outside the sequences are never read. INTERNAL if the
// workspace is too small.
absl::Status TiledForward(const AttentionProblem& problem, const ForwardBuffers& buffers,
                          ThreadTeam& team);

}  // namespace attnd
