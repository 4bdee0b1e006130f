#include "engine/cuda/cudnn_backward_plan.h"

#include <utility>

#include "engine/core/status.h"
#include "engine/cuda/cudnn_call.h"
#include "engine/cuda/device_context.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/workspace.h"

namespace attnd {
namespace {

// A bias may hide whole rows, whose LSE is -inf; a mask's are never the graph's.
bool HidesRows(const SdpaDescription& d) { return d.bias_kind == BiasKind::kPostScale; }

BackwardWorkspace LayOut(const AttentionProblem& p, const SdpaDescription& d,
                         const SdpaGraph& graph, int64_t array_bytes) {
  constexpr int64_t kFloat = sizeof(float);
  BackwardWorkspace w;
  WorkspaceLayout layout;
  w.graph = layout.Take(graph.workspace_bytes());
  w.arrays = layout.Take(array_bytes);
  if (LseInScratch(p, d) || HidesRows(d)) {
    w.lse = layout.Take(*NumElements(p.lse_desc.shape) * kFloat);
  }
  if (p.out_dtype != d.dtype) {
    const int64_t bytes = *NumElements(p.out_desc.shape) * SizeOf(d.dtype);
    w.out = layout.Take(bytes);
    w.d_out = layout.Take(bytes);
  }
  if (p.softmax_kind == SoftmaxKind::kLearnable) {
    w.sink_partials = layout.Take(p.num_heads * kSinkPartials * kFloat);
  }
  if (IsFloat8(d.dtype)) w.fp8_amax = layout.Take(kMaxFp8Amax * kFp8Slot * kFloat);
  w.bytes = layout.bytes();
  return w;
}

}  // namespace

// One backward call.
struct CudnnBackwardPlan::Call {
  const AttentionProblem& problem;
  const BackwardBuffers& buffers;
  DeviceContext* context;
  Workspace workspace;
  RequestArrays arrays;
  // As the graph reads them.
  const std::byte* out = nullptr;
  const std::byte* d_out = nullptr;
  const float* lse = nullptr;

  const std::byte* Input(const TensorView& view) const {
    return buffers.inputs[static_cast<size_t>(view.buffer)] + view.byte_offset;
  }
  std::byte* Gradient(const TensorView& view) const {
    return buffers.grads[static_cast<size_t>(view.buffer)] + view.byte_offset;
  }
};

CudnnBackwardPlan::CudnnBackwardPlan(const AttentionProblem& p, const SdpaDescription& d,
                                     std::shared_ptr<const SdpaGraph> graph)
    : description_(d),
      graph_(std::move(graph)),
      arrays_(LayOutRequestArrays(d, p)),
      out_dtype_(p.out_dtype),
      workspace_(LayOut(p, d, *graph_, arrays_.bytes)) {}

absl::Status CudnnBackwardPlan::Backward(const AttentionProblem& problem,
                                         const BackwardBuffers& buffers) {
  const absl::StatusOr<SdpaDescription> description = DescribeSdpaBackward(problem);
  if (!description.ok() || !(*description == description_) || problem.out_dtype != out_dtype_ ||
      !(LayOut(problem, description_, *graph_, LayOutRequestArrays(description_, problem).bytes) ==
        workspace_) ||
      static_cast<int64_t>(buffers.workspace.size()) < workspace_.bytes) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the plan was built for another geometry");
  }
  auto* const context = static_cast<DeviceContext*>(buffers.queue);
  ATTND_RETURN_IF_ERROR(context->Use());
  ATTND_ASSIGN_OR_RETURN(std::span<std::byte> block,
                         context->Staging(static_cast<size_t>(arrays_.bytes)));
  Call call{problem, buffers, context, Workspace(buffers.workspace),
            FillRequestArrays(problem, description_, block)};
  if (!call.arrays.any_pair || !WritesAllGradients(problem)) {
    ATTND_RETURN_IF_ERROR(ClearGradients(call));
  }
  if (buffers.d_bias != nullptr) {  // cuDNN leaves out cells behind a mask.
    ATTND_RETURN_IF_ERROR(context->Clear(buffers.d_bias, *NumBytes(*problem.bias)));
  }
  if (description_.has_lengths || IsFloat8(description_.dtype)) {
    ATTND_RETURN_IF_ERROR(context->Copy(call.workspace.At<std::byte>(workspace_.arrays),
                                        block.data(), static_cast<int64_t>(block.size())));
  }
  if (!call.arrays.any_pair) {
    return buffers.d_softmax_offset == nullptr
               ? absl::OkStatus()
               : context->Clear(buffers.d_softmax_offset,
                                problem.num_heads * static_cast<int64_t>(sizeof(float)));
  }
  if (IsFloat8(description_.dtype)) {
    ATTND_RETURN_IF_ERROR(
        context->Clear(call.workspace.At<float>(workspace_.fp8_amax),
                       kMaxFp8Amax * kFp8Slot * static_cast<int64_t>(sizeof(float))));
  }
  ATTND_RETURN_IF_ERROR(PrepareInputs(call));
  ATTND_RETURN_IF_ERROR(RunParts(call));
  if (buffers.amax != nullptr) {
    ATTND_RETURN_IF_ERROR(
        CudaStatus(GatherFloats(call.workspace.At<float>(workspace_.fp8_amax), kFp8Slot,
                                buffers.amax, kMaxFp8Amax, context->stream()),
                   "the amax kernel"));
  }
  return SumSinkGradient(call);
}

