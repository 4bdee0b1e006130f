#include "client/cli/local_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/core/gradient_views.h"
#include "engine/core/layout.h"
#include "engine/core/status.h"
#include "engine/cpu/reference_attention.h"

namespace attnd::cli {
namespace {

// Enum values equal the proto's, and so do Buffer and the field numbers of QkvBuffers, less one.
DType ToDType(v1::DataType dtype) { return static_cast<DType>(dtype); }

absl::StatusOr<Buffer> ToBuffer(const std::string& name) {
  for (int i = 0; i < kNumInputBuffers; ++i) {
    const auto buffer = static_cast<Buffer>(i);
    if (Name(buffer) == std::string_view(name)) return buffer;
  }
  return absl::InvalidArgumentError(absl::StrCat("spec.views names no buffer: '", name, "'"));
}

TensorDesc ToDesc(const v1::Tensor& tensor) {
  return {ToDType(tensor.dtype()), {tensor.shape().begin(), tensor.shape().end()}};
}

absl::StatusOr<RequestedView> ToView(const v1::View& view) {
  ATTND_ASSIGN_OR_RETURN(const Buffer buffer, ToBuffer(view.buffer()));
  RequestedView made{
      buffer, view.byte_offset(), {view.strides().begin(), view.strides().end()}, {}};
  if (view.has_group_stride()) made.group_stride = view.group_stride();
  return made;
}

Fp8Scales ToFp8Scales(const v1::Fp8Scales& from) {
  Fp8Scales to;
  for (const Fp8ScaleField& scale : kFp8ScaleFields) {
    const auto* field = v1::Fp8Scales::descriptor()->FindFieldByName(std::string(scale.name));
    const google::protobuf::Reflection& reflection = *from.GetReflection();
    if (reflection.HasField(from, field)) to.*scale.member = reflection.GetFloat(from, field);
  }
  return to;
}

// The fields that this program's options can set.
absl::StatusOr<AttentionSpec> ToSpec(const v1::AttentionSpec& from) {
  AttentionSpec to;
  to.layout = static_cast<Layout>(from.layout());
  to.dtype = ToDType(from.dtype());
  if (from.has_batch()) to.batch = from.batch();
  if (from.has_max_seqlen_q()) to.max_seqlen_q = from.max_seqlen_q();
  if (from.has_max_seqlen_kv()) to.max_seqlen_kv = from.max_seqlen_kv();
  if (from.has_num_heads()) to.num_heads = from.num_heads();
  if (from.has_num_kv_heads()) to.num_kv_heads = from.num_kv_heads();
  if (from.has_head_dim_qk()) to.head_dim_qk = from.head_dim_qk();
  if (from.has_head_dim_v()) to.head_dim_v = from.head_dim_v();
  if (from.has_page_size()) to.page_size = from.page_size();
  if (from.has_scale()) to.scale = from.scale();
  if (from.has_logit_softcap()) to.logit_softcap = from.logit_softcap();
  to.causal = static_cast<Causal>(from.causal());
  if (from.window().has_left()) to.window_left = from.window().left();
  if (from.window().has_right()) to.window_right = from.window().right();
  to.window_alignment = static_cast<Alignment>(from.window_alignment());
  to.bias_kind = static_cast<BiasKind>(from.bias_kind());
  if (from.has_alibi()) {
    to.alibi = AlibiShard{from.alibi().head_offset(), from.alibi().total_heads()};
  }
  to.softmax_kind = static_cast<SoftmaxKind>(from.softmax_kind());
  if (from.has_dropout()) {
    const v1::Dropout& dropout = from.dropout();
    to.dropout = Dropout{dropout.probability(), dropout.seed(), dropout.offset()};
  }
  if (from.has_fp8()) to.fp8 = ToFp8Scales(from.fp8());
  if (from.has_views()) {
    ATTND_ASSIGN_OR_RETURN(RequestedView q, ToView(from.views().q()));
    ATTND_ASSIGN_OR_RETURN(RequestedView k, ToView(from.views().k()));
    ATTND_ASSIGN_OR_RETURN(RequestedView v, ToView(from.views().v()));
    to.views = {std::move(q), std::move(k), std::move(v)};
  }
  return to;
}

Sequences ToSequences(const v1::Sequences& from) {
  Sequences to;
  to.cu_seqlens_q.assign(from.cu_seqlens_q().begin(), from.cu_seqlens_q().end());
  to.cu_seqlens_kv.assign(from.cu_seqlens_kv().begin(), from.cu_seqlens_kv().end());
  to.cu_seqlens_q_padded.assign(from.cu_seqlens_q_padded().begin(),
                                from.cu_seqlens_q_padded().end());
  to.cu_seqlens_kv_padded.assign(from.cu_seqlens_kv_padded().begin(),
                                 from.cu_seqlens_kv_padded().end());
  if (from.has_page_table_k()) to.page_table_k = ToDesc(from.page_table_k());
  if (from.has_page_table_v()) to.page_table_v = ToDesc(from.page_table_v());
  return to;
}

template <typename Request>
InputDescs ToInputs(const Request& request) {
  InputDescs to;
  const v1::QkvBuffers& from = request.inputs();
  const auto set = [&](Buffer buffer, bool present, const v1::Tensor& tensor) {
    if (present) to.buffers[static_cast<size_t>(buffer)] = ToDesc(tensor);
  };
  set(Buffer::kQkv, from.has_qkv(), from.qkv());
  set(Buffer::kQ, from.has_q(), from.q());
  set(Buffer::kKv, from.has_kv(), from.kv());
  set(Buffer::kK, from.has_k(), from.k());
  set(Buffer::kV, from.has_v(), from.v());
  if (request.has_bias()) to.bias = ToDesc(request.bias());
  if (request.has_softmax_offset()) to.softmax_offset = ToDesc(request.softmax_offset());
  return to;
}

// The line that the server's answer would become: code, sentence, field and reason.
absl::Status Explain(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  const std::string field = ErrorField(status);
  std::string line = absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  if (!reason.empty()) {
    absl::StrAppend(&line, " (", field.empty() ? "" : absl::StrCat("field ", field, ", "),
                    "reason ", reason, ")");
  }
  return absl::Status(status.code(), line);
}

template <typename Request>
absl::StatusOr<AttentionProblem> ResolveRequest(const Request& request, DType out_dtype) {
  ATTND_ASSIGN_OR_RETURN(const AttentionSpec spec, ToSpec(request.spec()));
  absl::StatusOr<AttentionProblem> problem =
      Resolve(spec, ToSequences(request.sequences()), ToInputs(request),
              {.out_dtype = out_dtype, .derive_missing_shapes = true});
  if (!problem.ok()) return Explain(problem.status());
  return problem;
}

constexpr double kFp8LseBound = 2e-3;

double OutBound(const AttentionProblem& problem, DType out_dtype) {
  switch (IsFloat8(problem.dtype) ? out_dtype : problem.dtype) {
    case DType::kFloat8E4M3: return 4e-2;
    case DType::kFloat8E5M2: return 8e-2;
    case DType::kFloat16: return 2e-3;
    case DType::kBFloat16: return 1.5e-2;
    default: return 1e-6 * std::sqrt(static_cast<double>(problem.head_dim_qk));
  }
}

// `got` is stored times `scale`.
double RelativeRms(const v1::Tensor& got, double scale, const std::vector<float>& expected) {
  double difference = 0, reference = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = LoadFloat(got.dtype(), got.data().data(), static_cast<int64_t>(i)) / scale;
    difference += (value - expected[i]) * (value - expected[i]);
    reference += static_cast<double>(expected[i]) * expected[i];
  }
  if (difference == 0) return 0;
  return std::sqrt(difference / (reference > 0 ? reference : 1));
}

// Sets the LSE's error and bound. NaN anywhere makes the error NaN or infinite, never small.
void CompareLse(const v1::Tensor& got, const std::vector<float>& expected, double lse_bound,
                CheckResult* result) {
  double error = 0, magnitude = 1;
  for (size_t i = 0; i < expected.size(); ++i) {
    const float value = LoadFloat(got.dtype(), got.data().data(), static_cast<int64_t>(i));
    if (std::isfinite(expected[i])) magnitude = std::max<double>(magnitude, std::abs(expected[i]));
    if (value == expected[i]) continue;  // -inf meets -inf.
    const double difference = std::abs(static_cast<double>(value) - expected[i]);
    error = std::isnan(difference) ? std::numeric_limits<double>::infinity()
                                   : std::max(error, difference);
  }
  result->lse_error = error;
  result->lse_bound = lse_bound * magnitude;
}

// RMS of the difference over that of the reference, which counts as at least 0.1.
double GradientRms(const v1::Tensor& got, const HostTensor& expected) {
  double difference = 0, reference = 0;
  const int64_t count = *NumElements(expected.shape);
  for (int64_t i = 0; i < count; ++i) {
    const double value = LoadFloat(got.dtype(), got.data().data(), i);
    const double exact = LoadFloat(expected.dtype, expected.data.get(), i);
    difference += (value - exact) * (value - exact);
    reference += exact * exact;
  }
  const double n = std::max<double>(static_cast<double>(count), 1);
  return std::sqrt(difference / n) / std::max(std::sqrt(reference / n), 0.1);
}

double GradientBound(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3: return 8e-2;
    case DType::kFloat8E5M2: return 1.6e-1;
    case DType::kFloat16: return 8e-3;
    case DType::kBFloat16: return 3e-2;
    default: return 3e-5;
  }
}

