// The interface of a compute backend: say what runs, then make plans.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"

namespace attnd {

struct DeviceInfo {
  std::string name;
  int64_t memory_bytes = 0;
  int64_t compute_units = 0;  // Hardware threads, or multiprocessors.
};

struct BackendInfo {
  std::string name;                  // "cpu", "cuda"
  std::vector<std::string> engines;  // Kernel families, best first.
  std::vector<DeviceInfo> devices;
  std::vector<DType> dtypes;
  std::vector<std::string> features;  // Spec fields beyond plain softmax attention that run.
};

// Thread-safe. Plans may outlive neither the backend nor its device.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  virtual const BackendInfo& info() const = 0;

  // OK if a plan for `problem` can be built and computes it exactly; else UNIMPLEMENTED with the
  // field and the nearest form that is supported.
  virtual absl::Status CheckSupport(const AttentionProblem& problem) const = 0;

  // A plan for problems of this spec and geometry. CheckSupport's error where it is not supported.
  virtual absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(
      const AttentionProblem& problem) = 0;
};

}  // namespace attnd