// Slots of a packed gradient interleave, and some rows belong to nobody: all bytes at once.
absl::Status CudnnBackwardPlan::ClearGradients(const Call& call) const {
  for (size_t i = 0; i < call.buffers.grads.size(); ++i) {
    if (call.buffers.grads[i] == nullptr) continue;
    ATTND_RETURN_IF_ERROR(
        call.context->Clear(call.buffers.grads[i], *NumBytes(*call.problem.inputs[i])));
  }
  return absl::OkStatus();
}

absl::Status CudnnBackwardPlan::PrepareInputs(Call& call) const {
  const AttentionProblem& p = call.problem;
  const cudaStream_t stream = call.context->stream();
  call.out = call.buffers.out;
  call.d_out = call.buffers.d_out;
  call.lse = call.buffers.lse;
  if (out_dtype_ != description_.dtype) {
    const int64_t count = *NumElements(p.out_desc.shape);
    auto narrow = [&](const std::byte*& tensor, int64_t at) {
      auto* narrowed = call.workspace.At<std::byte>(at);
      const auto* from = reinterpret_cast<const float*>(std::exchange(tensor, narrowed));
      return CudaStatus(NarrowElements(description_.dtype, from, narrowed, count, stream),
                        "the O kernel");
    };
    ATTND_RETURN_IF_ERROR(narrow(call.out, workspace_.out));
    ATTND_RETURN_IF_ERROR(narrow(call.d_out, workspace_.d_out));
  }
  if (HidesRows(description_)) {
    auto* finite = call.workspace.At<float>(workspace_.lse);
    call.lse = finite;
    return CudaStatus(
        RaiseMinusInfinity(call.buffers.lse, finite, *NumElements(p.lse_desc.shape), stream),
        "the LSE kernel");
  }
  if (!LseInScratch(p, description_)) return absl::OkStatus();
  auto* by_row = call.workspace.At<float>(workspace_.lse);
  call.lse = by_row;
  const LseSegments segments{
      .segments = call.workspace.At<const LseSegment>(workspace_.arrays + arrays_.segments),
      .count = call.arrays.num_segments,
      .longest = call.arrays.longest_segment,
      .num_heads = p.num_heads,
      .by_row = by_row,
      .lse = const_cast<float*>(call.buffers.lse)};
  return CudaStatus(LseToRows(segments, stream), "the LSE kernel");
}

