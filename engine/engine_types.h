// What goes into the engine and what it says of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/backend/attention_backend.h"
#include "engine/core/attention_problem.h"
#include "engine/core/attention_spec.h"
#include "engine/memory/memory_pool.h"

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
};

// A request but for its tensors' bytes.
struct ForwardDescription {
  AttentionSpec spec;
  Sequences sequences;
  InputDescs inputs;
  bool return_lse = false;
  DType out_dtype = DType::kUnspecified;  // kUnspecified: the spec's.
};

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

}  // namespace attnd
