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
  bool lse_in_scratch = false;  // The graph writes LSE as [row, head] into scratch memory.

  // Where lengths are inputs these are upper bounds, in buckets; the batch too where all is ragged.
  int64_t batch = 0;
  int64_t s_q = 0;
  int64_t s_kv = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_v = 0;

  int64_t page_size = 0;
  int64_t pages_per_sequence = 0;  // In buckets, like the pool's sizes.
  int64_t num_pages_k = 0;
  int64_t num_pages_v = 0;

  int64_t left = kUnbounded;  // Inclusive, as in BandMask.
  int64_t right = kUnbounded;

  // The batch stride of a ragged tensor means nothing; it follows from the buckets.
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

// "cudnn_dense", "cudnn_ragged" or "cudnn_paged".
std::string_view EngineName(const SdpaDescription& description);

}  // namespace attnd
