// Three forms. Dense: every row of the axes belongs to a sequence and the lengths are round, so the
// graph has no lengths. Ragged: everything else that is not paged, dense layouts too, because a
// dense batch with lengths multiplies the rows behind a sequence by 0, and 0 * NaN is NaN; a ragged
// one does not read them. Paged: K and V through page tables.
#include "engine/cuda/sdpa_description.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "engine/cuda/sdpa_checks.h"

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
// cuDNN's accumulators of gradients are bounded by rows where head dims are multiples of this.
constexpr int64_t kBoundedDimMultiple = 16;
// Of the [batch, heads, s_q, s_kv] elements that deterministic sums need, in one run of the graph.
constexpr int64_t kMaxScoreBytes = int64_t{4} << 30;
constexpr double kMaxBiasCells = 0x1p31;
constexpr int64_t kMaxGridExtent = 65'535;  // Of batch and heads, which span a grid's axes.
// Of an accumulator; cuDNN's own arithmetic of sizes does not look for overflow.
constexpr double kMaxAccumulatorBytes = 1e15;

absl::Status Refuse(std::string_view field, std::string_view problem) {
  return UnimplementedField(reason::kNotSupported, field, problem);
}

// Not the bound that a request states: it may be far above its lengths.
int64_t LongestOf(const AttentionProblem& p, int64_t SequenceExtent::*length) {
  int64_t longest = 0;
  for (const SequenceExtent& s : p.sequences) longest = std::max(longest, s.*length);
  return longest;
}

// Top-left and bottom-right are the same.
bool IsSquare(const AttentionProblem& p, const SdpaDescription& d) {
  return !d.has_lengths && p.max_seqlen_q == p.max_seqlen_kv;
}

// Bounds that mask nothing within the geometry are left out: they cost time, and in decode (one
// query row, bottom right) a ninth of it.
void DescribeMask(const AttentionProblem& p, SdpaDescription& d) {
  const int64_t last_q = std::max<int64_t>(0, LongestOf(p, &SequenceExtent::q_len) - 1);
  const int64_t last_kv = std::max<int64_t>(0, LongestOf(p, &SequenceExtent::kv_len) - 1);
  const BandMask& mask = p.mask;
  if (mask.right && *mask.right < (mask.bottom_right ? last_q : last_kv)) d.right = *mask.right;
  if (mask.left && *mask.left < (mask.bottom_right ? last_kv : last_q)) d.left = *mask.left;
  const bool masked = d.left != kUnbounded || d.right != kUnbounded;
  d.bottom_right = masked && mask.bottom_right && !IsSquare(p, d);
  if (d.bias_kind == BiasKind::kAlibi) d.right = 0;  // Or cuDNN refuses it.
}

// Few enough lengths for a plan each: eight to an octave.
bool HasOwnPlan(int64_t length) {
  if (length <= 0 || length % kDenseMultiple != 0) return false;
  const auto multiple = static_cast<uint64_t>(length / kDenseMultiple);
  return multiple >> std::countr_zero(multiple) < kDenseSteps;
}

bool RunsDense(const AttentionProblem& p, bool is_backward) {
  if (p.q_is_thd || p.kv_is_thd || p.has_lengths || p.is_paged || p.q.group_heads != 0)
    return false;
  const bool is_decode =
      p.max_seqlen_q == 1 && !is_backward && p.softmax_kind == SoftmaxKind::kVanilla;
  if (!HasOwnPlan(p.max_seqlen_kv) || (!is_decode && !HasOwnPlan(p.max_seqlen_q))) return false;
  return p.max_seqlen_q <= p.max_seqlen_kv || (!p.mask.left && !p.mask.bottom_right);
}

