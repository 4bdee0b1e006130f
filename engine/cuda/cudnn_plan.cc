#include "engine/cuda/cudnn_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "engine/cuda/cudnn_call.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/workspace.h"

namespace attnd {
namespace {

// Floats of the scratch LSE, which the graph addresses by the description's strides.
int64_t LseElements(const AttentionProblem& p) { return *NumElements(p.lse_desc.shape); }

PlanWorkspace LayOut(const AttentionProblem& p, const SdpaDescription& d, const SdpaGraph& graph,
                     int64_t array_bytes) {
  PlanWorkspace w;
  WorkspaceLayout layout;
  w.graph = layout.Take(graph.workspace_bytes());
  w.arrays = layout.Take(array_bytes);
  w.lse = layout.Take(LseElements(p) * static_cast<int64_t>(sizeof(float)));
  if (d.out_dtype != p.out_dtype) {
    w.out = layout.Take(*NumElements(p.out_desc.shape) * SizeOf(d.out_dtype));
  }
  if (d.is_paged) {
    w.page_tables =
        layout.Take(2 * d.batch * d.pages_per_sequence * static_cast<int64_t>(sizeof(int32_t)));
    w.owned_rows =
        layout.Take((d.num_pages_k + d.num_pages_v) * static_cast<int64_t>(sizeof(int32_t)));
  }
  if (p.softmax_kind == SoftmaxKind::kOffByOne) {
    w.sink = layout.Take(p.num_heads * static_cast<int64_t>(sizeof(float)));
  }
  if (IsFloat8(d.dtype)) {
    w.fp8_amax = layout.Take(kMaxFp8Amax * kFp8Slot * static_cast<int64_t>(sizeof(float)));
  }
  w.bytes = layout.bytes();
  return w;
}

Strides InBytes(const Strides& s, DType dtype) {
  const int64_t size = SizeOf(dtype);
  return {s.batch * size, s.seq * size, s.head * size, s.dim * size};
}

}  // namespace

// One forward call.
struct CudnnPlan::Call {
  const AttentionProblem& problem;
  const ForwardBuffers& buffers;
  DeviceContext* context;
  Workspace workspace;
  RequestArrays arrays;

  template <typename T>
  T* At(int64_t offset) const {
    return workspace.At<T>(offset);
  }
  const std::byte* Start(const TensorView& view) const {
    return buffers.inputs[static_cast<int>(view.buffer)] + view.byte_offset;
  }
};

CudnnPlan::CudnnPlan(const AttentionProblem& problem, const SdpaDescription& description,
                     std::shared_ptr<const SdpaGraph> graph)
    : description_(description),
      graph_(std::move(graph)),
      arrays_(LayOutRequestArrays(description, problem)),
      out_dtype_(problem.out_dtype),
      workspace_(LayOut(problem, description, *graph_, arrays_.bytes)) {}

absl::Status CudnnPlan::Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) {
  absl::StatusOr<SdpaDescription> description = DescribeSdpa(problem);
  if (description.ok()) description->out_dtype = description_.out_dtype;
  if (!description.ok() || !(*description == description_) || problem.out_dtype != out_dtype_ ||
      !(LayOut(problem, description_, *graph_, LayOutRequestArrays(description_, problem).bytes) ==
        workspace_)) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the plan was built for another geometry");
  }
  auto* const context = static_cast<DeviceContext*>(buffers.queue);
  ATTND_RETURN_IF_ERROR(context->Use());
  ATTND_ASSIGN_OR_RETURN(std::span<std::byte> block,
                         context->Staging(static_cast<size_t>(arrays_.bytes)));
  Call call{problem, buffers, context, Workspace(buffers.workspace),
            FillRequestArrays(problem, description_, block)};
  if (static_cast<int64_t>(buffers.workspace.size()) < workspace_.bytes) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the workspace is smaller than the plan's");
  }
  if (description_.has_lengths || call.arrays.num_spans > 0 || IsFloat8(description_.dtype)) {
    ATTND_RETURN_IF_ERROR(context->Copy(call.At<std::byte>(workspace_.arrays), block.data(),
                                        static_cast<int64_t>(block.size())));
  }
  if (problem.softmax_kind == SoftmaxKind::kOffByOne) {
    ATTND_RETURN_IF_ERROR(context->Clear(call.At<float>(workspace_.sink),
                                         problem.num_heads * static_cast<int64_t>(sizeof(float))));
  }
  if (IsFloat8(description_.dtype)) {
    ATTND_RETURN_IF_ERROR(
        context->Clear(call.At<float>(workspace_.fp8_amax),
                       kMaxFp8Amax * kFp8Slot * static_cast<int64_t>(sizeof(float))));
  }
  if (call.arrays.any_pair) {
    ATTND_RETURN_IF_ERROR(PrepareKv(call));
    ATTND_RETURN_IF_ERROR(RunGraph(call));
  }
  return WriteEmpty(call);
}

