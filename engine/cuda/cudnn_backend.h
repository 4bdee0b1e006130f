// Attention on one NVIDIA GPU through cuDNN's fused kernels: FLOAT16 and BFLOAT16 forward, every
// layout read in place by its strides, LSE, FLOAT32 output.
//
// Buffers of a forward call are device memory. Rows of a page that no sequence of the request owns
// are set to zero in the caller's page pool: cuDNN reads them, and they may hold NaN. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/backend/attention_backend.h"
#include "engine/backend/plan_cache.h"
#include "engine/cuda/device_context.h"
#include "engine/cuda/sdpa_description.h"
#include "engine/cuda/sdpa_graph.h"

namespace attnd {

class CudnnBackend final : public AttentionBackend {
 public:
  // UNAVAILABLE, in one line, where there is no such device or what it needs is missing.
  static absl::StatusOr<std::unique_ptr<CudnnBackend>> Make(int device);

  const BackendInfo& info() const override { return info_; }
  // Builds the plan, or finds it: only that tells.
  absl::Status CheckSupport(const AttentionProblem& problem) const override;
  absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(
      const AttentionProblem& problem) override;

  // Graphs built so far, refused ones among them.
  int64_t plans_built() const { return graphs_.builds(); }

 private:
  using GraphCache = PlanCache<SdpaDescription, SdpaGraph, SdpaDescriptionHash>;

  CudnnBackend(int device, BackendInfo info);
  GraphCache::Result GraphFor(const SdpaDescription& description) const;
  // A graph for the problem, and what it is of: `description` gets the out_dtype that runs.
  GraphCache::Result GraphFor(const AttentionProblem& problem, SdpaDescription& description) const;

  const BackendInfo info_;
  mutable DeviceContexts contexts_;
  mutable GraphCache graphs_;
};

}  // namespace attnd
