// One forward request on its way through the engine.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/backend/attention_backend.h"
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
  PoolBuffer out;
  PoolBuffer lse;  // Empty where not wanted.
  ExecutionReport report;
};

// Called exactly once, from any thread, for whatever becomes of a request. Must not block.
using ForwardDone = absl::AnyInvocable<void(absl::StatusOr<ForwardResult>)>;

struct ForwardWork {
  AttentionProblem problem;
  AttentionBackend* backend = nullptr;
  std::unique_ptr<AttentionPlan> plan;
  std::array<PoolBuffer, kNumInputBuffers> inputs;  // Indexed by Buffer.
  PoolBuffer page_table_k;                          // INT32 [b, pages_per_sequence]
  PoolBuffer page_table_v;
  PoolBuffer out;
  PoolBuffer lse;
  PoolBuffer workspace;
  int64_t bytes = 0;  // All of the above, for the queue's bound.

  RequestContext context;
  absl::Duration copy_in;
  absl::Time submitted;
  ForwardDone done;
};

}  // namespace attnd
