#include "engine/core/resolve_checks.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

absl::Status CheckAtLeast(int64_t value, int64_t minimum, std::string_view field) {
  if (value >= minimum) return absl::OkStatus();
  return InvalidField(reason::kInvalidField, field,
                      absl::StrCat("is ", value, "; it must be at least ", minimum));
}

absl::Status CheckWindowBound(const std::optional<int64_t>& bound, std::string_view field) {
  if (!bound || *bound >= -1) return absl::OkStatus();
  return InvalidField(reason::kInvalidField, field,
                      absl::StrCat("is ", *bound, "; it must be -1 (unlimited) or more"));
}

absl::Status CheckDropout(const AttentionSpec& spec) {
  if (!spec.dropout) return absl::OkStatus();
  const double p = spec.dropout->probability;
  if (p >= 0 && p < 1) return absl::OkStatus();  // False for NaN.
  return InvalidField(reason::kInvalidField, "spec.dropout.probability",
                      absl::StrCat("is ", p, "; it must be in [0, 1)"));
}

// A window lies along a diagonal; say which where that can matter.
absl::Status ResolveMask(const AttentionSpec& spec, AttentionProblem& p) {
  auto bound = [](const std::optional<int64_t>& b) {
    return b && *b >= 0 ? b : std::optional<int64_t>();
  };
  p.mask.left = bound(spec.window_left);
  p.mask.right = bound(spec.window_right);
  p.mask.bottom_right =
      spec.causal == Causal::kBottomRight ||
      (spec.causal == Causal::kNone && spec.window_alignment == Alignment::kBottomRight);
  if (spec.causal != Causal::kNone) {
    p.mask.right = 0;
    return absl::OkStatus();
  }
  const bool has_diagonal = p.mask.left || p.mask.right || spec.bias_kind == BiasKind::kAlibi;
  const bool lengths_differ =
      std::any_of(p.sequences.begin(), p.sequences.end(),
                  [](const SequenceExtent& s) { return s.q_len != s.kv_len; });
  if (has_diagonal && lengths_differ && spec.window_alignment == Alignment::kUnspecified) {
    return InvalidField(reason::kMissingField, "spec.window_alignment",
                        "is required: a window or ALIBI without a causal mask meets sequences "
                        "whose query and key lengths differ");
  }
  return absl::OkStatus();
}

absl::Status ResolveBias(const AttentionSpec& spec, const InputDescs& inputs, AttentionProblem& p) {
  const bool wanted =
      spec.bias_kind == BiasKind::kPreScale || spec.bias_kind == BiasKind::kPostScale;
  if (wanted != inputs.bias.has_value()) {
    return wanted ? InvalidField(reason::kMissingField, "bias",
                                 "is required with spec.bias_kind PRE_SCALE or POST_SCALE")
                  : InvalidField(reason::kMisplacedField, "bias",
                                 "is set, but spec.bias_kind is neither PRE_SCALE nor POST_SCALE");
  }
  if (!wanted) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(CheckDesc(*inputs.bias, p.dtype, "bias"));
  const std::vector<int64_t>& shape = inputs.bias->shape;
  auto one_or = [](int64_t have, int64_t want) { return have == 1 || have == want; };
  if (shape.size() != 4 || !one_or(shape[0], p.batch) || !one_or(shape[1], p.num_heads) ||
      !one_or(shape[2], p.max_seqlen_q) || shape[3] != p.max_seqlen_kv) {
    return InvalidField(
        reason::kShapeMismatch, "bias",
        absl::StrCat("has shape ", ShapeString(shape), "; it must be [1|", p.batch, ", 1|",
                     p.num_heads, ", 1|", p.max_seqlen_q, ", ", p.max_seqlen_kv, "]"));
  }
  p.bias = inputs.bias;
  auto stride = [&shape](size_t axis, int64_t elements) { return shape[axis] == 1 ? 0 : elements; };
  p.bias_strides = {.batch = stride(0, shape[1] * shape[2] * shape[3]),
                    .seq = stride(2, shape[3]),
                    .head = stride(1, shape[2] * shape[3]),
                    .dim = 1};
  return absl::OkStatus();
}

