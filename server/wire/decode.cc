#include "server/wire/decode.h"

#include <limits>
#include <string>
#include <utility>

#include "engine/core/layout.h"
#include "server/wire/decode_tensor.h"

namespace attnd::wire {
namespace {

std::optional<Buffer> BufferNamed(std::string_view name) {
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (Name(static_cast<Buffer>(i)) == name) return static_cast<Buffer>(i);
  }
  return std::nullopt;
}

StatedFp8Scales DecodeFp8Scales(const v1::Fp8Scales& proto) {
  StatedFp8Scales stated;
  for (size_t i = 0; i < stated.size(); ++i) {
    const auto* field =
        v1::Fp8Scales::descriptor()->FindFieldByName(std::string(kFp8ScaleFields[i].name));
    const google::protobuf::Reflection& reflection = *proto.GetReflection();
    if (reflection.HasField(proto, field)) stated[i] = reflection.GetFloat(proto, field);
  }
  return stated;
}

// Decodes the fields that Forward and Plan share.
class Decoder {
 public:
  // `bytes` is null for a plan, whose tensors have no sources.
  Decoder(const TensorBytes* bytes, DecodedCall& result) : bytes_(bytes), result_(result) {}

  template <typename Request>
  absl::Status Decode(const Request& request) {
    if (!request.has_spec()) {
      return InvalidField(reason::kMissingField, "spec", "is required");
    }
    CallDescription& d = result_.description;
    ATTND_RETURN_IF_ERROR(DecodeSpec(request.spec(), d.spec));
    ATTND_RETURN_IF_ERROR(DecodeSequences(request.sequences(), d.sequences));
    ATTND_RETURN_IF_ERROR(DecodeBuffers(request.inputs()));
    ATTND_RETURN_IF_ERROR(
        DecodeOptional(request.has_bias(), request.bias(), "bias", d.inputs.bias));
    return DecodeOptional(request.has_softmax_offset(), request.softmax_offset(), "softmax_offset",
                          d.inputs.softmax_offset);
  }

  // What only forward requests (and plans) have.
  template <typename Request>
  absl::Status DecodeForwardFields(const Request& request) {
    result_.description.return_lse = request.return_lse();
    return DecodeEnum(request.out_dtype(), v1::DataType_IsValid, "out_dtype",
                      result_.description.out_dtype);
  }

  absl::Status DecodeBackwardFields(const v1::BackwardRequest& request) {
    result_.description.pass = Pass::kBackward;
    BackwardDescs& d = result_.description.backward;
    ATTND_RETURN_IF_ERROR(DecodeOptional(request.has_out(), request.out(), "out", d.out));
    ATTND_RETURN_IF_ERROR(DecodeOptional(request.has_lse(), request.lse(), "lse", d.lse));
    return DecodeOptional(request.has_d_out(), request.d_out(), "d_out", d.d_out);
  }

 private:
  static absl::Status DecodeSpec(const v1::AttentionSpec& proto, AttentionSpec& spec);
  static absl::Status DecodeSpecEnums(const v1::AttentionSpec& proto, AttentionSpec& spec);
  static absl::Status DecodeViews(const v1::Views& proto, AttentionSpec& spec);
  absl::Status DecodeSequences(const v1::Sequences& proto, Sequences& sequences);
  absl::Status DecodeBuffers(const v1::QkvBuffers& proto);
  absl::Status DecodeOptional(bool is_set, const v1::Tensor& tensor, std::string_view field,
                              std::optional<TensorDesc>& target);

