// The calls' tensors lie anywhere in the device's arena: a graph gets the lowest address of each
// kind, and offsets from there.
#include "engine/cuda/joint_plan.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "engine/core/status.h"
#include "engine/cuda/cudnn_call.h"
#include "engine/cuda/device_context.h"
#include "engine/cuda/joint_description.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/request_arrays.h"
#include "engine/cuda/workspace.h"

namespace attnd {
namespace {

// Byte offsets in a run's workspace.
struct JointWorkspace {
  int64_t graph = 0;
  int64_t arrays = 0;  // RequestArrayLayout
  int64_t lse = 0;     // FLOAT32: that of each call in turn, as the graph has it.
  int64_t bytes = 0;
};

int64_t LseElements(const AttentionProblem& p) { return *NumElements(p.lse_desc.shape); }

JointWorkspace LayOut(const JointGraph& graph, std::span<const PlacedCall> calls) {
  JointWorkspace w;
  WorkspaceLayout layout;
  w.graph = layout.Take(graph.graph->workspace_bytes());
  w.arrays = layout.Take(LayOutRequestArrays(graph.description, calls).bytes);
  int64_t lse = 0;
  for (const PlacedCall& call : calls) lse += LseElements(*call.problem);
  w.lse = layout.Take(lse * static_cast<int64_t>(sizeof(float)));
  w.bytes = layout.bytes();
  return w;
}

template <typename Call>
std::vector<PlacedCall> Unplaced(std::span<const Call> calls) {
  std::vector<PlacedCall> placed;
  placed.reserve(calls.size());
  for (const Call& call : calls) placed.push_back({.problem = call.problem});
  return placed;
}

int64_t WorkspaceOfOne(const AttentionProblem& problem, const JointGraph& graph) {
  const PlacedCall call{.problem = &problem};
  return LayOut(graph, {&call, 1}).bytes;
}

// The lowest of the calls' addresses of a tensor; each call's distance to it, in elements of T or
// of `element_bytes`, goes into its field.
template <typename Byte, typename AddressOf>
Byte* Place(std::vector<PlacedCall>& calls, int64_t PlacedCall::*field, int64_t element_bytes,
            AddressOf address_of) {
  Byte* base = nullptr;
  for (size_t i = 0; i < calls.size(); ++i) {
    Byte* const address = address_of(i);
    if (base == nullptr || (address != nullptr && address < base)) base = address;
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    if (Byte* const address = address_of(i); address != nullptr) {
      calls[i].*field = (address - base) / element_bytes;
    }
  }
  return base;
}

// What the two passes do alike: a graph, its arrays, and the LSE.
class JointCalls {
 public:
  JointCalls(const JointGraph& graph, std::vector<PlacedCall> calls)
      : graph_(graph), calls_(std::move(calls)), layout_(LayOut(graph_, calls_)) {}

  const SdpaDescription& description() const { return graph_.description; }
  int64_t workspace_bytes() const { return layout_.bytes; }
  std::vector<PlacedCall>& calls() { return calls_; }
  DeviceContext& context() const { return *context_; }
  const RequestArrays& arrays() const { return arrays_; }

  absl::Status Begin(std::span<std::byte> workspace, DeviceQueue* queue) {
    if (static_cast<int64_t>(workspace.size()) < layout_.bytes) {
      return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                       "the workspace is smaller than the plan's");
    }
    context_ = static_cast<DeviceContext*>(queue);
    workspace_.emplace(workspace);
    return context_->Use();
  }

  // `lse_of` gives a call's LSE as its caller has it; null: not wanted.
  template <typename LseOf>
  void PlaceLse(LseOf lse_of) {
    lse_output_ = Place<std::byte>(calls_, &PlacedCall::lse_output, sizeof(float), [&](size_t i) {
      calls_[i].has_lse = lse_of(i) != nullptr;
      return reinterpret_cast<std::byte*>(lse_of(i));
    });
    std::vector<std::byte*> by_row;
    auto* scratch = workspace_->At<float>(layout_.lse);
    for (size_t i = 0; i < calls_.size(); ++i) {
      const AttentionProblem& p = *calls_[i].problem;
      const bool direct = calls_[i].has_lse && !LseInScratch(p, description());
      by_row.push_back(reinterpret_cast<std::byte*>(direct ? lse_of(i) : scratch));
      scratch += LseElements(p);
    }
    lse_ = Place<std::byte>(calls_, &PlacedCall::lse, sizeof(float),
                            [&](size_t i) { return by_row[i]; });
  }

  // After all calls were placed.
  absl::Status CopyArrays() {
    array_layout_ = LayOutRequestArrays(description(), calls_);
    ATTND_ASSIGN_OR_RETURN(std::span<std::byte> block,
                           context_->Staging(static_cast<size_t>(array_layout_.bytes)));
    arrays_ = FillRequestArrays(calls_, description(), block);
    return context_->Copy(workspace_->At<std::byte>(layout_.arrays), block.data(),
                          array_layout_.bytes);
  }