// What both passes read of the request.
template <typename Buffers>
void SetInputs(const CallTensors& tensors, Buffers* buffers) {
  for (const auto& [slot, tensor] : tensors) {
    const std::byte* data = tensor.data.get();
    if (slot <= kNumInputSlots) buffers->inputs[static_cast<size_t>(slot) - 1] = data;
    if (slot == kBiasSlot) buffers->bias = data;
    if (slot == kSoftmaxOffsetSlot) buffers->softmax_offset = reinterpret_cast<const float*>(data);
  }
}

// Memory for the gradients of whatever has one, by slot.
CallTensors MakeGradients(const CallTensors& tensors) {
  CallTensors gradients;
  for (const auto& [slot, tensor] : tensors) {
    if (slot <= kSoftmaxOffsetSlot) gradients[slot] = *MakeTensor(tensor.dtype, tensor.shape);
  }
  return gradients;
}

BackwardBuffers ToBuffers(const CallTensors& tensors, const CallTensors& gradients) {
  BackwardBuffers buffers;
  SetInputs(tensors, &buffers);
  buffers.d_out = tensors.at(kOutGradientSlot).data.get();
  for (const auto& [slot, tensor] : gradients) {
    std::byte* data = tensor.data.get();
    if (slot <= kNumInputSlots) buffers.grads[static_cast<size_t>(slot) - 1] = data;
    if (slot == kBiasSlot) buffers.d_bias = data;
    if (slot == kSoftmaxOffsetSlot) buffers.d_softmax_offset = reinterpret_cast<float*>(data);
  }
  return buffers;
}

