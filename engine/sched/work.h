// One request on its way through the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/backend/attention_backend.h"
#include "engine/backend/call_memory.h"
#include "engine/core/attention_problem.h"
#include "engine/core/request_context.h"
#include "engine/memory/memory_pool.h"

namespace attnd {

// How a request ran; durations of its own stages.
struct ExecutionReport {
  std::string backend;
  std::string device;
  std::string engine;
  int64_t batch_size = 0;
  absl::Duration queue;
  absl::Duration copy_in;
  absl::Duration compute;
  absl::Duration copy_out;
  bool plan_cache_hit = false;
};

// The outputs that CallMemory names, in a block.
struct CallResult {
  BlockLayout layout;
  std::shared_ptr<const PoolBuffer> memory;
  ExecutionReport report;
  std::string context;  // Where forward was to be retained: its name.

  std::span<const std::byte> bytes(Piece piece) const { return layout.In(memory->data(), piece); }
};

// Called exactly once, from any thread, for whatever becomes of a request. Must not block.
using CallDone = absl::AnyInvocable<void(absl::StatusOr<CallResult>)>;

struct Work {
  AttentionProblem problem;
  Pass pass = Pass::kForward;
  bool with_lse = false;  // Forward only.
  AttentionBackend* backend = nullptr;
  std::unique_ptr<CallPlan> plan;  // An AttentionPlan or a BackwardPlan, by pass.
  bool plan_cache_hit = false;

  CallMemory memory;
  PoolBuffer inputs;   // Host memory.
  PoolBuffer outputs;  // Host memory.
  // In the backend's address space: a workspace, or, where that is not the host's, inputs, outputs
  // and workspace.
  PoolBuffer device;
  int64_t bytes = 0;  // Inputs, outputs and workspace once, for the queue's bound.

  RequestContext context;
  absl::Duration copy_in;  // The time that filling `inputs` took.
  absl::Time submitted;
  CallDone done;

  // Set for a forward call that is to be retained: called after it ran, with its outputs, and takes
  // what it wants of the work. Returns the context's name.
  absl::AnyInvocable<std::string(Work& work, const std::shared_ptr<const PoolBuffer>& outputs)>
      retain;
};

}  // namespace attnd