  const TensorBytes* const bytes_;
  DecodedCall& result_;
};

absl::Status Decoder::DecodeSpecEnums(const v1::AttentionSpec& proto, AttentionSpec& spec) {
  ATTND_RETURN_IF_ERROR(
      DecodeEnum(proto.layout(), v1::QkvLayout_IsValid, "spec.layout", spec.layout));
  ATTND_RETURN_IF_ERROR(DecodeEnum(proto.dtype(), v1::DataType_IsValid, "spec.dtype", spec.dtype));
  ATTND_RETURN_IF_ERROR(DecodeEnum(proto.causal(), v1::Causal_IsValid, "spec.causal", spec.causal));
  ATTND_RETURN_IF_ERROR(DecodeEnum(proto.window_alignment(), v1::Alignment_IsValid,
                                   "spec.window_alignment", spec.window_alignment));
  ATTND_RETURN_IF_ERROR(
      DecodeEnum(proto.bias_kind(), v1::BiasKind_IsValid, "spec.bias_kind", spec.bias_kind));
  return DecodeEnum(proto.softmax_kind(), v1::SoftmaxKind_IsValid, "spec.softmax_kind",
                    spec.softmax_kind);
}

absl::Status Decoder::DecodeSpec(const v1::AttentionSpec& proto, AttentionSpec& spec) {
  ATTND_RETURN_IF_ERROR(DecodeSpecEnums(proto, spec));
  auto size = [](bool is_set, int64_t value) {
    return is_set ? std::optional<int64_t>(value) : std::nullopt;
  };
  spec.batch = size(proto.has_batch(), proto.batch());
  spec.max_seqlen_q = size(proto.has_max_seqlen_q(), proto.max_seqlen_q());
  spec.max_seqlen_kv = size(proto.has_max_seqlen_kv(), proto.max_seqlen_kv());
  spec.num_heads = size(proto.has_num_heads(), proto.num_heads());
  spec.num_kv_heads = size(proto.has_num_kv_heads(), proto.num_kv_heads());
  spec.head_dim_qk = size(proto.has_head_dim_qk(), proto.head_dim_qk());
  spec.head_dim_v = size(proto.has_head_dim_v(), proto.head_dim_v());
  spec.page_size = size(proto.has_page_size(), proto.page_size());
  spec.window_left = size(proto.window().has_left(), proto.window().left());
  spec.window_right = size(proto.window().has_right(), proto.window().right());
  if (proto.has_scale()) spec.scale = proto.scale();
  if (proto.has_logit_softcap()) spec.logit_softcap = proto.logit_softcap();
  if (proto.has_alibi()) {
    spec.alibi = AlibiShard{proto.alibi().head_offset(), proto.alibi().total_heads()};
  }
  if (proto.has_dropout()) {
    const v1::Dropout& d = proto.dropout();
    spec.dropout = Dropout{d.probability(), d.seed(), d.offset()};
  }
  spec.deterministic = proto.deterministic();
  spec.batch_invariant = proto.batch_invariant();
  if (proto.has_fp8()) spec.fp8 = Replaced(Fp8Scales(), DecodeFp8Scales(proto.fp8()));
  return proto.has_views() ? DecodeViews(proto.views(), spec) : absl::OkStatus();
}

absl::Status Decoder::DecodeViews(const v1::Views& proto, AttentionSpec& spec) {
  const struct {
    bool is_set;
    const v1::View& view;
    std::string field;
  } views[] = {{proto.has_q(), proto.q(), "spec.views.q"},
               {proto.has_k(), proto.k(), "spec.views.k"},
               {proto.has_v(), proto.v(), "spec.views.v"}};
  spec.views.emplace();
  for (int i = 0; i < 3; ++i) {
    const auto& [is_set, view, field] = views[i];
    if (spec.layout != Layout::kStrided) continue;  // Misplaced, as the resolver will say.
    if (!is_set) return InvalidField(reason::kMissingField, field, "is required");
    const std::optional<Buffer> buffer = BufferNamed(view.buffer());
    if (!buffer) {
      return InvalidField(
          reason::kInvalidField, field + ".buffer",
          absl::StrCat("is \"", view.buffer().substr(0, 32), "\"; it must be qkv, q, kv, k or v"));
    }
    (*spec.views)[i] = {
        *buffer, view.byte_offset(), {view.strides().begin(), view.strides().end()}, {}};
    if (view.has_group_stride()) (*spec.views)[i].group_stride = view.group_stride();
  }
  return absl::OkStatus();
}

absl::Status Decoder::DecodeSequences(const v1::Sequences& proto, Sequences& sequences) {
  const struct {
    const google::protobuf::RepeatedField<int64_t>& from;
    std::vector<int64_t>& to;
    std::string_view field;
  } arrays[] = {
      {proto.cu_seqlens_q(), sequences.cu_seqlens_q, "sequences.cu_seqlens_q"},
      {proto.cu_seqlens_kv(), sequences.cu_seqlens_kv, "sequences.cu_seqlens_kv"},
      {proto.cu_seqlens_q_padded(), sequences.cu_seqlens_q_padded, "sequences.cu_seqlens_q_padded"},
      {proto.cu_seqlens_kv_padded(), sequences.cu_seqlens_kv_padded,
       "sequences.cu_seqlens_kv_padded"}};
  for (const auto& [from, to, field] : arrays) {
    if (from.size() > kMaxBatch + 1) {
      return UnimplementedField(
          reason::kNotSupported, field,
          absl::StrCat("has ", from.size(), " entries; at most ", kMaxBatch + 1, " are supported"));
    }
    to.assign(from.begin(), from.end());
  }
  ATTND_RETURN_IF_ERROR(DecodeOptional(proto.has_page_table_k(), proto.page_table_k(),
                                       "sequences.page_table_k", sequences.page_table_k));
  return DecodeOptional(proto.has_page_table_v(), proto.page_table_v(), "sequences.page_table_v",
                        sequences.page_table_v);
}

absl::Status Decoder::DecodeOptional(bool is_set, const v1::Tensor& tensor, std::string_view field,
                                     std::optional<TensorDesc>& target) {
  if (!is_set) return absl::OkStatus();
  ATTND_ASSIGN_OR_RETURN(target, DecodeTensor(tensor, bytes_, field, result_.unbuilt));
  return absl::OkStatus();
}

// The tensors of the message, indexed by Buffer; null where they are not set.
std::array<const v1::Tensor*, kNumInputBuffers> TensorsOf(const v1::QkvBuffers& proto) {
  return {proto.has_qkv() ? &proto.qkv() : nullptr, proto.has_q() ? &proto.q() : nullptr,
          proto.has_kv() ? &proto.kv() : nullptr, proto.has_k() ? &proto.k() : nullptr,
          proto.has_v() ? &proto.v() : nullptr};
}

absl::Status Decoder::DecodeBuffers(const v1::QkvBuffers& proto) {
  const auto tensors = TensorsOf(proto);
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (tensors[i] == nullptr) continue;
    const std::string field = absl::StrCat("inputs.", View(Name(static_cast<Buffer>(i))));
    ATTND_RETURN_IF_ERROR(
        DecodeOptional(true, *tensors[i], field, result_.description.inputs.buffers[i]));
  }
  return absl::OkStatus();
}

