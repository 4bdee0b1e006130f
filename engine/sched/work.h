// One forward request on its way through the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/backend/attention_backend.h"
#include "engine/backend/forward_memory.h"
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

struct ForwardResult {
  TensorDesc out_desc;
  TensorDesc lse_desc;
  std::shared_ptr<const PoolBuffer> memory;  // Holds out and lse.
  std::span<const std::byte> out;
  std::span<const std::byte> lse;  // Empty where not wanted.
  ExecutionReport report;
};

// Called exactly once, from any thread, for whatever becomes of a request. Must not block.
using ForwardDone = absl::AnyInvocable<void(absl::StatusOr<ForwardResult>)>;

struct ForwardWork {
  AttentionProblem problem;
  bool with_lse = false;
  AttentionBackend* backend = nullptr;
  std::unique_ptr<AttentionPlan> plan;
  bool plan_cache_hit = false;

  ForwardMemory memory;
  PoolBuffer inputs;   // Host memory.
  PoolBuffer outputs;  // Host memory.
  // In the backend's address space: a workspace, or, where that is not the host's, inputs, outputs
  // and workspace.
  PoolBuffer device;
  int64_t bytes = 0;  // Inputs, outputs and workspace once, for the queue's bound.

  RequestContext context;
  absl::Duration copy_in;  // The time that filling `inputs` took.
  absl::Time submitted;
  ForwardDone done;
};

}  // namespace attnd
