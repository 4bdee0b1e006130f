// A backward plan of the cuDNN backend, as CudnnPlan is for forward.
#pragma once

#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/cuda/request_arrays.h"
#include "engine/cuda/sdpa_description.h"
#include "engine/cuda/sdpa_graph.h"

namespace attnd {

class CudnnBackwardPlan final : public BackwardPlan {
 public:
  // `description` is DescribeSdpaBackward's, and `graph` was built for it.
  CudnnBackwardPlan(const AttentionProblem& problem, const SdpaDescription& description,
                    std::shared_ptr<const SdpaGraph> graph);

  std::string_view engine() const override { return EngineName(description_); }
  int64_t workspace_bytes() const override { return workspace_bytes_; }

  // The queue must be idle but for copies: its small pinned memory is used.
  absl::Status Backward(const AttentionProblem& problem, const BackwardBuffers& buffers) override;

 private:
  struct Call;

  absl::Status ClearGradients(const Call& call) const;
  absl::Status PrepareInputs(Call& call) const;
  absl::Status RunParts(const Call& call) const;
  absl::Status SumSinkGradient(const Call& call) const;

  const SdpaDescription description_;
  const std::shared_ptr<const SdpaGraph> graph_;
  const RequestArrayLayout arrays_;
  const int64_t batch_;
  const DType out_dtype_;
  // Byte offsets in the workspace.
  int64_t graph_at_ = 0;
  int64_t arrays_at_ = 0;
  int64_t lse_at_ = 0;  // FLOAT32 [row, head], where the graph reads it so.
  int64_t out_at_ = 0;  // O and dO in dtype, where they came in FLOAT32.
  int64_t d_out_at_ = 0;
  int64_t sink_partials_at_ = 0;  // FLOAT32 [h, kSinkPartials]
  int64_t fp8_amax_at_ = 0;       // FLOAT32 [kMaxFp8Amax], kFp8Slot apart
  int64_t workspace_bytes_ = 0;
};

}  // namespace attnd
