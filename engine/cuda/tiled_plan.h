// Plans of the tiled kernels: what cuDNN refuses, forward and backward.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"

namespace attnd {

inline constexpr std::string_view kTiledEngine = "cuda_tiled";

// UNIMPLEMENTED, with the field, for what the kernels of either pass refuse.
absl::Status CheckTiled(const AttentionProblem& problem);

// Byte offsets in a call's workspace.
struct TiledWorkspace {
  int64_t sequences = 0;
  int64_t alibi_slopes = 0;
  int64_t arrays_end = 0;  // Both arrays come from the host in one copy.
  int64_t rows = 0;        // tiled::RowStatistics, of LSE's shape; backward.
  int64_t bytes = 0;

  bool operator==(const TiledWorkspace&) const = default;
};

// For problems that CheckTiled passes. A call's problem must need the same workspace.
class TiledPlan final : public AttentionPlan {
 public:
  explicit TiledPlan(const AttentionProblem& problem);

  std::string_view engine() const override { return kTiledEngine; }
  int64_t workspace_bytes() const override { return workspace_.bytes; }

  // The queue must be idle but for copies: its small pinned memory is used.
  absl::Status Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) override;

 private:
  const TiledWorkspace workspace_;
};

// As TiledPlan, for problems that CheckGradientViews passes too.
class TiledBackwardPlan final : public BackwardPlan {
 public:
  explicit TiledBackwardPlan(const AttentionProblem& problem);

  std::string_view engine() const override { return kTiledEngine; }
  int64_t workspace_bytes() const override { return workspace_.bytes; }

  // The queue must be idle but for copies: its small pinned memory is used.
  absl::Status Backward(const AttentionProblem& problem, const BackwardBuffers& buffers) override;

 private:
  const TiledWorkspace workspace_;
};

}  // namespace attnd
