// A checked attention problem: everything a kernel needs to know but the pointers. Made by Resolve
// (engine/core/layout.h) alone; no layout names from here on.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/core/attention_spec.h"
#include "engine/core/dtype.h"
#include "engine/core/fp8_scales.h"
#include "engine/core/tensor_view.h"

namespace attnd {

// One sequence of the batch. Row numbers are positions in a token buffer, 0 on dense sides.
struct SequenceExtent {
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t q_row = 0;
  int64_t kv_row = 0;

  bool operator==(const SequenceExtent&) const = default;
};

// Keys that query row i of a sequence may see: first <= j < last.
struct KeyRange {
  int64_t first = 0;
  int64_t last = 0;
};

// Causal mask and window in one: key j is visible to query i where
//   diagonal(i) - left <= j <= diagonal(i) + right,  diagonal(i) = i (+ kv_len - q_len).
struct BandMask {
  std::optional<int64_t> left;   // Absent: unlimited.
  std::optional<int64_t> right;  // Absent: unlimited.
  bool bottom_right = false;

  bool operator==(const BandMask&) const = default;

  // The visible keys of query row i, clipped to the sequence; empty ranges have first == last.
  KeyRange VisibleKeys(int64_t i, int64_t q_len, int64_t kv_len) const;
};

// ALiBi's slope of a head of a model with so many, by the published rule.
double AlibiSlope(int64_t total_heads, int64_t head);

struct AttentionProblem {
  DType dtype = DType::kUnspecified;      // Q, K, V
  DType out_dtype = DType::kUnspecified;  // O: dtype, or kFloat32
  int64_t batch = 0;
  int64_t max_seqlen_q = 0;  // Dense: the axis. THD: >= every length.
  int64_t max_seqlen_kv = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_v = 0;
  bool q_is_thd = false;
  bool kv_is_thd = false;
  bool has_lengths = false;  // Some row of an allocated axis or token buffer belongs to nobody.

  bool is_paged = false;
  int64_t page_size = 0;
  int64_t pages_per_sequence = 0;  // Second axis of the page tables.
  int64_t num_pages_k = 0;         // Page numbers in the K table are below this.
  int64_t num_pages_v = 0;

  double scale = 1;
  std::optional<double> logit_softcap;
  BandMask mask;

  // Logit of query i and key j:
  //   x = scale * (q.k + PRE_SCALE bias);  x = cap * tanh(x / cap);
  //   x += POST_SCALE bias, or -slope[head] * |distance of j to i's diagonal|
  BiasKind bias_kind = BiasKind::kNone;
  std::optional<TensorDesc> bias;    // [1|b, 1|h, 1|s_q, s_kv] in dtype
  Strides bias_strides;              // Sequence, row, head, key; 0 on broadcast axes.
  std::vector<double> alibi_slopes;  // [h]; empty unless ALIBI.

  // What the softmax's denominator has beside the keys: nothing, 1, or exp(softmax_offset[head]).
  SoftmaxKind softmax_kind = SoftmaxKind::kVanilla;
  std::optional<TensorDesc> softmax_offset;  // [h] FLOAT32; LEARNABLE only.
  Dropout dropout;
  bool deterministic = false;
  bool batch_invariant = false;

  // All 1 but with an FP8 dtype; then the logits above are of real values.
  Fp8Scales fp8;
  // What O and dO have of them: FLOAT32 is stored as it is.
  float out_scale() const { return IsFloat8(out_dtype) ? fp8.scale_o : 1; }
  float out_descale() const { return IsFloat8(out_dtype) ? fp8.descale_o : 1; }
  float d_out_descale() const { return IsFloat8(out_dtype) ? fp8.descale_d_o : 1; }

  // Gradients lie in buffers of the inputs' shapes exactly as q, k and v do.
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView out;
  // LSE is [b, h, s_q], or [t_q, h] where q_is_thd; element strides of sequence (or row), row,
  // head.
  Strides lse;

  std::vector<SequenceExtent> sequences;  // batch of them

  // Shapes of the buffers; inputs that the problem does not use are absent.
  std::array<std::optional<TensorDesc>, kNumInputBuffers> inputs;
  TensorDesc out_desc;
  TensorDesc lse_desc;
};

}  // namespace attnd
