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

  bool operator==(const RowSpan&) const = default;
};

// Byte offsets of the arrays in a block; all multiples of 16.
struct RequestArrayLayout {
  // INT64 [description.batch + 1], in elements from the tensor's first: where sequences start.
  int64_t q_offsets = 0, k_offsets = 0, v_offsets = 0, out_offsets = 0, lse_offsets = 0;
  int64_t q_lens = 0, kv_lens = 0;  // INT32 [description.batch]
  int64_t spans = 0;                // RowSpan [at most 3 * batch + 1]
  int64_t bytes = 0;
};

RequestArrayLayout LayOutRequestArrays(const SdpaDescription& description, int64_t batch);

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

}  // namespace attnd