// In [b, h, s, d] the distance of two heads grows with the axis, and would make a plan for every
// length. There each head becomes a sequence of its own, with one head; a head of K and V that
// several query heads share is then read by each of them. Its gradient is not theirs to write. The
// same where query heads lie in groups, and no one distance is theirs.
bool SplitsHeads(const AttentionProblem& p, bool is_backward) {
  if (is_backward && p.num_heads != p.num_kv_heads) return false;
  if (p.is_paged || p.q_is_thd || p.kv_is_thd || p.num_heads == 1) return false;
  if (p.q.group_heads != 0) return true;
  auto head_major = [](const TensorView& view) { return view.strides.head > view.strides.seq; };
  return head_major(p.q) || head_major(p.k) || head_major(p.v) || head_major(p.out);
}

void SplitHeads(const AttentionProblem& p, SdpaDescription& d) {
  d.batch = BucketCount(p.batch * p.num_heads);
  d.splits_heads = true;
  d.num_heads = d.num_kv_heads = 1;
  d.lse_in_scratch = false;  // A head's statistics lie row by row in [b, h, s_q].
  d.q.head = d.k.head = d.head_dim_qk;
  d.v.head = d.out.head = d.head_dim_v;
  d.lse = {.batch = d.s_q, .seq = 1, .head = 1, .dim = 1};
}

