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
#include "engine/backend/device_queue.h"
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

// Of compiled plans.
struct PlanStats {
  int64_t built = 0;  // Since the start, refused ones among them.
  int64_t hits = 0;   // Requests for a plan that was there.
  int64_t held = 0;   // Now.
};

enum class Pass : uint8_t { kForward, kBackward };

// Thread-safe. Plans may outlive neither the backend nor its device.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  virtual const BackendInfo& info() const = 0;

  // A plan for problems of this spec and geometry, which computes them exactly; else UNIMPLEMENTED
  // with the field and the nearest form that is supported. May take a second, unless PlanIsReady.
  virtual absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(
      const AttentionProblem& problem) = 0;

  // The same for gradients.
  virtual absl::StatusOr<std::unique_ptr<BackwardPlan>> BuildBackwardPlan(
      const AttentionProblem& problem) = 0;

  // Whether the plan of that pass is at hand: nothing is to be compiled, or it is to be refused.
  virtual bool PlanIsReady(const AttentionProblem&, Pass) const { return true; }

  virtual PlanStats plan_stats() const { return {}; }

  // A queue for one thread, to which the backend's plans enqueue. Null where they compute on the
  // calling thread, in host memory.
  virtual absl::StatusOr<std::unique_ptr<DeviceQueue>> MakeQueue() { return nullptr; }
};

}  // namespace attnd
