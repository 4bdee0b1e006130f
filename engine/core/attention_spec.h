// What a client asks for: the engine's mirror of attnd.v1.AttentionSpec and Sequences, before
// anything is checked. Absent optional sizes are taken from the buffers' shapes by the resolver.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/core/dtype.h"
#include "engine/core/fp8_scales.h"
#include "engine/core/tensor_view.h"

namespace attnd {

// Values equal attnd.v1.QkvLayout. Only engine/core/layout.cc says what they mean.
enum class Layout : uint8_t {
  kUnspecified = 0,
  kSb3hd = 1,
  kSbh3d = 2,
  kSbhdSb2hd = 3,
  kSbhdSbh2d = 4,
  kSbhdSbhdSbhd = 5,
  kBs3hd = 6,
  kBsh3d = 7,
  kBshdBs2hd = 8,
  kBshdBsh2d = 9,
  kBshdBshdBshd = 10,
  kT3hd = 11,
  kTh3d = 12,
  kThdT2hd = 13,
  kThdTh2d = 14,
  kThdThdThd = 15,
  kSbhdBshdBshd = 16,
  kBshdSbhdSbhd = 17,
  kThdBshdBshd = 18,
  kThdSbhdSbhd = 19,
  kPagedKvBshdBshdBshd = 20,
  kPagedKvBshdSbhdSbhd = 21,
  kPagedKvSbhdBshdBshd = 22,
  kPagedKvSbhdSbhdSbhd = 23,
  kPagedKvThdBshdBshd = 24,
  kPagedKvThdSbhdSbhd = 25,
  kBhsdBhsdBhsd = 26,
  kStrided = 27,
};
inline constexpr int kNumLayouts = 28;  // With kUnspecified.

// "BS3HD", "PAGED_KV_THD_BSHD_BSHD", "STRIDED", ...
std::string_view Name(Layout layout);

enum class Causal : uint8_t { kNone = 0, kTopLeft = 1, kBottomRight = 2 };
enum class Alignment : uint8_t { kUnspecified = 0, kTopLeft = 1, kBottomRight = 2 };
enum class BiasKind : uint8_t { kNone = 0, kPreScale = 1, kPostScale = 2, kAlibi = 3 };
enum class SoftmaxKind : uint8_t { kVanilla = 0, kOffByOne = 1, kLearnable = 2 };

struct AlibiShard {
  int64_t head_offset = 0;
  int64_t total_heads = 0;
};

struct Dropout {
  double probability = 0;
  int64_t seed = 0;
  int64_t offset = 0;
};

// Where Q, K or V lies with layout STRIDED, as the client wrote it.
struct RequestedView {
  Buffer buffer = Buffer::kQ;
  int64_t byte_offset = 0;
  std::vector<int64_t> strides;         // 4, or 3 on a THD side.
  std::optional<int64_t> group_stride;  // Of q alone.
};

struct AttentionSpec {
  Layout layout = Layout::kUnspecified;
  DType dtype = DType::kUnspecified;
  std::optional<int64_t> batch;
  std::optional<int64_t> max_seqlen_q;
  std::optional<int64_t> max_seqlen_kv;
  std::optional<int64_t> num_heads;
  std::optional<int64_t> num_kv_heads;
  std::optional<int64_t> head_dim_qk;
  std::optional<int64_t> head_dim_v;
  std::optional<int64_t> page_size;
  std::optional<double> scale;
  std::optional<double> logit_softcap;
  Causal causal = Causal::kNone;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
  Alignment window_alignment = Alignment::kUnspecified;
  BiasKind bias_kind = BiasKind::kNone;
  std::optional<AlibiShard> alibi;
  SoftmaxKind softmax_kind = SoftmaxKind::kVanilla;
  std::optional<Dropout> dropout;
  bool deterministic = false;
  bool batch_invariant = false;
  std::optional<Fp8Scales> fp8;
  std::optional<std::array<RequestedView, 3>> views;  // q, k, v
};

struct Sequences {
  std::vector<int64_t> cu_seqlens_q;
  std::vector<int64_t> cu_seqlens_kv;
  std::vector<int64_t> cu_seqlens_q_padded;
  std::vector<int64_t> cu_seqlens_kv_padded;
  std::optional<TensorDesc> page_table_k;
  std::optional<TensorDesc> page_table_v;
};

// Shapes of what a request carries, by buffer; absent where the field is not set.
struct InputDescs {
  std::array<std::optional<TensorDesc>, kNumInputBuffers> buffers;  // Indexed by Buffer.
  std::optional<TensorDesc> bias;
  std::optional<TensorDesc> softmax_offset;
};

}  // namespace attnd