absl::Status ResolveAlibi(const AttentionSpec& spec, AttentionProblem& p) {
  if (spec.bias_kind != BiasKind::kAlibi) return absl::OkStatus();
  const AlibiShard alibi = spec.alibi.value_or(AlibiShard{0, p.num_heads});
  if (alibi.head_offset < 0 || alibi.total_heads < p.num_heads ||
      alibi.head_offset > alibi.total_heads - p.num_heads) {
    return InvalidField(
        reason::kInvalidField, "spec.alibi",
        absl::StrCat("has heads ", alibi.head_offset, " and up of ", alibi.total_heads,
                     ", too few for spec.num_heads ", p.num_heads));
  }
  for (int64_t n = 0; n < p.num_heads; ++n) {
    p.alibi_slopes.push_back(AlibiSlope(alibi.total_heads, alibi.head_offset + n));
  }
  return absl::OkStatus();
}

absl::Status ResolveSoftmax(const AttentionSpec& spec, const InputDescs& inputs,
                            AttentionProblem& p) {
  const bool wanted = spec.softmax_kind == SoftmaxKind::kLearnable;
  if (wanted != inputs.softmax_offset.has_value()) {
    return wanted ? InvalidField(reason::kMissingField, "softmax_offset",
                                 "is required with spec.softmax_kind LEARNABLE")
                  : InvalidField(reason::kMisplacedField, "softmax_offset",
                                 "is set, but spec.softmax_kind is not LEARNABLE");
  }
  p.softmax_kind = spec.softmax_kind;
  if (!wanted) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(CheckDesc(*inputs.softmax_offset, DType::kFloat32, "softmax_offset"));
  p.softmax_offset = inputs.softmax_offset;
  if (inputs.softmax_offset->shape != std::vector<int64_t>{p.num_heads}) {
    return InvalidField(reason::kShapeMismatch, "softmax_offset",
                        absl::StrCat("has shape ", ShapeString(inputs.softmax_offset->shape),
                                     "; it must be [", p.num_heads, "] (one for each head)"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Learn(KnownSize& size, int64_t value, std::string_view field, std::string_view where) {
  const std::string has =
      where.empty() ? absl::StrCat("is ", value) : absl::StrCat("has ", value, " in ", View(where));
  if (value < size.minimum) {
    return InvalidField(reason::kInvalidField, field,
                        absl::StrCat(has, "; it must be at least ", size.minimum));
  }
  if (!size.value) {
    size.value = value;
    size.source =
        where.empty() ? std::string(field) : absl::StrCat(View(where), " of ", View(field));
    return absl::OkStatus();
  }
  if (*size.value == value) return absl::OkStatus();
  return InvalidField(reason::kShapeMismatch, field,
                      absl::StrCat(has, ", but ", size.source, " is ", *size.value));
}

absl::Status CheckLimits(const Sizes& sizes) {
  for (const KnownSize* size :
       {&sizes.batch, &sizes.h, &sizes.g, &sizes.d_qk, &sizes.d_v, &sizes.page_size}) {
    if (size->value.value_or(0) <= size->maximum) continue;
    return UnimplementedField(reason::kNotSupported, size->spec_field,
                              absl::StrCat("is ", *size->value, " (", size->source, "); at most ",
                                           size->maximum, " is supported"));
  }
  return absl::OkStatus();
}

absl::Status CheckSpecScalars(const AttentionSpec& spec) {
  if (spec.layout == Layout::kUnspecified) {
    return InvalidField(reason::kMissingField, "spec.layout", "is required");
  }
  if (spec.layout != Layout::kStrided && FindLayout(spec.layout) == nullptr) {
    return InvalidField(reason::kUnknownEnumValue, "spec.layout",
                        absl::StrCat("has the unknown value ", static_cast<int>(spec.layout)));
  }
  if (spec.dtype == DType::kUnspecified) {
    return InvalidField(reason::kMissingField, "spec.dtype", "is required");
  }
  if (SizeOf(spec.dtype) == 0) {
    return InvalidField(reason::kUnknownEnumValue, "spec.dtype",
                        absl::StrCat("has the unknown value ", static_cast<int>(spec.dtype)));
  }
  if (spec.dtype == DType::kInt32) {
    return InvalidField(reason::kInvalidField, "spec.dtype",
                        "is INT32; attention needs a floating point type");
  }
  if (spec.scale && !std::isfinite(*spec.scale)) {
    return InvalidField(reason::kInvalidField, "spec.scale", "must be finite");
  }
  if (spec.logit_softcap && !(std::isfinite(*spec.logit_softcap) && *spec.logit_softcap > 0)) {
    return InvalidField(
        reason::kInvalidField, "spec.logit_softcap",
        absl::StrCat("is ", *spec.logit_softcap, "; it must be finite and above 0"));
  }
  ATTND_RETURN_IF_ERROR(CheckWindowBound(spec.window_left, "spec.window.left"));
  ATTND_RETURN_IF_ERROR(CheckWindowBound(spec.window_right, "spec.window.right"));
  const bool top_left = spec.causal == Causal::kTopLeft;
  if (spec.causal != Causal::kNone && spec.window_alignment != Alignment::kUnspecified &&
      top_left != (spec.window_alignment == Alignment::kTopLeft)) {
    return InvalidField(reason::kInvalidField, "spec.window_alignment",
                        absl::StrCat("contradicts spec.causal, whose diagonal is ",
                                     top_left ? "TOP_LEFT" : "BOTTOM_RIGHT"));
  }
  ATTND_RETURN_IF_ERROR(CheckDropout(spec));
  if (spec.alibi && spec.bias_kind != BiasKind::kAlibi) {
    return InvalidField(reason::kMisplacedField, "spec.alibi",
                        "is set, but spec.bias_kind is not ALIBI");
  }
  if (!spec.fp8) return absl::OkStatus();
  if (!IsFloat8(spec.dtype)) {
    return InvalidField(reason::kMisplacedField, "spec.fp8",
                        absl::StrCat("is set, but spec.dtype is ", View(Name(spec.dtype))));
  }
  return CheckFp8Scales(*spec.fp8, "spec.fp8");
}

absl::Status LearnSpecSizes(const AttentionSpec& spec, const AttentionProblem& p, Sizes& sizes) {
  const bool kv_axis = !p.kv_is_thd && !p.is_paged;
  if (spec.max_seqlen_q)
    ATTND_RETURN_IF_ERROR(CheckAtLeast(*spec.max_seqlen_q, 0, "spec.max_seqlen_q"));
  if (spec.max_seqlen_kv)
    ATTND_RETURN_IF_ERROR(CheckAtLeast(*spec.max_seqlen_kv, 0, "spec.max_seqlen_kv"));
  const struct {
    const std::optional<int64_t>& value;
    KnownSize& size;
  } stated[] = {{spec.batch, sizes.batch},
                {p.q_is_thd ? std::nullopt : spec.max_seqlen_q, sizes.s_q},
                {kv_axis ? spec.max_seqlen_kv : std::nullopt, sizes.s_kv},
                {spec.num_heads, sizes.h},
                {spec.num_kv_heads, sizes.g},
                {spec.head_dim_qk, sizes.d_qk},
                {spec.head_dim_v, sizes.d_v},
                {spec.page_size, sizes.page_size}};
  for (const auto& [value, size] : stated) {
    if (value) ATTND_RETURN_IF_ERROR(Learn(size, *value, size.spec_field, ""));
  }
  return absl::OkStatus();
}

absl::Status DeriveImpliedSizes(const Sequences& sequences, const AttentionProblem& p,
                                Packing packing, Sizes& sizes) {
  auto either = [](KnownSize& a, KnownSize& b) {
    if (!a.value) a.value = b.value, a.source = b.source;
    if (!b.value) b.value = a.value, b.source = a.source;
  };
  if (packing != Packing::kSeparate) either(sizes.d_qk, sizes.d_v);
  if (PacksQ(packing)) {
    either(sizes.h, sizes.g);
    either(sizes.s_q, sizes.s_kv);
  }
  auto rows = [](const std::vector<int64_t>& padded, const std::vector<int64_t>& cu,
                 const char* source, KnownSize& size) {
    const std::vector<int64_t>& positions = padded.empty() ? cu : padded;
    size.value = positions.empty() ? 0 : std::max<int64_t>(positions.back(), 0);
    size.source = source;
  };
  if (p.q_is_thd) {
    rows(sequences.cu_seqlens_q_padded, sequences.cu_seqlens_q, "the end of sequences.cu_seqlens_q",
         sizes.t_q);
  }
  if (p.kv_is_thd) {
    rows(sequences.cu_seqlens_kv_padded, sequences.cu_seqlens_kv,
         "the end of sequences.cu_seqlens_kv", sizes.t_kv);
  }
  // Q, K and V share the axis; that their arrays agree is checked with the sequences.
  if (PacksQ(packing)) sizes.t_kv = sizes.t_q;
  if (!sizes.batch.value && !sequences.cu_seqlens_q.empty()) {
    ATTND_RETURN_IF_ERROR(Learn(sizes.batch,
                                static_cast<int64_t>(sequences.cu_seqlens_q.size()) - 1,
                                "sequences.cu_seqlens_q", "its number of sequences"));
  }
  if (p.is_paged && sequences.page_table_k) {
    // A pool without spare pages.
    sizes.pages_k.value = sizes.pages_v.value =
        NumElements(sequences.page_table_k->shape).value_or(0);
  }
  return absl::OkStatus();
}

absl::Status CheckDesc(const TensorDesc& desc, DType dtype, std::string_view field) {
  if (desc.dtype != dtype) {
    return desc.dtype == DType::kUnspecified
               ? InvalidField(reason::kMissingField, absl::StrCat(View(field), ".dtype"),
                              "is required")
               : InvalidField(reason::kInvalidField, absl::StrCat(View(field), ".dtype"),
                              absl::StrCat("is ", View(Name(desc.dtype)), "; it must be ",
                                           View(Name(dtype))));
  }
  TensorDesc at_least_one = desc;
  for (int64_t& dim : at_least_one.shape) {
    if (dim < 0) {
      return InvalidField(reason::kShapeMismatch, absl::StrCat(View(field), ".shape"),
                          absl::StrCat("has ", dim, " in ", ShapeString(desc.shape),
                                       "; dimensions are not negative"));
    }
    dim = std::max<int64_t>(dim, 1);  // An empty tensor has strides as well.
  }
  if (!NumBytes(at_least_one)) {
    return InvalidField(reason::kOverflow, absl::StrCat(View(field), ".shape"),
                        absl::StrCat("is ", ShapeString(desc.shape), ": its bytes pass 2^63"));
  }
  return absl::OkStatus();
}

absl::Status ResolveMaskAndFeatures(const AttentionSpec& spec, const InputDescs& inputs,
                                    AttentionProblem& p) {
  p.scale = spec.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim_qk)));
  p.logit_softcap = spec.logit_softcap;
  p.deterministic = spec.deterministic;
  p.batch_invariant = spec.batch_invariant;
  p.fp8 = spec.fp8.value_or(Fp8Scales{});
  p.dropout = spec.dropout.value_or(Dropout{});
  p.bias_kind = spec.bias_kind;
  ATTND_RETURN_IF_ERROR(ResolveMask(spec, p));
  ATTND_RETURN_IF_ERROR(ResolveBias(spec, inputs, p));
  ATTND_RETURN_IF_ERROR(ResolveAlibi(spec, p));
  return ResolveSoftmax(spec, inputs, p);
}

}  // namespace attnd