absl::Status DecodePlacement(const v1::Placement& placement, std::string_view field,
                             Destination& destination, absl::Status& unbuilt) {
  std::string unbuilt_kind;
  switch (placement.kind_case()) {
    case v1::Placement::KIND_NOT_SET:
    case v1::Placement::kInMessage: destination = Destination::kInMessage; break;
    case v1::Placement::kValues: destination = Destination::kValues; break;
    case v1::Placement::kResident:
      unbuilt_kind = absl::StrCat(View(field), ".resident");
      ATTND_RETURN_IF_ERROR(CheckLease(placement.resident(), unbuilt_kind));
      break;
    case v1::Placement::kSharedMemory:
      unbuilt_kind = absl::StrCat(View(field), ".shared_memory");
      ATTND_RETURN_IF_ERROR(CheckRange(placement.shared_memory(), unbuilt_kind));
      break;
  }
  if (!unbuilt_kind.empty() && unbuilt.ok()) {
    unbuilt = UnimplementedField(reason::kNotBuilt, unbuilt_kind,
                                 "is not built yet; in_message and values are");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DecodedCall> DecodeForward(const v1::ForwardRequest& request,
                                          const TensorBytes& bytes) {
  DecodedCall result;
  Decoder decoder(&bytes, result);
  ATTND_RETURN_IF_ERROR(decoder.Decode(request));
  ATTND_RETURN_IF_ERROR(decoder.DecodeForwardFields(request));
  ATTND_RETURN_IF_ERROR(
      DecodePlacement(request.out_placement(), "out_placement", result.out, result.unbuilt));
  if (request.has_lse_placement() && !request.return_lse()) {
    return InvalidField(reason::kMisplacedField, "lse_placement", "is set, but return_lse is not");
  }
  ATTND_RETURN_IF_ERROR(
      DecodePlacement(request.lse_placement(), "lse_placement", result.lse, result.unbuilt));
  if (request.has_retain_for_backward()) {
    ATTND_RETURN_IF_ERROR(CheckLease(request.retain_for_backward(), "retain_for_backward"));
    result.description.retain = absl::Seconds(request.retain_for_backward().seconds());
  }
  return result;
}

namespace {

// A context says all but the gradient of O.
absl::Status CheckContextAlone(const v1::BackwardRequest& request) {
  const struct {
    bool is_set;
    std::string_view field;
  } fields[] = {{request.has_spec(), "spec"},
                {request.has_sequences(), "sequences"},
                {request.has_inputs(), "inputs"},
                {request.has_out(), "out"},
                {request.has_lse(), "lse"},
                {request.has_bias(), "bias"},
                {request.has_softmax_offset(), "softmax_offset"}};
  for (const auto& [is_set, field] : fields) {
    if (!is_set) continue;
    return InvalidField(reason::kMisplacedField, field,
                        "is set, but context holds what Forward was given and returned");
  }
  if (request.context().id().empty()) {
    return InvalidField(reason::kMissingField, "context.id", "is required");
  }
  if (request.context().generation() == 0) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kExpired, "context.generation",
                   absl::StrCat("context.generation is ", request.context().generation(),
                                "; a context has generation 0 alone"));
}

}  // namespace

absl::StatusOr<DecodedCall> DecodeBackward(const v1::BackwardRequest& request,
                                           const TensorBytes& bytes) {
  DecodedCall result;
  Decoder decoder(&bytes, result);
  if (request.has_context()) {
    ATTND_RETURN_IF_ERROR(CheckContextAlone(request));
    result.description.context = request.context().id();
  } else {
    ATTND_RETURN_IF_ERROR(decoder.Decode(request));
  }
  ATTND_RETURN_IF_ERROR(decoder.DecodeBackwardFields(request));
  ATTND_RETURN_IF_ERROR(
      DecodePlacement(request.grads_placement(), "grads_placement", result.grads, result.unbuilt));
  if (request.has_fp8()) result.description.backward.fp8 = DecodeFp8Scales(request.fp8());
  return result;
}

absl::StatusOr<DecodedCall> DecodePlan(const v1::PlanRequest& request) {
  DecodedCall result;
  Decoder decoder(nullptr, result);
  ATTND_RETURN_IF_ERROR(decoder.Decode(request));
  ATTND_RETURN_IF_ERROR(decoder.DecodeForwardFields(request));
  if (!request.backward()) return result;
  if (request.return_lse()) {
    return InvalidField(reason::kMisplacedField, "return_lse",
                        "is set, but backward returns gradients");
  }
  result.description.pass = Pass::kBackward;
  return result;
}

namespace {

// The tensors that both kinds of requests have, by Piece; null where they are not set.
using Tensors = std::array<const v1::Tensor*, kNumPieces>;

template <typename Request>
Tensors CommonTensors(const Request& request) {
  Tensors tensors{};
  const auto inputs = TensorsOf(request.inputs());
  std::copy(inputs.begin(), inputs.end(), tensors.begin());
  auto set = [&tensors](Piece piece, bool is_set, const v1::Tensor& tensor) {
    if (is_set) tensors[static_cast<size_t>(piece)] = &tensor;
  };
  set(Piece::kBias, request.has_bias(), request.bias());
  set(Piece::kSoftmaxOffset, request.has_softmax_offset(), request.softmax_offset());
  return tensors;
}

void Fill(const Tensors& tensors, const TensorBytes& bytes, PreparedCall& prepared) {
  for (int i = 0; i < kNumPieces; ++i) {
    const auto piece = static_cast<Piece>(i);
    if (tensors[i] == nullptr) continue;
    FillTensor(*tensors[i], bytes, prepared.desc(piece)->dtype, prepared.input(piece));
  }
}

// What goes where.
struct Output {
  const TensorDesc& desc;
  Destination destination;
  std::string_view field;  // Of the placement.
};

std::vector<Output> OutputsOf(const DecodedCall& decoded, const AttentionProblem& p) {
  if (decoded.description.pass == Pass::kForward) {
    std::vector<Output> outputs = {{p.out_desc, decoded.out, "out_placement"}};
    if (decoded.description.return_lse) {
      outputs.push_back({p.lse_desc, decoded.lse, "lse_placement"});
    }
    return outputs;
  }
  std::vector<Output> outputs;
  auto add = [&](const std::optional<TensorDesc>& desc) {
    if (desc) outputs.push_back({*desc, decoded.grads, "grads_placement"});
  };
  for (const auto& input : p.inputs) add(input);
  add(p.bias);
  add(p.softmax_offset);
  return outputs;
}

}  // namespace

absl::Status FillInputs(const v1::ForwardRequest& request, const TensorBytes& bytes,
                        PreparedCall& prepared) {
  Fill(CommonTensors(request), bytes, prepared);
  const v1::Sequences& s = request.sequences();
  ATTND_RETURN_IF_ERROR(FillInt32(s.page_table_k(), bytes, "sequences.page_table_k",
                                  prepared.page_table(Piece::kPageTableK)));
  return FillInt32(s.page_table_v(), bytes, "sequences.page_table_v",
                   prepared.page_table(Piece::kPageTableV));
}

absl::Status FillInputs(const v1::BackwardRequest& request, const TensorBytes& bytes,
                        PreparedCall& prepared) {
  Tensors tensors = CommonTensors(request);
  tensors[static_cast<size_t>(Piece::kOut)] = &request.out();
  tensors[static_cast<size_t>(Piece::kLse)] = &request.lse();
  tensors[static_cast<size_t>(Piece::kOutGradient)] = &request.d_out();
  Fill(tensors, bytes, prepared);
  return absl::OkStatus();
}

absl::Status CheckDestinations(const DecodedCall& decoded, const AttentionProblem& problem) {
  int64_t bytes = 0;
  std::string_view field;
  for (const Output& output : OutputsOf(decoded, problem)) {
    field = output.field;
    bytes = SaturatingSum(bytes, *NumBytes(output.desc));
    if (output.destination != Destination::kValues) continue;
    if (*NumElements(output.desc.shape) <= kMaxValues) continue;
    return InvalidField(reason::kSizeMismatch, absl::StrCat(View(field), ".values"),
                        absl::StrCat("holds at most ", kMaxValues, " elements, but an output is ",
                                     ShapeString(output.desc.shape)));
  }
  constexpr int64_t kMostMessageBytes = std::numeric_limits<int32_t>::max();
  constexpr int64_t kReplyMetadataBytes = 4096;
  if (bytes <= kMostMessageBytes - kReplyMetadataBytes) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kMessageTooLarge, field,
                   absl::StrCat(View(field), " is in_message, but the outputs need ", bytes,
                                " bytes and a message holds ", kMostMessageBytes));
}

}  // namespace attnd::wire
