// What a cuDNN attention graph bakes in: the key of a compiled plan. No pointers, no scale, no
// lengths; sizes that would make a plan for every request are rounded up to buckets.
//
// Pure: needs no CUDA header and no device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "absl/status/statusor.h"
#include "engine/core/attention_problem.h"
#include "engine/core/attention_spec.h"

namespace attnd {

// Of a bound of the band: nothing is masked on that side.
inline constexpr int64_t kUnbounded = -1;

// Every byte of it is a field, so that hashing the bytes misses none.
struct SdpaDescription {
  DType dtype = DType::kUnspecified;
  DType out_dtype = DType::kUnspecified;  // What the graph writes: the problem's, or dtype.
  bool has_lengths = false;               // Sequence lengths are inputs of the graph.
  bool ragged_q = false;                  // Q, O and LSE have a start for each sequence.
  bool ragged_kv = false;
  bool is_paged = false;
  bool bottom_right = false;
  bool is_joint = false;        // Of several calls, whose tensors lie anywhere (joint_description.h).
  bool splits_heads = false;    // A query head is a sequence of its own.
  bool is_backward = false;
  bool deterministic = false;  // Backward only: cuDNN's forward always is.
  bool has_sink = false;
  BiasKind bias_kind = BiasKind::kNone;  // Or POST_SCALE, or ALIBI with cuDNN's own slopes.
  // Axes that a POST_SCALE bias has beside that of keys; it is row-major.
  bool bias_per_sequence = false;
  bool bias_per_head = false;
  bool bias_per_row = false;

  // Where lengths are inputs these are upper bounds, in buckets; the batch too where all is ragged.
  // Batch and heads may be a part of the problem's: then the graph runs once for each part.
  int64_t batch = 0;
  int64_t s_q = 0;
  int64_t s_kv = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_v = 0;

  // Backward, THD sides: bound of the rows up to a sequence's end, in buckets. 0: not told.
  int64_t total_q = 0;
  int64_t total_kv = 0;

  int64_t page_size = 0;
  int64_t pages_per_sequence = 0;  // In buckets, like the pool's sizes.
  int64_t num_pages_k = 0;
  int64_t num_pages_v = 0;

  int64_t left = kUnbounded;  // Inclusive, as in BandMask.
  int64_t right = kUnbounded;

  // The batch stride of a ragged tensor means nothing; it follows from the buckets. Gradients have
  // the strides of what they are gradients of.
  Strides q, k, v, out, lse;

  bool operator==(const SdpaDescription&) const = default;
};
static_assert(std::has_unique_object_representations_v<SdpaDescription>);

struct SdpaDescriptionHash {
  size_t operator()(const SdpaDescription& description) const;
};

// 1 for 0 and 1, so that decode keeps its own kernels; else a power of two, 64 or more.
int64_t BucketLength(int64_t length);

// A power of two.
int64_t BucketCount(int64_t count);

// UNIMPLEMENTED with the field and the nearest form for what cuDNN is known to refuse; what it
// makes of the rest, only building the graph tells.
absl::StatusOr<SdpaDescription> DescribeSdpa(const AttentionProblem& problem);
absl::StatusOr<SdpaDescription> DescribeSdpaBackward(const AttentionProblem& problem);

// How often the graph runs for the problem: for parts of its batch, each by parts of its heads.
struct SdpaParts {
  int64_t batch = 1;
  int64_t heads = 1;
};
SdpaParts PartsOf(const SdpaDescription& description, const AttentionProblem& problem);

// Whether dO and the gradients have ragged offsets of their own, not those of O, Q, K and V.
inline bool HasGradientOffsets(const SdpaDescription& d) { return d.is_joint && d.is_backward; }

// Whether each query head is a sequence of its own in a ragged graph.
bool SplitsHeads(const AttentionProblem& problem, bool is_backward);

// The most rows, or keys, of a sequence; the bound that a request states may be far above.
int64_t LongestOf(const AttentionProblem& problem, int64_t SequenceExtent::*length);

// "cudnn_dense", "cudnn_ragged" or "cudnn_paged".
std::string_view EngineName(const SdpaDescription& description);

}  // namespace attnd
