// What goes into the engine and what it says of it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/backend/attention_backend.h"
#include "engine/core/attention_problem.h"
#include "engine/core/attention_spec.h"
#include "engine/core/backward_checks.h"
#include "engine/memory/memory_pool.h"
#include "engine/store/context_store.h"

namespace attnd {

// A backend, and what it runs with.
struct ComputeTarget {
  std::unique_ptr<AttentionBackend> backend;
  std::shared_ptr<MemoryPool> device_pool;  // Null: the backend computes in host memory.
  int workers = 1;
};

// What an engine is made of.
struct EngineParts {
  // Requests arrive and leave here; what the devices copy from and to.
  std::shared_ptr<MemoryPool> host_pool;
  // In order of preference: a request runs on the first that computes it.
  std::vector<ComputeTarget> targets;
  int64_t queue_bytes = 0;  // Of each target.
  std::string incarnation;  // Differs with every start; begins the names of retained contexts.
  absl::Duration max_lease = absl::InfiniteDuration();  // Of a retained context.
};

// A request but for its tensors' bytes.
struct CallDescription {
  Pass pass = Pass::kForward;
  AttentionSpec spec;
  Sequences sequences;
  InputDescs inputs;
  // Forward only.
  bool return_lse = false;
  DType out_dtype = DType::kUnspecified;  // kUnspecified: the spec's.
  std::optional<absl::Duration> retain;   // Keep what backward needs, for so long.
  // Backward only.
  BackwardDescs backward;
  // Not empty: that of a retained forward call; only d_out and fp8 are given beside it.
  std::string context;
};

// A request without contradictions.
struct CheckedCall {
  AttentionProblem problem;
  Pass pass = Pass::kForward;
  bool with_lse = false;
  std::optional<absl::Duration> retain;
  std::shared_ptr<const RetainedForward> retained;  // Of a backward call with a context.
};

// Kernels that stand or fall together.
struct KernelFamily {
  std::string backend;
  std::string engine;
  DType dtype = DType::kUnspecified;
  Pass pass = Pass::kForward;

  bool operator==(const KernelFamily&) const = default;
};

// "cuda cudnn_ragged FLOAT16 forward".
std::string NameOf(const KernelFamily& family);

// What would run, and what it needs.
struct PlanReport {
  absl::Status support;  // OK; UNIMPLEMENTED with the reason; RESOURCE_EXHAUSTED: it never fits.
  std::string backend;
  std::string engine;
  int64_t workspace_bytes = 0;
  int64_t device_bytes = 0;  // Inputs, page tables, outputs and workspace.
  bool deterministic_available = false;
  AttentionProblem problem;
};

// A backend's device, its queue and what it ran.
struct LaneStats {
  std::string backend;
  std::string device;
  PoolStats device_pool;  // All 0 where it computes in host memory.
  PlanStats plans;
  int64_t queued_requests = 0;
  int64_t queued_bytes = 0;
  int64_t launches = 0;  // Requests that run as one are one.
  int64_t requests = 0;  // That ran.
};

// Counters since the start, and what is there now.
struct EngineStats {
  PoolStats host_pool;
  std::vector<LaneStats> lanes;  // In order of preference.
  int64_t retained_contexts = 0;
  // How accepted requests ended.
  int64_t succeeded = 0;
  int64_t failed = 0;
  int64_t cancelled = 0;
  int64_t expired = 0;  // Their deadlines passed.
  int64_t refused = 0;  // Never accepted: pool, queue, draining.
};

}  // namespace attnd
