#include "engine/cuda/sdpa_checks.h"

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr int64_t kMaxStride = int64_t{1} << 32;  // Times an extent: below 2^63.
constexpr int64_t kMaxPagedHeads = 65'535;        // An axis of a grid.
constexpr int64_t kAlignmentBytes = 16;

absl::Status Refuse(std::string_view field, std::string_view problem) {
  return UnimplementedField(reason::kNotSupported, field, problem);
}

absl::Status CheckOptions(const AttentionProblem& p) {
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16 && !IsFloat8(p.dtype)) {
    const std::string_view name = Name(p.dtype);
    return Refuse("spec.dtype",
                  absl::StrCat("is ", absl::string_view(name.data(), name.size()),
                               ", which cuDNN does not compute; FLOAT16 and BFLOAT16 work"));
  }
  if (p.logit_softcap) {
    return Refuse("spec.logit_softcap", "is set, which cuDNN does not compute; absent works");
  }
  if (p.bias_kind == BiasKind::kPreScale) {
    return Refuse("spec.bias_kind", "is PRE_SCALE, which cuDNN does not compute; POST_SCALE works");
  }
  if (p.dropout.probability > 0) {
    return Refuse("spec.dropout",
                  "has a probability above 0, whose mask cuDNN does not make; 0 works");
  }
  if (p.batch_invariant) {
    return Refuse("spec.batch_invariant",
                  "is set, but cuDNN's decode kernels round by the batch; false works");
  }
  return absl::OkStatus();
}

absl::Status CheckSizes(const AttentionProblem& p) {
  const struct {
    int64_t value;
    std::string_view field;
  } dims[] = {{p.head_dim_qk, "spec.head_dim_qk"}, {p.head_dim_v, "spec.head_dim_v"}};
  for (const auto& [value, field] : dims) {
    if (value % 8 != 0 || value > kMaxSdpaHeadDim) {
      return Refuse(field, absl::StrCat("is ", value, "; on the GPU multiples of 8 up to ",
                                        kMaxSdpaHeadDim, " work"));
    }
  }
  const struct {
    int64_t value;
    std::string_view field;
  } extents[] = {{p.batch, "spec.batch"},
                 {p.max_seqlen_q, "spec.max_seqlen_q"},
                 {p.max_seqlen_kv, "spec.max_seqlen_kv"},
                 {p.num_heads, "spec.num_heads"},
                 {p.num_pages_k, "sequences.page_table_k"},
                 {p.num_pages_v, "sequences.page_table_v"}};
  for (const auto& [value, field] : extents) {
    if (value > kMaxSdpaExtent) {
      return Refuse(field, absl::StrCat("spans ", value, "; on the GPU ", kMaxSdpaExtent,
                                        " is the most that works"));
    }
  }
  if (p.is_paged && p.num_kv_heads > kMaxPagedHeads) {
    return Refuse("spec.num_kv_heads",
                  absl::StrCat("is ", p.num_kv_heads, "; on the GPU, with pages, ", kMaxPagedHeads,
                               " is the most that works"));
  }
  if (p.is_paged && !std::has_single_bit(static_cast<uint64_t>(p.page_size))) {
    return Refuse("spec.page_size",
                  absl::StrCat("is ", p.page_size, "; on the GPU powers of two work, for example ",
                               std::bit_ceil(static_cast<uint64_t>(p.page_size))));
  }
  return absl::OkStatus();
}

// Elements along the axes that strides are of.
struct Extents {
  int64_t batch = 0;  // Sequences, or pages.
  int64_t rows = 0;
  int64_t heads = 0;
};

absl::Status CheckView(const TensorView& view, DType dtype, const Extents& extents,
                       std::string_view tensor) {
  const Strides& s = view.strides;
  const absl::string_view name(tensor.data(), tensor.size());
  if (s.dim != 1) {
    return Refuse("spec.views", absl::StrCat("give ", name, " a stride of ", s.dim,
                                             " between components; on the GPU 1 works"));
  }
  const int64_t multiple = kAlignmentBytes / SizeOf(dtype);
  const std::pair<int64_t, int64_t> axes[] = {
      {s.batch, extents.batch},
      {s.seq, extents.rows},
      {s.head, extents.heads},
      {view.group_stride, view.group_heads == 0 ? 1 : extents.heads}};
  for (const auto& [stride, extent] : axes) {
    if (extent <= 1) continue;  // It says nothing, and the graph is told another.
    if (stride > kMaxStride) {
      return Refuse("spec.views",
                    absl::StrCat("give ", name, " a stride of ", stride, " elements; on the GPU ",
                                 kMaxStride, " is the most that works"));
    }
    if (stride % multiple != 0 || stride < 0) {
      return Refuse("spec.views",
                    absl::StrCat("give ", name, " a stride of ", stride,
                                 " elements; on the GPU multiples of ", multiple, " work"));
    }
  }
  if ((s.seq == 0 && extents.rows > 1) || (s.head == 0 && extents.heads > 1)) {
    return Refuse("spec.views", absl::StrCat("repeat ", name,
                                             " by a stride of 0; on the GPU, distinct rows work"));
  }
  if (view.byte_offset % kAlignmentBytes != 0) {
    return Refuse("spec.views", absl::StrCat("start ", name, " at byte ", view.byte_offset,
                                             "; on the GPU multiples of 16 work"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSdpa(const AttentionProblem& p) {
  ATTND_RETURN_IF_ERROR(CheckOptions(p));
  ATTND_RETURN_IF_ERROR(CheckSizes(p));
  const Extents q = {p.batch, std::max<int64_t>(p.max_seqlen_q, p.q_is_thd ? 2 : 0), p.num_heads};
  const Extents kv = {
      p.is_paged ? std::max(p.num_pages_k, p.num_pages_v) : p.batch,
      p.is_paged ? p.page_size : std::max<int64_t>(p.max_seqlen_kv, p.kv_is_thd ? 2 : 0),
      p.num_kv_heads};
  ATTND_RETURN_IF_ERROR(CheckView(p.q, p.dtype, q, "Q"));
  ATTND_RETURN_IF_ERROR(CheckView(p.k, p.dtype, kv, "K"));
  ATTND_RETURN_IF_ERROR(CheckView(p.v, p.dtype, kv, "V"));
  return CheckView(p.out, p.out_dtype, q, "O");
}

// cuDNN adds slope * (key - query) to what a top-left causal mask leaves, with slopes of its own.
absl::Status CheckSdpaAlibi(const AttentionProblem& p, bool square) {
  if (p.bias_kind != BiasKind::kAlibi) return absl::OkStatus();
  if (p.mask.right != 0 || (p.mask.bottom_right && !square)) {
    return Refuse("spec.causal", "is not TOP_LEFT, which cuDNN needs beside spec.bias_kind ALIBI");
  }
  for (int64_t n = 0; n < p.num_heads; ++n) {
    if (p.alibi_slopes[static_cast<size_t>(n)] != AlibiSlope(p.num_heads, n)) {
      return Refuse("spec.alibi",
                    "is a shard of heads, which cuDNN does not compute; absent works");
    }
  }
  return absl::OkStatus();
}

}  // namespace attnd