bool HasElements(const v1::Tensor& tensor, const TensorDesc& desc) {
  return std::equal(tensor.shape().begin(), tensor.shape().end(), desc.shape.begin(),
                    desc.shape.end()) &&
         attnd::NumBytes(ToDesc(tensor)) == static_cast<int64_t>(tensor.data().size());
}

// The table's entries, once they are known to lie in the pool.
absl::StatusOr<const int32_t*> PageTable(const AttentionProblem& problem, const v1::Tensor& table,
                                         int64_t num_pages, const std::string& field) {
  const auto* entries = reinterpret_cast<const int32_t*>(table.data().data());
  const size_t count = table.data().size() / sizeof(int32_t);
  if (static_cast<int64_t>(count) != problem.batch * problem.pages_per_sequence) {
    return absl::InvalidArgumentError(absl::StrCat(field, " has ", count, " entries"));
  }
  ATTND_RETURN_IF_ERROR(CheckPageTable(problem, {entries, count}, num_pages, field));
  return entries;
}

}  // namespace

float LoadFloat(v1::DataType dtype, const void* base, int64_t index) {
  return LoadElement(ToDType(dtype), base, index);
}

void StoreFloat(v1::DataType dtype, void* base, int64_t index, float value) {
  StoreElement(ToDType(dtype), base, index, value);
}

absl::StatusOr<ResolvedShapes> ResolveShapes(const v1::ForwardRequest& request) {
  v1::ForwardRequest plain = request;
  plain.mutable_spec()->clear_bias_kind();
  plain.mutable_spec()->clear_alibi();
  plain.mutable_spec()->clear_softmax_kind();
  plain.clear_bias();
  plain.clear_softmax_offset();
  ATTND_ASSIGN_OR_RETURN(const AttentionProblem problem,
                         ResolveRequest(plain, ToDType(plain.out_dtype())));
  ResolvedShapes shapes;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    const std::optional<TensorDesc>& desc = problem.inputs[static_cast<size_t>(i)];
    if (desc) shapes.inputs[i + 1] = {static_cast<v1::DataType>(desc->dtype), desc->shape};
  }
  shapes.num_pages_k = problem.num_pages_k;
  shapes.num_pages_v = problem.num_pages_v;
  shapes.batch = problem.batch;
  shapes.num_heads = problem.num_heads;
  shapes.max_seqlen_q = problem.max_seqlen_q;
  shapes.max_seqlen_kv = problem.max_seqlen_kv;
  return shapes;
}

