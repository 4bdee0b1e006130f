// The small arrays that one request brings to a graph (lengths, ragged offsets) and to the kernels
// behind it (rows that get O = 0 and LSE = -inf), packed into one block for one copy to the device.
//
// Pure: needs no CUDA header and no device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/core/attention_problem.h"
#include "engine/cuda/sdpa_description.h"

namespace attnd {

// `rows` rows of O and LSE from these elements on, by the problem's strides.
struct RowSpan {
  int64_t out_start = 0;
  int64_t lse_start = 0;
  int64_t rows = 0;
  int64_t in_sequence = 0;  // 1: rows of a sequence that see no key. 0: rows of nobody.

  bool operator==(const RowSpan&) const = default;
};

// Floats from one FP8 scale to the next: cuDNN takes tensors of one element, aligned as others.
inline constexpr int64_t kFp8Slot = 4;

// Byte offsets of the arrays in a block; all multiples of 16.
struct RequestArrayLayout {
  // Slots: the description's batch for each part of the problem's.
  // INT64 [slots + 1], in elements from the tensor's first: where sequences start.
  int64_t q_offsets = 0, k_offsets = 0, v_offsets = 0, out_offsets = 0, lse_offsets = 0;
  int64_t q_lens = 0, kv_lens = 0;  // INT32 [slots]
  int64_t spans = 0;                // RowSpan [at most 3 * batch + 1]
  int64_t fp8_scales = 0;           // FLOAT32, in the order of kFp8ScaleFields, kFp8Slot apart
  int64_t bytes = 0;
};

RequestArrayLayout LayOutRequestArrays(const SdpaDescription& description,
                                       const AttentionProblem& problem);

struct RequestArrays {
  int64_t num_spans = 0;
  int64_t longest_span = 0;
  bool any_pair = false;  // False: no query sees a key, and there is nothing to launch.
};

// Writes the block of `problem`, whose description is `description`. `block` has layout.bytes.
//
// A sequence without keys has no queries either, as the graph sees it, and queries in front of the
// first that a bottom-right mask lets see a key are skipped: cuDNN leaves such rows as they were.
// Slots behind the batch have length 0 and repeat the last offset.
RequestArrays FillRequestArrays(const AttentionProblem& problem, const SdpaDescription& description,
                                std::span<std::byte> block);

// Whether a graph writes every element of the gradients' buffers: each row sees a key or, of K and
// V, has queries in its sequence, and the views leave nothing out.
bool WritesAllGradients(const AttentionProblem& problem);

}  // namespace attnd