absl::Status CudnnBackwardPlan::RunParts(const Call& call) const {
  const AttentionProblem& p = call.problem;
  const SdpaDescription& d = description_;
  const SdpaParts parts = PartsOf(d, p);
  for (int64_t part = 0; part < parts.batch * parts.heads; ++part) {
    const int64_t first = part / parts.heads * d.batch;  // Slot.
    const int64_t head = part % parts.heads * d.num_heads;
    const int64_t kv_head = part % parts.heads * d.num_kv_heads;
    // Elements from a tensor's first to the part's first.
    auto at = [&](const Strides& s, int64_t of_head, bool ragged) {
      return (ragged ? 0 : first * s.batch) + of_head * s.head;
    };
    const int64_t q = at(p.q.strides, head, d.ragged_q) * SizeOf(d.dtype);
    const int64_t k = at(p.k.strides, kv_head, d.ragged_kv) * SizeOf(d.dtype);
    const int64_t v = at(p.v.strides, kv_head, d.ragged_kv) * SizeOf(d.dtype);
    const int64_t out = at(p.out.strides, head, d.ragged_q) * SizeOf(d.dtype);
    SdpaPointers pointers;
    pointers.q = call.Input(p.q) + q;
    pointers.k = call.Input(p.k) + k;
    pointers.v = call.Input(p.v) + v;
    pointers.out = const_cast<std::byte*>(call.out) + out;
    pointers.d_out = call.d_out + out;
    pointers.lse = const_cast<float*>(call.lse) + (d.ragged_q ? 0 : first * p.lse.batch) +
                   head * d.lse.head;  // As the graph has it, but for the part's batch stride.
    pointers.bias = call.buffers.bias;
    pointers.dq = call.Gradient(p.q) + q;
    pointers.dk = call.Gradient(p.k) + k;
    pointers.dv = call.Gradient(p.v) + v;
    pointers.d_bias = call.buffers.d_bias;
    PointToArrays(call.workspace.At<const std::byte>(workspace_.arrays), arrays_, first, pointers);
    pointers.fp8_amax = call.workspace.At<float>(workspace_.fp8_amax);
    pointers.scale = static_cast<float>(p.scale);
    ATTND_RETURN_IF_ERROR(graph_->Enqueue(call.context->handle(), pointers,
                                          call.workspace.At<std::byte>(workspace_.graph)));
  }
  return absl::OkStatus();
}

absl::Status CudnnBackwardPlan::SumSinkGradient(const Call& call) const {
  if (call.buffers.d_softmax_offset == nullptr) return absl::OkStatus();
  const AttentionProblem& p = call.problem;
  const SdpaDescription& d = description_;
  SinkGradient sink;
  sink.dtype = d.dtype;
  sink.out = call.out;
  sink.d_out = call.d_out;
  sink.lse = call.lse;
  sink.sink = call.buffers.softmax_offset;
  sink.d_sink = call.buffers.d_softmax_offset;
  sink.partials = call.workspace.At<float>(workspace_.sink_partials);
  sink.out_strides = p.out.strides;
  sink.lse_strides = d.lse;
  if (!d.ragged_q) sink.lse_strides.batch = p.lse.batch;
  if (d.ragged_q) {
    sink.q_lens = call.workspace.At<const int32_t>(workspace_.arrays + arrays_.q_lens);
    sink.out_offsets = call.workspace.At<const int64_t>(workspace_.arrays + arrays_.out_offsets);
    sink.lse_offsets = call.workspace.At<const int64_t>(workspace_.arrays + arrays_.lse_offsets);
  }
  sink.splits_heads = d.splits_heads;
  sink.batch = p.batch;
  sink.rows = p.max_seqlen_q;
  sink.heads = p.num_heads;
  sink.head_dim = p.head_dim_v;
  return CudaStatus(SumSinkGradients(sink, call.context->stream()), "the sink kernel");
}

}  // namespace attnd