absl::Status CudnnPlan::PrepareKv(Call& call) const {
  if (!description_.is_paged) return absl::OkStatus();
  const AttentionProblem& p = call.problem;
  const SdpaDescription& d = description_;
  int32_t* owned = nullptr;
  if (std::any_of(p.sequences.begin(), p.sequences.end(),
                  [&](const SequenceExtent& s) { return s.kv_len % p.page_size != 0; })) {
    owned = call.At<int32_t>(workspace_.owned_rows);
    const int64_t bytes = (d.num_pages_k + d.num_pages_v) * static_cast<int64_t>(sizeof(int32_t));
    ATTND_RETURN_IF_ERROR(call.context->Clear(owned, bytes));
  }
  int32_t* tables = call.At<int32_t>(workspace_.page_tables);
  PagedKv kv;
  auto side = [&](const TensorView& view, int64_t head_dim) {
    PagedSide s;
    s.pages = const_cast<std::byte*>(call.Start(view));  // Rows that belong to nobody.
    s.bytes = InBytes(view.strides, p.dtype);
    s.head_bytes = head_dim * SizeOf(p.dtype);
    return s;
  };
  kv.sides[0] = side(p.k, p.head_dim_qk);
  kv.sides[1] = side(p.v, p.head_dim_v);
  kv.sides[0].table = call.buffers.page_table_k;
  kv.sides[1].table = call.buffers.page_table_v;
  kv.sides[0].clean_table = tables;
  kv.sides[1].clean_table = tables + d.batch * d.pages_per_sequence;
  kv.sides[0].owned_rows = owned;
  kv.sides[1].owned_rows = owned == nullptr ? nullptr : owned + d.num_pages_k;
  kv.kv_lens = call.At<int32_t>(workspace_.arrays + arrays_.kv_lens);
  kv.batch = p.batch;
  kv.pages_per_sequence = p.pages_per_sequence;
  kv.clean_batch = d.batch;
  kv.clean_pages = d.pages_per_sequence;
  kv.page_size = p.page_size;
  kv.num_kv_heads = p.num_kv_heads;
  return CudaStatus(PreparePages(kv, call.context->stream()), "the page kernels");
}

absl::Status CudnnPlan::RunGraph(Call& call) const {
  const AttentionProblem& p = call.problem;
  const SdpaDescription& d = description_;
  float* scratch = call.At<float>(workspace_.lse);
  const bool direct = call.buffers.lse != nullptr && !LseInScratch(p, d);
  SdpaPointers pointers;
  pointers.q = call.Start(p.q);
  pointers.k = call.Start(p.k);
  pointers.v = call.Start(p.v);
  pointers.out = d.out_dtype == p.out_dtype ? call.buffers.out : call.At<std::byte>(workspace_.out);
  pointers.lse = direct ? call.buffers.lse : scratch;
  PointToArrays(call.At<const std::byte>(workspace_.arrays), arrays_, 0, pointers);
  pointers.page_table_k = call.At<int32_t>(workspace_.page_tables);
  pointers.page_table_v = pointers.page_table_k + d.batch * d.pages_per_sequence;
  pointers.fp8_amax = call.At<float>(workspace_.fp8_amax);
  pointers.bias = call.buffers.bias;
  pointers.sink = Sink(call);
  pointers.scale = static_cast<float>(p.scale);
  ATTND_RETURN_IF_ERROR(
      graph_->Enqueue(call.context->handle(), pointers, call.At<std::byte>(workspace_.graph)));
  return ConvertOutputs(call);
}

const float* CudnnPlan::Sink(const Call& call) const {
  switch (call.problem.softmax_kind) {
    case SoftmaxKind::kVanilla: return nullptr;
    case SoftmaxKind::kOffByOne: return call.At<float>(workspace_.sink);
    case SoftmaxKind::kLearnable: return call.buffers.softmax_offset;
  }
  return nullptr;
}

absl::Status CudnnPlan::ConvertOutputs(const Call& call) const {
  const AttentionProblem& p = call.problem;
  if (description_.out_dtype != p.out_dtype) {
    ATTND_RETURN_IF_ERROR(
        CudaStatus(WidenElements(description_.out_dtype, call.At<std::byte>(workspace_.out),
                                 reinterpret_cast<float*>(call.buffers.out),
                                 *NumElements(p.out_desc.shape), call.context->stream()),
                   "the O kernel"));
  }
  if (call.buffers.amax != nullptr) {
    ATTND_RETURN_IF_ERROR(CudaStatus(GatherFloats(call.At<float>(workspace_.fp8_amax), kFp8Slot,
                                                  call.buffers.amax, 2, call.context->stream()),
                                     "the amax kernel"));
  }
  if (call.buffers.lse == nullptr) return absl::OkStatus();
  const LseSegments segments{
      .segments = call.At<const LseSegment>(workspace_.arrays + arrays_.segments),
      .count = call.arrays.num_segments,
      .longest = call.arrays.longest_segment,
      .num_heads = p.num_heads,
      .by_row = call.At<float>(workspace_.lse),
      .lse = call.buffers.lse};
  return CudaStatus(LseFromRows(segments, call.context->stream()), "the LSE kernel");
}

absl::Status CudnnPlan::WriteEmpty(const Call& call) const {
  const AttentionProblem& p = call.problem;
  const EmptyRows rows{.spans = call.At<const RowSpan>(workspace_.arrays + arrays_.spans),
                       .num_spans = call.arrays.num_spans,
                       .longest_span = call.arrays.longest_span,
                       .num_heads = p.num_heads,
                       .head_dim = p.head_dim_v,
                       .element_bytes = SizeOf(p.out_dtype),
                       .out = call.buffers.out,
                       .lse = call.buffers.lse,
                       .sink = Sink(call)};
  return CudaStatus(WriteEmptyRows(rows, call.context->stream()), "the zero-row kernel");
}

}  // namespace attnd