  LseSegments Segments() const {
    return {.segments = At<LseSegment>(array_layout_.segments),
            .count = arrays_.num_segments,
            .longest = arrays_.longest_segment,
            .num_heads = calls_[0].problem->num_heads,
            .by_row = reinterpret_cast<float*>(lse_),
            .lse = reinterpret_cast<float*>(lse_output_)};
  }

  absl::Status RunGraph(SdpaPointers pointers) const {
    pointers.lse = reinterpret_cast<float*>(lse_);
    PointToArrays(workspace_->At<const std::byte>(layout_.arrays), array_layout_, 0, pointers);
    pointers.scale = static_cast<float>(calls_[0].problem->scale);
    return graph_.graph->Enqueue(context_->handle(), pointers,
                                 workspace_->At<std::byte>(layout_.graph));
  }

  absl::Status WriteEmpty(std::byte* out) const {
    const AttentionProblem& p = *calls_[0].problem;
    const EmptyRows rows{.spans = At<RowSpan>(array_layout_.spans),
                         .num_spans = arrays_.num_spans,
                         .longest_span = arrays_.longest_span,
                         .num_heads = p.num_heads,
                         .head_dim = p.head_dim_v,
                         .element_bytes = SizeOf(p.out_dtype),
                         .out = out,
                         .lse = reinterpret_cast<float*>(lse_output_)};
    return CudaStatus(WriteEmptyRows(rows, context_->stream()), "the zero-row kernel");
  }

 private:
  template <typename T>
  const T* At(int64_t in_arrays) const {
    return workspace_->At<const T>(layout_.arrays + in_arrays);
  }

  const JointGraph& graph_;
  std::vector<PlacedCall> calls_;
  const JointWorkspace layout_;
  DeviceContext* context_ = nullptr;
  std::optional<Workspace> workspace_;
  RequestArrayLayout array_layout_;
  RequestArrays arrays_;
  std::byte* lse_output_ = nullptr;
  std::byte* lse_ = nullptr;
};

using ViewOf = TensorView AttentionProblem::*;

class JointForward final : public JointRun {
 public:
  JointForward(const JointGraph& graph, std::span<const ForwardCall> calls)
      : given_(calls.begin(), calls.end()), calls_(graph, Unplaced(calls)) {}

  int64_t workspace_bytes() const override { return calls_.workspace_bytes(); }

  absl::Status Run(std::span<std::byte> workspace, DeviceQueue* queue) override {
    ATTND_RETURN_IF_ERROR(calls_.Begin(workspace, queue));
    SdpaPointers pointers;
    pointers.q = PlaceInput(&AttentionProblem::q, &PlacedCall::q);
    pointers.k = PlaceInput(&AttentionProblem::k, &PlacedCall::k);
    pointers.v = PlaceInput(&AttentionProblem::v, &PlacedCall::v);
    std::byte* const out = Place<std::byte>(calls_.calls(), &PlacedCall::out, ElementBytes(),
                                            [&](size_t i) { return given_[i].buffers.out; });
    pointers.out = out;
    calls_.PlaceLse([&](size_t i) { return given_[i].buffers.lse; });
    ATTND_RETURN_IF_ERROR(calls_.CopyArrays());
    if (calls_.arrays().any_pair) {
      ATTND_RETURN_IF_ERROR(calls_.RunGraph(pointers));
      ATTND_RETURN_IF_ERROR(
          CudaStatus(LseFromRows(calls_.Segments(), calls_.context().stream()), "the LSE kernel"));
    }
    return calls_.WriteEmpty(out);
  }

 private:
  int64_t ElementBytes() const { return SizeOf(calls_.description().dtype); }

  const std::byte* PlaceInput(ViewOf view_of, int64_t PlacedCall::*field) {
    return Place<const std::byte>(calls_.calls(), field, ElementBytes(), [&](size_t i) {
      const TensorView& view = given_[i].problem->*view_of;
      const std::byte* start = given_[i].buffers.inputs[static_cast<size_t>(view.buffer)];
      return start == nullptr ? nullptr : start + view.byte_offset;
    });
  }

  const std::vector<ForwardCall> given_;
  JointCalls calls_;
};

class JointBackward final : public JointRun {
 public:
  JointBackward(const JointGraph& graph, std::span<const BackwardCall> calls)
      : given_(calls.begin(), calls.end()), calls_(graph, Unplaced(calls)) {}

  int64_t workspace_bytes() const override { return calls_.workspace_bytes(); }

