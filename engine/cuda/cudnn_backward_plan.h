// A backward plan of the cuDNN backend, as CudnnPlan is for forward.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/cuda/request_arrays.h"
#include "engine/cuda/sdpa_description.h"
#include "engine/cuda/sdpa_graph.h"

namespace attnd {

// Byte offsets in a call's workspace.
struct BackwardWorkspace {
  int64_t graph = 0;
  int64_t arrays = 0;  // RequestArrayLayout
  int64_t lse = 0;     // FLOAT32, where the graph cannot read the caller's.
  int64_t out = 0;     // O and dO in dtype, where they came in FLOAT32.
  int64_t d_out = 0;
  int64_t sink_partials = 0;  // FLOAT32 [h, kSinkPartials]
  int64_t fp8_amax = 0;       // FLOAT32 [kMaxFp8Amax], kFp8Slot apart
  int64_t bytes = 0;

  bool operator==(const BackwardWorkspace&) const = default;
};

class CudnnBackwardPlan final : public BackwardPlan {
 public:
  // `description` is DescribeSdpaBackward's, and `graph` was built for it.
  CudnnBackwardPlan(const AttentionProblem& problem, const SdpaDescription& description,
                    std::shared_ptr<const SdpaGraph> graph);

  std::string_view engine() const override { return EngineName(description_); }
  int64_t workspace_bytes() const override { return workspace_.bytes; }

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
  const DType out_dtype_;
  const BackwardWorkspace workspace_;
};

}  // namespace attnd
