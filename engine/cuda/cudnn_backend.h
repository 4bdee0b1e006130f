// Attention on one NVIDIA GPU: cuDNN's fused kernels for FLOAT16 and BFLOAT16, every layout read in
// place by its strides; the tiled kernels (tiled_plan.h) for what cuDNN refuses.
//
// Buffers of a call are device memory. Rows of a page that no sequence of the request owns may be
// set to zero in the caller's page pool: cuDNN reads them, and they may hold NaN. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/backend/attention_backend.h"
#include "engine/backend/plan_cache.h"
#include "engine/cuda/device_context.h"
#include "engine/cuda/joint_plan.h"
#include "engine/cuda/sdpa_description.h"
#include "engine/cuda/sdpa_graph.h"

namespace attnd {

class CudnnBackend final : public AttentionBackend {
 public:
  // UNAVAILABLE, in one line, where there is no such device or what it needs is missing.
  static absl::StatusOr<std::unique_ptr<CudnnBackend>> Make(int device);

  const BackendInfo& info() const override { return info_; }
  absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(
      const AttentionProblem& problem) override;
  absl::StatusOr<std::unique_ptr<BackwardPlan>> BuildBackwardPlan(
      const AttentionProblem& problem) override;
  bool PlanIsReady(const AttentionProblem& problem, Pass pass) const override;
  PlanStats plan_stats() const override;
  absl::StatusOr<std::unique_ptr<DeviceQueue>> MakeQueue() override;

  // Graphs built so far, refused ones among them.
  int64_t plans_built() const { return graphs_.builds(); }

 private:
  using GraphCache = PlanCache<SdpaDescription, SdpaGraph, SdpaDescriptionHash>;

  CudnnBackend(int device, BackendInfo info, std::unique_ptr<DeviceContext> builder);
  GraphCache::Result GraphFor(const SdpaDescription& description);
  // UNIMPLEMENTED for calls that are not joined.
  absl::StatusOr<JointGraph> JointGraphFor(const AttentionProblem& problem, Pass pass);
  // UNIMPLEMENTED for what cuDNN refuses.
  absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildCudnnPlan(const AttentionProblem& problem);
  absl::StatusOr<std::unique_ptr<BackwardPlan>> BuildCudnnBackwardPlan(
      const AttentionProblem& problem);

  const int device_;
  const BackendInfo info_;
  GraphCache graphs_;
  std::mutex builder_mutex_;
  const std::unique_ptr<DeviceContext> builder_;  // What graphs are built with, one at a time.
};

}  // namespace attnd
