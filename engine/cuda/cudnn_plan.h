// A plan of the cuDNN backend: a shared, compiled graph, and the geometry of one problem.
#pragma once

#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/cuda/device_context.h"
#include "engine/cuda/request_arrays.h"
#include "engine/cuda/sdpa_description.h"
#include "engine/cuda/sdpa_graph.h"

namespace attnd {

// Byte offsets in a call's workspace; all multiples of 256.
struct PlanWorkspace {
  int64_t graph = 0;
  int64_t arrays = 0;       // RequestArrayLayout
  int64_t lse = 0;          // FLOAT32: LSE where the caller wants none, or as the graph writes it.
  int64_t out = 0;          // O where the graph cannot write the problem's type itself.
  int64_t page_tables = 0;  // INT32 [2, batch, pages_per_sequence] of the description
  int64_t owned_rows = 0;   // INT32 [num_pages_k + num_pages_v]
  int64_t sink = 0;         // FLOAT32 [h]: zeros, where the softmax is OFF_BY_ONE.
  int64_t fp8_amax = 0;     // FLOAT32 [kMaxFp8Amax], kFp8Slot apart
  int64_t bytes = 0;

  bool operator==(const PlanWorkspace&) const = default;
};

class CudnnPlan final : public AttentionPlan {
 public:
  CudnnPlan(const AttentionProblem& problem, const SdpaDescription& description,
            std::shared_ptr<const SdpaGraph> graph);

  std::string_view engine() const override { return EngineName(description_); }
  int64_t workspace_bytes() const override { return workspace_.bytes; }

  // The queue must be idle but for copies: its small pinned memory is used.
  absl::Status Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) override;

 private:
  struct Call;

  absl::Status PrepareKv(Call& call) const;
  absl::Status RunGraph(Call& call) const;
  absl::Status ConvertOutputs(const Call& call) const;
  absl::Status WriteEmpty(const Call& call) const;
  const float* Sink(const Call& call) const;  // [h] on the device; null: none.

  const SdpaDescription description_;
  const std::shared_ptr<const SdpaGraph> graph_;
  const RequestArrayLayout arrays_;
  const DType out_dtype_;
  PlanWorkspace workspace_;
};

}  // namespace attnd