  absl::Status Run(std::span<std::byte> workspace, DeviceQueue* queue) override {
    ATTND_RETURN_IF_ERROR(calls_.Begin(workspace, queue));
    SdpaPointers pointers;
    using P = AttentionProblem;
    using C = PlacedCall;
    pointers.q = PlaceTensor(&P::q, &C::q, &BackwardBuffers::inputs);
    pointers.k = PlaceTensor(&P::k, &C::k, &BackwardBuffers::inputs);
    pointers.v = PlaceTensor(&P::v, &C::v, &BackwardBuffers::inputs);
    pointers.dq = PlaceTensor(&P::q, &C::dq, &BackwardBuffers::grads);
    pointers.dk = PlaceTensor(&P::k, &C::dk, &BackwardBuffers::grads);
    pointers.dv = PlaceTensor(&P::v, &C::dv, &BackwardBuffers::grads);
    pointers.out = const_cast<std::byte*>(Place<const std::byte>(
        calls_.calls(), &C::out, ElementBytes(), [&](size_t i) { return given_[i].buffers.out; }));
    pointers.d_out = Place<const std::byte>(calls_.calls(), &C::d_out, ElementBytes(),
                                            [&](size_t i) { return given_[i].buffers.d_out; });
    calls_.PlaceLse([&](size_t i) { return const_cast<float*>(given_[i].buffers.lse); });
    ATTND_RETURN_IF_ERROR(calls_.CopyArrays());
    ATTND_RETURN_IF_ERROR(ClearGradients());
    if (!calls_.arrays().any_pair) return absl::OkStatus();
    ATTND_RETURN_IF_ERROR(
        CudaStatus(LseToRows(calls_.Segments(), calls_.context().stream()), "the LSE kernel"));
    return calls_.RunGraph(pointers);
  }

 private:
  int64_t ElementBytes() const { return SizeOf(calls_.description().dtype); }

  template <typename Byte, size_t kBuffers>
  Byte* PlaceTensor(ViewOf view_of, int64_t PlacedCall::*field,
                    std::array<Byte*, kBuffers> BackwardBuffers::*pointers) {
    return Place<Byte>(calls_.calls(), field, ElementBytes(), [&](size_t i) {
      const TensorView& view = given_[i].problem->*view_of;
      Byte* const start = (given_[i].buffers.*pointers)[static_cast<size_t>(view.buffer)];
      return start == nullptr ? nullptr : start + view.byte_offset;
    });
  }

  // Of calls with rows that the graph does not write.
  absl::Status ClearGradients() const {
    for (const BackwardCall& call : given_) {
      if (calls_.arrays().any_pair && WritesAllGradients(*call.problem)) continue;
      for (size_t i = 0; i < call.buffers.grads.size(); ++i) {
        if (call.buffers.grads[i] == nullptr) continue;
        ATTND_RETURN_IF_ERROR(
            calls_.context().Clear(call.buffers.grads[i], *NumBytes(*call.problem->inputs[i])));
      }
    }
    return absl::OkStatus();
  }

  const std::vector<BackwardCall> given_;
  JointCalls calls_;
};

// A plan runs what it was built for; another problem would leave its slots or its graph.
absl::Status CheckProblem(const AttentionProblem& problem, const JointGraph& graph) {
  const absl::StatusOr<SdpaDescription> d = DescribeJoint(problem, graph.description.is_backward);
  if (d.ok() && *d == graph.description) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                   "the plan was built for another geometry");
}

}  // namespace

JointForwardPlan::JointForwardPlan(const AttentionProblem& problem, JointGraph graph)
    : graph_(std::move(graph)),
      terms_(TermsOf(problem, graph_.description)),
      workspace_bytes_(WorkspaceOfOne(problem, graph_)) {}

absl::Status JointForwardPlan::Forward(const AttentionProblem& problem,
                                       const ForwardBuffers& buffers) {
  ATTND_RETURN_IF_ERROR(CheckProblem(problem, graph_));
  const ForwardCall call{&problem, buffers};
  return JointForward(graph_, {&call, 1}).Run(buffers.workspace, buffers.queue);
}

std::unique_ptr<JointRun> JointForwardPlan::Join(std::span<const ForwardCall> calls) {
  return std::make_unique<JointForward>(graph_, calls);
}

JointBackwardPlan::JointBackwardPlan(const AttentionProblem& problem, JointGraph graph)
    : graph_(std::move(graph)),
      terms_(TermsOf(problem, graph_.description)),
      workspace_bytes_(WorkspaceOfOne(problem, graph_)) {}

absl::Status JointBackwardPlan::Backward(const AttentionProblem& problem,
                                         const BackwardBuffers& buffers) {
  ATTND_RETURN_IF_ERROR(CheckProblem(problem, graph_));
  const BackwardCall call{&problem, buffers};
  return JointBackward(graph_, {&call, 1}).Run(buffers.workspace, buffers.queue);
}

std::unique_ptr<JointRun> JointBackwardPlan::Join(std::span<const BackwardCall> calls) {
  return std::make_unique<JointBackward>(graph_, calls);
}

}  // namespace attnd
