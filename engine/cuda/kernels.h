// The small kernels around a cuDNN graph. Each enqueues itself on a stream and returns the launch's
// error; all pointers are device pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/core/dtype.h"
#include "engine/core/tensor_view.h"
#include "engine/cuda/request_arrays.h"

namespace attnd {

struct EmptyRows {
  const RowSpan* spans = nullptr;
  int64_t num_spans = 0;
  int64_t longest_span = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;       // Of O.
  int64_t element_bytes = 0;  // Of O; with head_dim a multiple of 16 bytes.
  std::byte* out = nullptr;
  float* lse = nullptr;         // Null: not wanted.
  const float* sink = nullptr;  // [num_heads]; null: none.
};

// O = 0 and LSE = -inf in all rows of the spans; LSE = the sink in rows of a sequence.
cudaError_t WriteEmptyRows(const EmptyRows& rows, cudaStream_t stream);

struct LseSegments {
  const LseSegment* segments = nullptr;
  int64_t count = 0;
  int64_t longest = 0;  // Rows.
  int64_t num_heads = 0;
  float* by_row = nullptr;
  float* lse = nullptr;
};

// From by_row to lse, and back.
cudaError_t LseFromRows(const LseSegments& segments, cudaStream_t stream);
cudaError_t LseToRows(const LseSegments& segments, cudaStream_t stream);

// to[i] = from[i], from FLOAT16 or BFLOAT16 to float.
cudaError_t WidenElements(DType dtype, const void* from, float* to, int64_t count,
                          cudaStream_t stream);

// The reverse, rounding to the nearest.
cudaError_t NarrowElements(DType dtype, const float* from, void* to, int64_t count,
                           cudaStream_t stream);

// to[i] = from[i], but +inf for -inf.
cudaError_t RaiseMinusInfinity(const float* from, float* to, int64_t count, cudaStream_t stream);

// to[i] = from[i * distance]
cudaError_t GatherFloats(const float* from, int64_t distance, float* to, int count,
                         cudaStream_t stream);

// Rows are added up in this many sums of a head first.
inline constexpr int64_t kSinkPartials = 64;

struct SinkGradient {
  DType dtype = DType::kUnspecified;  // FLOAT16 or BFLOAT16
  const void* out = nullptr;
  const void* d_out = nullptr;
  const float* lse = nullptr;
  const float* sink = nullptr;  // [heads]
  float* d_sink = nullptr;      // [heads]
  float* partials = nullptr;    // [heads, kSinkPartials]
  Strides out_strides;          // In elements.
  Strides lse_strides;
  // By slot, as in RequestArrays; null: every sequence has `rows` rows, by the batch strides.
  const int32_t* q_lens = nullptr;
  const int64_t* out_offsets = nullptr;
  const int64_t* lse_offsets = nullptr;
  bool splits_heads = false;  // Slot i * heads + n is head n of sequence i.
  int64_t batch = 0;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
};

// d_sink = -sum over rows of exp(sink - LSE) * rowsum(dO * O), in an order that depends on the
// shapes alone.
cudaError_t SumSinkGradients(const SinkGradient& sink, cudaStream_t stream);

// One of K and V.
struct PagedSide {
  const int32_t* table = nullptr;  // [batch, pages_per_sequence]; garbage past a sequence's length
  int32_t* clean_table = nullptr;  // [clean_batch, clean_pages]
  // [num_pages], zeroed: rows of a page that some sequence owns. Null: no page has others.
  int32_t* owned_rows = nullptr;
  std::byte* pages = nullptr;
  Strides bytes;           // Of the pages, in bytes.
  int64_t head_bytes = 0;  // A multiple of 16.
};

struct PagedKv {
  PagedSide sides[2];
  const int32_t* kv_lens = nullptr;  // [clean_batch]
  int64_t batch = 0;
  int64_t pages_per_sequence = 0;
  int64_t clean_batch = 0;
  int64_t clean_pages = 0;
  int64_t page_size = 0;
  int64_t num_kv_heads = 0;
};

// Makes page tables whose every entry is a page of its sequence, and writes zeros to the rows of
// last pages that no sequence owns: cuDNN multiplies them by 0, and they may hold NaN.
cudaError_t PreparePages(const PagedKv& kv, cudaStream_t stream);

}  // namespace attnd
