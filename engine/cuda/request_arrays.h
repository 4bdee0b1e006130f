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

// `rows` rows of O and LSE from these elements on, by these strides.
struct RowSpan {
  int64_t out_start = 0;
  int64_t lse_start = 0;
  int64_t rows = 0;
  int64_t in_sequence = 0;  // 1: rows of a sequence that see no key. 0: rows of nobody.
  int64_t out_seq = 0;
  int64_t out_head = 0;
  int64_t lse_seq = 0;  // 0: the caller wants no LSE.
  int64_t lse_head = 0;

  bool operator==(const RowSpan&) const = default;
};

// A sequence's LSE, which a graph has as [row, head] from element `by_row` on, in its caller's
// form.
struct LseSegment {
  int64_t by_row = 0;
  int64_t lse = 0;
  int64_t rows = 0;
  int64_t lse_seq = 0;
  int64_t lse_head = 0;

  bool operator==(const LseSegment&) const = default;
};

// A call of a graph, and where its tensors begin: elements from those that the graph is given.
struct PlacedCall {
  const AttentionProblem* problem = nullptr;
  int64_t q = 0, k = 0, v = 0, out = 0;
  int64_t d_out = 0, dq = 0, dk = 0, dv = 0;
  int64_t lse = 0;         // As the graph has it,
  int64_t lse_output = 0;  // and as the caller does.
  bool has_lse = true;     // The caller does.
};

// Floats from one FP8 scale to the next: cuDNN takes tensors of one element, aligned as others.
inline constexpr int64_t kFp8Slot = 4;

// Byte offsets of the arrays in a block; all multiples of 16.
struct RequestArrayLayout {
  // Slots: the description's batch for each part of the problem's.
  // INT64 [slots + 1], in elements from the tensor's first: where sequences start. Gradients have
  // starts of their own where several calls are joined.
  int64_t q_offsets = 0, k_offsets = 0, v_offsets = 0, out_offsets = 0, lse_offsets = 0;
  int64_t d_out_offsets = 0, dq_offsets = 0, dk_offsets = 0, dv_offsets = 0;
  int64_t q_lens = 0, kv_lens = 0;  // INT32 [slots]
  int64_t spans = 0;                // RowSpan [at most 3 for each sequence and 1 for each call]
  int64_t segments = 0;             // LseSegment [at most 1 for each sequence]
  int64_t fp8_scales = 0;           // FLOAT32, in the order of kFp8ScaleFields, kFp8Slot apart
  int64_t bytes = 0;
};

// Whether the graph's LSE is not where the caller wants it: ragged statistics are [row, head].
bool LseInScratch(const AttentionProblem& problem, const SdpaDescription& description);

RequestArrayLayout LayOutRequestArrays(const SdpaDescription& description,
                                       const AttentionProblem& problem);
RequestArrayLayout LayOutRequestArrays(const SdpaDescription& description,
                                       std::span<const PlacedCall> calls);

struct RequestArrays {
  int64_t num_spans = 0;
  int64_t longest_span = 0;
  int64_t num_segments = 0;
  int64_t longest_segment = 0;
  bool any_pair = false;  // False: no query sees a key, and there is nothing to launch.
};

// Writes the block of `problem`, whose description is `description`. `block` has layout.bytes.
//
// A sequence without keys has no queries either, as the graph sees it, and queries in front of the
// first that a bottom-right mask lets see a key are skipped: cuDNN leaves such rows as they were.
// Slots behind the batch have length 0 and repeat the last offset.
RequestArrays FillRequestArrays(const AttentionProblem& problem, const SdpaDescription& description,
                                std::span<std::byte> block);

// The same for calls that a joint graph runs together; their sequences fit its slots.
RequestArrays FillRequestArrays(std::span<const PlacedCall> calls,
                                const SdpaDescription& description, std::span<std::byte> block);

// Whether a graph writes every element of the gradients' buffers: each row sees a key or, of K and
// V, has queries in its sequence, and the views leave nothing out.
bool WritesAllGradients(const AttentionProblem& problem);

}  // namespace attnd