void DescribeRaggedQ(const AttentionProblem& p, SdpaDescription& d) {
  d.ragged_q = true;
  d.batch = BucketCount(p.batch);
  d.s_q = BucketLength(LongestOf(p, &SequenceExtent::q_len));
  // cuDNN 9.19's ragged decode kernels write the LSE of one query head of a group only, and know no
  // sink; backward, a single row made NaN of logits far below 0 in other versions.
  const bool is_grouped = p.num_heads != p.num_kv_heads && !SplitsHeads(p, d.is_backward);
  if (is_grouped || d.has_sink || d.is_backward) d.s_q = std::max(d.s_q, kSmallestBucket);
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
  d.s_kv = std::max({BucketLength(LongestOf(p, &SequenceExtent::kv_len)), kSmallestBucket, d.s_q});
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

int64_t LastRow(const AttentionProblem& p, bool of_q) {
  int64_t last = 1;
  for (const SequenceExtent& s : p.sequences) {
    last = std::max(last, of_q ? s.q_row + s.q_len : s.kv_row + s.kv_len);
  }
  return last;
}

// Without these bounds cuDNN's accumulators span batch times the longest length. With them they
// have the strides of the tensors, and of K and V room for all query heads only where heads lie
// within rows.
void DescribeTotals(const AttentionProblem& p, SdpaDescription& d) {
  if (p.head_dim_qk % kBoundedDimMultiple != 0 || p.head_dim_v % kBoundedDimMultiple != 0) return;
  auto has_heads_in_rows = [](const TensorView& view, int64_t heads) {
    return view.strides.head * heads <= view.strides.seq;
  };
  if (p.q_is_thd && has_heads_in_rows(p.q, p.num_heads)) d.total_q = BucketCount(LastRow(p, true));
  if (p.kv_is_thd && has_heads_in_rows(p.k, p.num_kv_heads) &&
      has_heads_in_rows(p.v, p.num_kv_heads)) {
    d.total_kv = BucketCount(LastRow(p, false));
  }
}

// Takes less and less of the problem in one run of a deterministic graph until its scratch is
// bearable: fewer sequences first, then fewer KV heads, with their query heads. No sum spans two of
// either.
void TakeParts(SdpaDescription& d, bool heads_too) {
  auto too_large = [&] {
    return d.batch * d.num_heads > kMaxScoreBytes / SizeOf(d.dtype) / d.s_q / d.s_kv;
  };
  auto less = [](int64_t count) { return count % 2 == 0 ? count / 2 : 1; };
  while (d.batch > 1 && too_large()) d.batch = less(d.batch);
  const int64_t group = d.num_heads / d.num_kv_heads;
  while (heads_too && d.num_kv_heads > 1 && too_large()) {
    d.num_kv_heads = less(d.num_kv_heads);
    d.num_heads = group * d.num_kv_heads;
  }
  if (!d.has_lengths) d.lse.batch = d.num_heads * d.s_q;
}

absl::Status DescribeBias(const AttentionProblem& p, SdpaDescription& d) {
  ATTND_RETURN_IF_ERROR(CheckSdpaAlibi(p, IsSquare(p, d)));
  if (d.splits_heads && (d.has_sink || p.bias_kind == BiasKind::kAlibi)) {
    return Refuse("spec.layout",
                  "has heads before rows, beside which cuDNN's numbers by head do "
                  "not work here; BSHD_BSHD_BSHD works");
  }
  d.bias_kind = p.bias_kind;
  if (p.bias_kind != BiasKind::kPostScale) return absl::OkStatus();
  if (d.has_lengths) {
    return Refuse("spec.bias_kind",
                  "is POST_SCALE, which cuDNN adds to dense layouts of full lengths only, of 128 "
                  "times a small number");
  }
  const double cells = static_cast<double>(d.batch) * static_cast<double>(d.num_heads) *
                       static_cast<double>(d.s_q) * static_cast<double>(d.s_kv);
  if (cells > kMaxBiasCells) {
    return Refuse("bias", "has a cell at 2^31 or beyond, where cuDNN's indices end");
  }
  d.bias_per_sequence = p.bias_strides.batch != 0;
  d.bias_per_head = p.bias_strides.head != 0;
  d.bias_per_row = p.bias_strides.seq != 0;
  if (d.is_backward && !d.bias_per_row) {
    return Refuse("bias", "is [.., .., 1, s_kv], of which cuDNN makes no gradient");
  }
  if (d.is_backward && !(d.bias_per_sequence && d.bias_per_head)) {
    return Refuse("bias",
                  "is broadcast, and cuDNN sums its gradient in any order, in a type that it does "
                  "not tell");
  }
  return absl::OkStatus();
}

// What cuDNN 9.19 runs in FP8 on Hopper. It stores S and dP in FP8 as well: only where the request
// scales them, since they would lose nearly all digits unscaled.
absl::Status CheckFp8(const AttentionProblem& p, const SdpaDescription& d) {
  if (!IsFloat8(p.dtype)) return absl::OkStatus();
  const bool stores_scaled = p.fp8.scale_s != 1 && (!d.is_backward || p.fp8.scale_d_p != 1);
  const bool is_plain = !d.has_lengths && p.out_dtype == p.dtype &&
                        p.softmax_kind == SoftmaxKind::kVanilla && p.bias_kind == BiasKind::kNone &&
                        d.left == kUnbounded && d.right <= 0 && !d.bottom_right &&
                        d.q.head < d.q.seq && d.k.head < d.k.seq;
  const int64_t multiple = d.is_backward ? 128 : 16, most = d.is_backward ? 128 : kMaxSdpaHeadDim;
  const bool fits = p.head_dim_qk % multiple == 0 && p.head_dim_v % multiple == 0 &&
                    std::max(p.head_dim_qk, p.head_dim_v) <= most;
  if (stores_scaled && is_plain && fits) return absl::OkStatus();
  return Refuse("spec.dtype",
                "is FP8, which cuDNN computes for plain or causal dense batches only, with scales "
                "for S (and dP)");
}

absl::Status CheckExtents(const SdpaDescription& d) {
  if (d.batch > kMaxGridExtent || d.num_heads > kMaxGridExtent) {
    return Refuse("spec.batch", absl::StrCat("or spec.num_heads spans more than the ",
                                             kMaxGridExtent, " that cuDNN's grids have"));
  }
  const double rows = static_cast<double>(d.batch) * static_cast<double>(d.num_heads) *
                      static_cast<double>(std::max(d.s_q, d.s_kv));
  if (rows * static_cast<double>(std::max(d.head_dim_qk, d.head_dim_v)) * sizeof(float) >
      kMaxAccumulatorBytes) {
    return Refuse("spec.max_seqlen_q", "makes a problem that no memory holds");
  }
  return absl::OkStatus();
}

absl::StatusOr<SdpaDescription> Describe(const AttentionProblem& p, bool is_backward) {
  ATTND_RETURN_IF_ERROR(CheckSdpa(p));
  if (p.q.group_heads != 0 && !SplitsHeads(p, is_backward)) {
    return Refuse("spec.views.q.group_stride",
                  "puts query heads into groups, whose gradients, and rows of tokens, cuDNN does "
                  "not know");
  }
  if (SplitsHeads(p, is_backward) && p.batch * p.num_heads > kMaxSdpaExtent) {
    return Refuse("spec.batch", absl::StrCat("times spec.num_heads is ", p.batch * p.num_heads,
                                             "; on the GPU ", kMaxSdpaExtent, " is the most here"));
  }
  SdpaDescription d;
  d.dtype = d.out_dtype = p.dtype;
  d.is_backward = is_backward;
  d.deterministic = is_backward && p.deterministic;
  // A sink is in the LSE that backward starts from: it needs no more.
  d.has_sink = !is_backward && p.softmax_kind != SoftmaxKind::kVanilla;
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
  d.has_lengths = !RunsDense(p, is_backward);
  if (d.has_lengths) {
    // A page pool's single query row needs no start: a row that belongs to nobody spoils only
    // itself. cuDNN's decode kernels want it that way.
    if (p.q_is_thd || !p.is_paged || p.max_seqlen_q != 1 || d.has_sink) DescribeRaggedQ(p, d);
    DescribeKv(p, d);
    if (SplitsHeads(p, is_backward)) SplitHeads(p, d);
  }
  ATTND_RETURN_IF_ERROR(CheckExtents(d));
  ATTND_RETURN_IF_ERROR(DescribeBias(p, d));
  ForgetDeadStrides(p, d);
  DescribeMask(p, d);
  ATTND_RETURN_IF_ERROR(CheckFp8(p, d));
  return d;
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
  if (p.scale < 0) {  // It takes the largest product for the largest logit: O overflows.
    return Refuse("spec.scale", "is below 0, with which cuDNN's forward kernels overflow");
  }
  ATTND_ASSIGN_OR_RETURN(SdpaDescription d, Describe(p, false));
  // cuDNN 9.19 accepts FLOAT32 for O beside a mask, and then writes 16-bit elements all the same.
  const bool masked = d.left != kUnbounded || d.right != kUnbounded;
  if (!masked) d.out_dtype = p.out_dtype;
  return d;
}

absl::StatusOr<SdpaDescription> DescribeSdpaBackward(const AttentionProblem& p) {
  if (p.dtype == DType::kFloat16 && p.out_dtype != p.dtype) {
    return Refuse("out", "is FLOAT32, whose range cuDNN's FLOAT16 gradients have not");
  }
  ATTND_ASSIGN_OR_RETURN(SdpaDescription d, Describe(p, true));
  DescribeTotals(p, d);
  // A dBias sums over parts, ALiBi's slopes are of all heads, and an FP8 graph's amax is of all
  // that it gets.
  if (d.deterministic && d.bias_kind != BiasKind::kPostScale && !IsFloat8(d.dtype)) {
    TakeParts(d, d.bias_kind == BiasKind::kNone);
  }
  return d;
}

SdpaParts PartsOf(const SdpaDescription& d, const AttentionProblem& p) {
  const int64_t heads = d.splits_heads ? p.num_heads : 1;
  return {.batch = std::max<int64_t>(1, (p.batch * heads + d.batch - 1) / d.batch),
          .heads = d.splits_heads ? 1 : p.num_heads / d.num_heads};
}

std::string_view EngineName(const SdpaDescription& d) {
  if (d.is_paged) return "cudnn_paged";
  return d.has_lengths ? "cudnn_ragged" : "cudnn_dense";
}

}  // namespace attnd