absl::StatusOr<CheckResult> CheckForward(const v1::ForwardRequest& request,
                                         const CallTensors& tensors,
                                         const v1::ForwardResponse& response) {
  // O in float32, so that only the server's result is rounded to the request's type.
  ATTND_ASSIGN_OR_RETURN(const AttentionProblem problem, ResolveRequest(request, DType::kFloat32));
  if (!HasElements(response.out(), problem.out_desc)) {
    return absl::InternalError(absl::StrCat("the reply's out is no tensor of shape ",
                                            attnd::ShapeString(problem.out_desc.shape)));
  }
  if (request.return_lse() && !HasElements(response.lse(), problem.lse_desc)) {
    return absl::InternalError(absl::StrCat("the reply's lse is no tensor of shape ",
                                            attnd::ShapeString(problem.lse_desc.shape)));
  }
  std::vector<float> out(static_cast<size_t>(*attnd::NumElements(problem.out_desc.shape)));
  std::vector<float> lse(static_cast<size_t>(*attnd::NumElements(problem.lse_desc.shape)));
  ForwardBuffers buffers;
  SetInputs(tensors, &buffers);
  const v1::Sequences& sequences = request.sequences();
  if (problem.is_paged) {
    ATTND_ASSIGN_OR_RETURN(buffers.page_table_k,
                           PageTable(problem, sequences.page_table_k(), problem.num_pages_k,
                                     "sequences.page_table_k"));
    ATTND_ASSIGN_OR_RETURN(buffers.page_table_v,
                           PageTable(problem, sequences.page_table_v(), problem.num_pages_v,
                                     "sequences.page_table_v"));
  }
  buffers.out = reinterpret_cast<std::byte*>(out.data());
  buffers.lse = lse.data();
  ATTND_RETURN_IF_ERROR(ReferenceForward(problem, buffers));

  CheckResult result;
  const DType out_dtype = ToDType(response.out().dtype());
  result.out_bound = OutBound(problem, out_dtype);
  result.out_error =
      RelativeRms(response.out(), IsFloat8(out_dtype) ? problem.fp8.scale_o : 1, out);
  if (request.return_lse()) {
    // FP8 inputs are exact, however O is rounded.
    const double lse_bound = IsFloat8(problem.dtype) ? kFp8LseBound : result.out_bound;
    CompareLse(response.lse(), lse, lse_bound, &result);
  }
  // Written so that NaN fails.
  result.passed = result.out_error <= result.out_bound &&
                  (!result.lse_error || *result.lse_error <= result.lse_bound);
  return result;
}

absl::StatusOr<GradientCheck> CheckBackward(const v1::BackwardRequest& request,
                                            const CallTensors& tensors,
                                            const v1::BackwardResponse& response) {
  ATTND_ASSIGN_OR_RETURN(const AttentionProblem problem,
                         ResolveRequest(request, ToDType(request.d_out().dtype())));
  if (ToDesc(request.d_out()).shape != problem.out_desc.shape) {
    return absl::InvalidArgumentError(
        absl::StrCat("d_out is no tensor of shape ", attnd::ShapeString(problem.out_desc.shape)));
  }
  if (absl::Status status = CheckGradientViews(problem); !status.ok()) return Explain(status);
  const CallTensors expected = MakeGradients(tensors);
  ATTND_RETURN_IF_ERROR(ReferenceBackward(problem, ToBuffers(tensors, expected)));

  GradientCheck result{.bound = GradientBound(problem.dtype), .passed = true};
  const auto got = GradientsOf(response);
  if (got.size() != expected.size()) {
    return absl::InternalError(
        absl::StrCat("the reply has ", got.size(), " gradients of ", expected.size(), " tensors"));
  }
  for (const auto& [slot, tensor] : got) {
    const auto want = expected.find(slot);
    if (want == expected.end() ||
        !HasElements(*tensor, {ToDType(want->second.dtype), want->second.shape})) {
      return absl::InternalError(
          absl::StrCat("the reply's gradient of ", SlotName(slot), " has not its shape"));
    }
    result.gradients.push_back({slot, GradientRms(*tensor, want->second)});
    // Written so that NaN fails.
    result.passed = result.passed && result.gradients.back().error <= result.bound;
  }
  return result;
}

}  // namespace attnd::cli
