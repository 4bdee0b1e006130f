#include "engine/cuda/joint_description.h"

#include <algorithm>
#include <bit>
#include <string>

#include "engine/core/status.h"
#include "engine/cuda/sdpa_checks.h"

namespace attnd {
namespace {

// Lengths up to the first share a graph, and up to the second another. Longer calls fill a GPU.
constexpr int64_t kShort = 256;
constexpr int64_t kLongest = 1024;
constexpr int64_t kMaxSlots = 64;  // Sequences of one launch.
// Tiles of kTileRows query rows: empty slots have them too, and cost some time each.
constexpr int64_t kMaxTiles = 4096;
constexpr int64_t kTileRows = 128;
// cuDNN's float sums of dQ, which are slots times the class's rows.
constexpr int64_t kMaxSumBytes = int64_t{256} << 20;
// A call with more than this share of the slots runs alone.
constexpr int64_t kSmallestGain = 2;

absl::Status Refuse(std::string_view field) {
  return UnimplementedField(reason::kNotSupported, field, "keeps calls from being joined");
}

absl::Status CheckSpec(const AttentionProblem& p, bool is_backward) {
  if (IsFloat8(p.dtype)) return Refuse("spec.dtype");
  if (p.out_dtype != p.dtype) return Refuse("out_dtype");
  if (p.is_paged) return Refuse("spec.layout");
  if (p.bias_kind != BiasKind::kNone) return Refuse("spec.bias_kind");
  if (p.softmax_kind != SoftmaxKind::kVanilla) return Refuse("spec.softmax_kind");
  if (is_backward && p.deterministic) return Refuse("spec.deterministic");
  if (!is_backward && p.scale < 0) return Refuse("spec.scale");
  return CheckSdpa(p);
}

int64_t ClassOf(int64_t length) { return length <= kShort ? kShort : kLongest; }

// A power of two.
int64_t SlotsOf(const SdpaDescription& d, int64_t slots_of_sequence) {
  const int64_t tiles = d.num_heads * ((d.s_q + kTileRows - 1) / kTileRows);
  int64_t slots = std::min(kMaxSlots * slots_of_sequence, kMaxTiles / tiles);
  if (d.is_backward) {
    const int64_t row = d.num_heads * (d.head_dim_qk + 2 * std::max(d.head_dim_qk, d.head_dim_v));
    slots = std::min(slots, kMaxSumBytes / static_cast<int64_t>(sizeof(float)) / row / d.s_kv);
  }
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(1, slots))));
}

// Strides of an axis with one element say nothing, and must not keep calls apart.
Strides Canonical(Strides s, int64_t heads, bool one_row, int64_t head_dim, int64_t rows) {
  if (heads == 1) s.head = head_dim;
  if (one_row) s.seq = heads * head_dim;
  s.batch = rows * s.seq;
  return s;
}

}  // namespace

absl::StatusOr<SdpaDescription> DescribeJoint(const AttentionProblem& p, bool is_backward) {
  ATTND_RETURN_IF_ERROR(CheckSpec(p, is_backward));
  const int64_t longest_q = LongestOf(p, &SequenceExtent::q_len);
  const int64_t longest_kv = LongestOf(p, &SequenceExtent::kv_len);
  if (std::max(longest_q, longest_kv) > kLongest) return Refuse("spec.max_seqlen_q");
  SdpaDescription d;
  d.dtype = d.out_dtype = p.dtype;
  d.has_lengths = d.ragged_q = d.ragged_kv = d.is_joint = true;
  d.is_backward = is_backward;
  d.splits_heads = SplitsHeads(p, is_backward);
  d.num_heads = d.splits_heads ? 1 : p.num_heads;
  d.num_kv_heads = d.splits_heads ? 1 : p.num_kv_heads;
  d.head_dim_qk = p.head_dim_qk;
  d.head_dim_v = p.head_dim_v;
  d.s_q = d.s_kv = ClassOf(std::max(longest_q, longest_kv));
  d.bottom_right = p.mask.bottom_right && (p.mask.left || p.mask.right);
  // No bound masks anything that lies beyond a class.
  if (p.mask.left && *p.mask.left < kLongest) d.left = *p.mask.left;
  if (p.mask.right && *p.mask.right < kLongest) d.right = *p.mask.right;

  const bool one_q = !p.q_is_thd && p.max_seqlen_q <= 1;
  const bool one_kv = !p.kv_is_thd && p.max_seqlen_kv <= 1;
  d.q = Canonical(p.q.strides, d.num_heads, one_q, d.head_dim_qk, d.s_q);
  d.out = Canonical(p.out.strides, d.num_heads, one_q, d.head_dim_v, d.s_q);
  d.k = Canonical(p.k.strides, d.num_kv_heads, one_kv, d.head_dim_qk, d.s_kv);
  d.v = Canonical(p.v.strides, d.num_kv_heads, one_kv, d.head_dim_v, d.s_kv);
  d.lse = {.batch = d.s_q * d.num_heads, .seq = d.num_heads, .head = 1, .dim = 1};

  const int64_t slots_of_sequence = d.splits_heads ? p.num_heads : 1;
  d.batch = SlotsOf(d, slots_of_sequence);
  if (p.batch * slots_of_sequence * kSmallestGain > d.batch) return Refuse("spec.batch");
  return d;
}

JoinTerms TermsOf(const AttentionProblem& p, const SdpaDescription& d) {
  JoinTerms terms;
  terms.slots = p.batch * (d.splits_heads ? p.num_heads : 1);
  terms.max_slots = d.batch;
  terms.key.assign(reinterpret_cast<const char*>(&d), sizeof(d));
  const auto scale = static_cast<float>(p.scale);
  terms.key.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
  terms.key.append(reinterpret_cast<const char*>(&p.num_heads), sizeof(p.num_heads));
  return terms;
}

}  // namespace attnd
