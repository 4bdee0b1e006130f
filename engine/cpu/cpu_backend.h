// Attention on the CPU: the tiled path that serves, and the reference loop behind the same
// interface, so that one conformance suite runs on both.
//
// Both compute every floating point type with any strides, THD, paged K and V, GQA, causal masks,
// windows, soft cap, biases, sinks and dropout, and the gradients of the problems that
// CheckGradientViews passes. FP8 has no dense bias; S and dP stay in float32, so that scale_s,
// descale_s, scale_d_p and descale_d_p have no effect.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/backend/attention_backend.h"
#include "engine/cpu/thread_team.h"

namespace attnd {

// Thread-safe; its plans share one team of threads and take turns on it.
class CpuBackend : public AttentionBackend {
 public:
  // `threads` counts the thread that calls Forward; 0: one per hardware thread.
  explicit CpuBackend(int threads);

  const BackendInfo& info() const override { return info_; }
  absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(
      const AttentionProblem& problem) override;
  absl::StatusOr<std::unique_ptr<BackwardPlan>> BuildBackwardPlan(
      const AttentionProblem& problem) override;

 private:
  const BackendInfo info_;
  ThreadTeam team_;
};

// Runs on the calling thread.
class ReferenceBackend : public AttentionBackend {
 public:
  ReferenceBackend();

  const BackendInfo& info() const override { return info_; }
  absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(
      const AttentionProblem& problem) override;
  absl::StatusOr<std::unique_ptr<BackwardPlan>> BuildBackwardPlan(
      const AttentionProblem& problem) override;

 private:
  const BackendInfo info_;
};

}  // namespace attnd
