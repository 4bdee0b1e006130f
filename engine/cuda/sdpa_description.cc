// Three forms. Dense: every row of the axes belongs to a sequence and the lengths are round, so the
// graph has no lengths. Ragged: everything else that is not paged, dense layouts too, because a
// dense batch with lengths multiplies the rows behind a sequence by 0, and 0 * NaN is NaN; a ragged
// one does not read them. Paged: K and V through page tables.
#include "engine/cuda/sdpa_description.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr int64_t kSmallestBucket = 64;
// Pages are read in tiles of up to 256 rows, and the tile that holds a sequence's end is read
// whole: its row of the page table must be as long, or another sequence's pages are multiplied by
// 0.
constexpr int64_t kSmallestPagedLength = 256;
constexpr int64_t kSmallestPagePool = 1024;
// Lengths of axes that get plans of their own: multiples of the first whose odd part is less.
constexpr int64_t kDenseMultiple = 128;
constexpr uint64_t kDenseSteps = 16;
constexpr int64_t kMaxStride = int64_t{1} << 32;  // Times an extent: below 2^63.
constexpr int64_t kMaxPagedHeads = 65'535;        // An axis of a grid.
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kAlignmentBytes = 16;
constexpr int64_t kMaxExtent = int64_t{1} << 30;

absl::Status Refuse(std::string_view field, std::string_view problem) {
  return UnimplementedField(reason::kNotSupported, field, problem);
}

absl::Status CheckOptions(const AttentionProblem& p) {
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) {
    const std::string_view name = Name(p.dtype);
    return Refuse("spec.dtype",
                  absl::StrCat("is ", absl::string_view(name.data(), name.size()),
                               ", which the GPU does not compute; FLOAT16 and BFLOAT16 work"));
  }
  if (p.logit_softcap) {
    return Refuse("spec.logit_softcap", "is set, which the GPU does not compute; absent works");
  }
  if (p.bias_kind != BiasKind::kNone) {
    return Refuse("spec.bias_kind", "is set, which the GPU does not compute; NONE works");
  }
  if (p.softmax_kind != SoftmaxKind::kVanilla) {
    return Refuse("spec.softmax_kind",
                  "asks for a sink, which the GPU does not compute; VANILLA works");
  }
  if (p.dropout.probability > 0) {
    return Refuse("spec.dropout",
                  "has a probability above 0, which the GPU does not compute; 0 works");
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
    if (value % 8 != 0 || value > kMaxHeadDim) {
      return Refuse(field, absl::StrCat("is ", value, "; on the GPU multiples of 8 up to ",
                                        kMaxHeadDim, " work"));
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
    if (value > kMaxExtent) {
      return Refuse(field, absl::StrCat("spans ", value, "; on the GPU ", kMaxExtent,
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

absl::Status CheckView(const TensorView& view, DType dtype, std::string_view tensor) {
  const Strides& s = view.strides;
  const absl::string_view name(tensor.data(), tensor.size());
  if (s.dim != 1) {
    return Refuse("spec.views", absl::StrCat("give ", name, " a stride of ", s.dim,
                                             " between components; on the GPU 1 works"));
  }
  const int64_t multiple = kAlignmentBytes / SizeOf(dtype);
  for (int64_t stride : {s.batch, s.seq, s.head}) {
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
  if (s.seq == 0 || s.head == 0) {
    return Refuse("spec.views", absl::StrCat("repeat ", name,
                                             " by a stride of 0; on the GPU, distinct rows work"));
  }
  if (view.byte_offset % kAlignmentBytes != 0) {
    return Refuse("spec.views", absl::StrCat("start ", name, " at byte ", view.byte_offset,
                                             "; on the GPU multiples of 16 work"));
  }
  return absl::OkStatus();
}

// Bounds that mask nothing within the geometry are left out: they cost time, and in decode (one
// query row, bottom right) a ninth of it.
void DescribeMask(const AttentionProblem& p, SdpaDescription& d) {
  const int64_t last_q = std::max<int64_t>(0, p.max_seqlen_q - 1);
  const int64_t last_kv = std::max<int64_t>(0, p.max_seqlen_kv - 1);
  const BandMask& mask = p.mask;
  if (mask.right && *mask.right < (mask.bottom_right ? last_q : last_kv)) d.right = *mask.right;
  if (mask.left && *mask.left < (mask.bottom_right ? last_kv : last_q)) d.left = *mask.left;
  const bool masked = d.left != kUnbounded || d.right != kUnbounded;
  const bool same_diagonal = !d.has_lengths && p.max_seqlen_q == p.max_seqlen_kv;
  d.bottom_right = masked && mask.bottom_right && !same_diagonal;
}

// Few enough lengths for a plan each: eight to an octave.
bool HasOwnPlan(int64_t length) {
  if (length <= 0 || length % kDenseMultiple != 0) return false;
  const auto multiple = static_cast<uint64_t>(length / kDenseMultiple);
  return multiple >> std::countr_zero(multiple) < kDenseSteps;
}

bool RunsDense(const AttentionProblem& p) {
  if (p.q_is_thd || p.kv_is_thd || p.has_lengths || p.is_paged) return false;
  if (!HasOwnPlan(p.max_seqlen_kv) || (p.max_seqlen_q != 1 && !HasOwnPlan(p.max_seqlen_q))) {
    return false;
  }
  return p.max_seqlen_q <= p.max_seqlen_kv || (!p.mask.left && !p.mask.bottom_right);
}

// In [b, h, s, d] the distance of two heads grows with the axis, and would make a plan for every
// length. There each head becomes a sequence of its own, with one head; a head of K and V that
// several query heads share is then read by each of them.
bool SplitsHeads(const AttentionProblem& p) {
  if (p.is_paged || p.q_is_thd || p.kv_is_thd || p.num_heads == 1) return false;
  auto head_major = [](const TensorView& view) { return view.strides.head > view.strides.seq; };
  return head_major(p.q) || head_major(p.k) || head_major(p.v) || head_major(p.out);
}

void SplitHeads(const AttentionProblem& p, SdpaDescription& d) {
  d.batch = BucketCount(p.batch * p.num_heads);
  d.num_heads = d.num_kv_heads = 1;
  d.lse_in_scratch = false;  // A head's statistics lie row by row in [b, h, s_q].
  d.q.head = d.k.head = d.head_dim_qk;
  d.v.head = d.out.head = d.head_dim_v;
  d.lse = {.batch = d.s_q, .seq = 1, .head = 1, .dim = 1};
}

void DescribeRaggedQ(const AttentionProblem& p, SdpaDescription& d) {
  d.ragged_q = true;
  d.batch = BucketCount(p.batch);
  d.s_q = BucketLength(p.max_seqlen_q);
  // cuDNN 9.19's ragged decode kernels write the LSE of one query head of a group only.
  if (p.num_heads != p.num_kv_heads && !SplitsHeads(p)) d.s_q = std::max(d.s_q, kSmallestBucket);
  d.q.batch = d.s_q * d.q.seq;
  d.out.batch = d.s_q * d.out.seq;
  // cuDNN's ragged statistics are [row, head]. That is what THD asks for, and what [b, h, s_q] is
  // where s_q = 1; elsewhere a kernel of ours transposes.
  d.lse_in_scratch = !p.q_is_thd && p.max_seqlen_q != 1;
  d.lse = {.batch = d.s_q * p.num_heads, .seq = p.num_heads, .head = 1, .dim = 1};
}

void DescribeKv(const AttentionProblem& p, SdpaDescription& d) {
  if (p.is_paged) {
    d.page_size = p.page_size;
    d.pages_per_sequence = BucketCount(
        (std::max(p.max_seqlen_kv, kSmallestPagedLength) + p.page_size - 1) / p.page_size);
    // A pool may be described as larger than it is: no page behind its end is in a table.
    d.num_pages_k = BucketCount(std::max(p.num_pages_k, kSmallestPagePool));
    d.num_pages_v = BucketCount(std::max(p.num_pages_v, kSmallestPagePool));
    d.s_kv = d.pages_per_sequence * p.page_size;
    return;
  }
  d.ragged_kv = true;
  // At least s_q, which some masks ask for; lengths are what they are.
  d.s_kv = std::max({BucketLength(p.max_seqlen_kv), kSmallestBucket, d.s_q});
  d.k.batch = d.s_kv * d.k.seq;
  d.v.batch = d.s_kv * d.v.seq;
}

// A stride of an axis with one element says nothing, and must not make a plan.
void ForgetDeadStrides(const AttentionProblem& p, SdpaDescription& d) {
  auto forget = [&](Strides& s, int64_t heads, int64_t length, int64_t head_dim) {
    if (heads == 1) s.head = head_dim;
    if (length == 1) s.seq = heads * head_dim;
    if (p.batch == 1) s.batch = length * s.seq;
  };
  if (!d.has_lengths) {
    forget(d.q, d.num_heads, d.s_q, d.head_dim_qk);
    forget(d.out, d.num_heads, d.s_q, d.head_dim_v);
    forget(d.k, d.num_kv_heads, d.s_kv, d.head_dim_qk);
    forget(d.v, d.num_kv_heads, d.s_kv, d.head_dim_v);
    return;
  }
  if (d.num_heads == 1) {
    d.q.head = d.head_dim_qk;
    d.out.head = d.head_dim_v;
  }
  if (d.num_kv_heads == 1) {
    d.k.head = d.head_dim_qk;
    d.v.head = d.head_dim_v;
  }
}

}  // namespace

size_t SdpaDescriptionHash::operator()(const SdpaDescription& description) const {
  return std::hash<std::string_view>()(
      {reinterpret_cast<const char*>(&description), sizeof(description)});
}

int64_t BucketLength(int64_t length) {
  if (length <= 1) return 1;
  return std::max(kSmallestBucket, BucketCount(length));
}

int64_t BucketCount(int64_t count) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(1, count))));
}

absl::StatusOr<SdpaDescription> DescribeSdpa(const AttentionProblem& p) {
  ATTND_RETURN_IF_ERROR(CheckOptions(p));
  ATTND_RETURN_IF_ERROR(CheckSizes(p));
  ATTND_RETURN_IF_ERROR(CheckView(p.q, p.dtype, "Q"));
  ATTND_RETURN_IF_ERROR(CheckView(p.k, p.dtype, "K"));
  ATTND_RETURN_IF_ERROR(CheckView(p.v, p.dtype, "V"));
  ATTND_RETURN_IF_ERROR(CheckView(p.out, p.out_dtype, "O"));
  if (SplitsHeads(p) && p.batch * p.num_heads > kMaxExtent) {
    return Refuse("spec.batch", absl::StrCat("times spec.num_heads is ", p.batch * p.num_heads,
                                             "; on the GPU ", kMaxExtent, " is the most here"));
  }
  SdpaDescription d;
  d.dtype = p.dtype;
  d.batch = p.batch;
  d.s_q = p.max_seqlen_q;
  d.s_kv = p.max_seqlen_kv;
  d.num_heads = p.num_heads;
  d.num_kv_heads = p.num_kv_heads;
  d.head_dim_qk = p.head_dim_qk;
  d.head_dim_v = p.head_dim_v;
  d.q = p.q.strides;
  d.k = p.k.strides;
  d.v = p.v.strides;
  d.out = p.out.strides;
  d.lse = p.lse;
  d.lse.dim = 1;
  d.is_paged = p.is_paged;
  d.has_lengths = !RunsDense(p);
  if (d.has_lengths) {
    // A page pool's single query row needs no start: a row that belongs to nobody spoils only
    // itself. cuDNN's decode kernels want it that way.
    if (p.q_is_thd || !p.is_paged || p.max_seqlen_q != 1) DescribeRaggedQ(p, d);
    DescribeKv(p, d);
    if (SplitsHeads(p)) SplitHeads(p, d);
  }
  ForgetDeadStrides(p, d);
  DescribeMask(p, d);
  // cuDNN 9.19 accepts FLOAT32 for O beside a mask, and then writes 16-bit elements all the same.
  const bool masked = d.left != kUnbounded || d.right != kUnbounded;
  d.out_dtype = masked ? p.dtype : p.out_dtype;
  return d;
}

std::string_view EngineName(const SdpaDescription& d) {
  if (d.is_paged) return "cudnn_paged";
  return d.has_lengths ? "cudnn_ragged" : "cudnn_dense";
}

}  // namespace attnd
