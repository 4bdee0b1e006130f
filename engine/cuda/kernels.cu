#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "engine/cuda/kernels.h"

namespace attnd {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxGrid = 32768;  // Of an axis; loops cover the rest.

unsigned GridOf(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>(items, 1, kMaxGrid));
}

// A block takes a row of a span at a time.
__global__ void EmptyRowsKernel(EmptyRows rows) {
  const int64_t chunks_per_head = rows.head_dim * rows.element_bytes / 16;
  for (int64_t at = blockIdx.y; at < rows.num_spans; at += gridDim.y) {
    const RowSpan span = rows.spans[at];
    for (int64_t row = blockIdx.x; row < span.rows; row += gridDim.x) {
      std::byte* out = rows.out + (span.out_start + row * span.out_seq) * rows.element_bytes;
      for (int64_t c = threadIdx.x; c < rows.num_heads * chunks_per_head; c += blockDim.x) {
        const int64_t head = c / chunks_per_head;
        *reinterpret_cast<uint4*>(out + head * span.out_head * rows.element_bytes +
                                  c % chunks_per_head * 16) = make_uint4(0, 0, 0, 0);
      }
      if (rows.lse == nullptr || span.lse_seq == 0) continue;
      float* lse = rows.lse + span.lse_start + row * span.lse_seq;
      for (int64_t head = threadIdx.x; head < rows.num_heads; head += blockDim.x) {
        const bool has_sink = rows.sink != nullptr && span.in_sequence != 0;
        lse[head * span.lse_head] = has_sink ? rows.sink[head] : -INFINITY;
      }
    }
  }
}

// Blocks of a column of the grid take a segment.
template <bool kToRows>
__global__ void LseKernel(LseSegments t) {
  for (int64_t n = blockIdx.y; n < t.count; n += gridDim.y) {
    const LseSegment segment = t.segments[n];
    const int64_t total = segment.rows * t.num_heads;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
         at += step) {
      const int64_t row = at % segment.rows;
      const int64_t head = at / segment.rows;
      float& by_row = t.by_row[segment.by_row + row * t.num_heads + head];
      float& lse = t.lse[segment.lse + row * segment.lse_seq + head * segment.lse_head];
      if constexpr (kToRows) {
        by_row = lse;
      } else {
        lse = by_row;
      }
    }
  }
}

template <typename T>
__global__ void WidenKernel(const T* from, float* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count;
       at += step) {
    to[at] = static_cast<float>(from[at]);
  }
}

template <typename T>
__global__ void NarrowKernel(const float* from, T* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count;
       at += step) {
    to[at] = static_cast<T>(from[at]);
  }
}

__global__ void RaiseMinusInfinityKernel(const float* from, float* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count;
       at += step) {
    to[at] = from[at] == -INFINITY ? INFINITY : from[at];
  }
}

__global__ void GatherKernel(const float* from, int64_t distance, float* to) {
  to[threadIdx.x] = from[threadIdx.x * distance];
}

// A block of one warp sums every kSinkPartials-th row of a head.
template <typename T>
__global__ void SinkPartialsKernel(SinkGradient s) {
  const auto* out = static_cast<const T*>(s.out);
  const auto* d_out = static_cast<const T*>(s.d_out);
  for (int64_t at = blockIdx.x; at < s.heads * kSinkPartials; at += gridDim.x) {
    const int64_t head = at / kSinkPartials;
    float sum = 0;
    for (int64_t i = 0; i < s.batch; ++i) {
      const int64_t slot = s.splits_heads ? i * s.heads + head : i;
      const bool in_slot = s.splits_heads && s.q_lens != nullptr;
      const int64_t rows = s.q_lens != nullptr ? s.q_lens[slot] : s.rows;
      const int64_t out_at = (s.q_lens != nullptr ? s.out_offsets[slot] : i * s.out_strides.batch) +
                             (in_slot ? 0 : head * s.out_strides.head);
      const int64_t lse_at = (s.q_lens != nullptr ? s.lse_offsets[slot] : i * s.lse_strides.batch) +
                             (in_slot ? 0 : head * s.lse_strides.head);
      for (int64_t row = at % kSinkPartials; row < rows; row += kSinkPartials) {
        float d = 0;
        for (int64_t c = threadIdx.x; c < s.head_dim; c += 32) {
          const int64_t element = out_at + row * s.out_strides.seq + c * s.out_strides.dim;
          d += static_cast<float>(out[element]) * static_cast<float>(d_out[element]);
        }
        for (int distance = 16; distance > 0; distance /= 2) {
          d += __shfl_xor_sync(0xFFFFFFFF, d, distance);
        }
        // Rows without any weight, of the sink neither, have an LSE of -inf (or +inf here).
        const float lse = s.lse[lse_at + row * s.lse_strides.seq];
        if (lse != -INFINITY) sum -= expf(s.sink[head] - lse) * d;
      }
    }
    if (threadIdx.x == 0) s.partials[at] = sum;
  }
}

__global__ void SinkSumsKernel(SinkGradient s) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t head = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; head < s.heads;
       head += step) {
    float sum = 0;
    for (int64_t n = 0; n < kSinkPartials; ++n) sum += s.partials[head * kSinkPartials + n];
    s.d_sink[head] = sum;
  }
}

__global__ void CleanTablesKernel(PagedKv kv) {
  const PagedSide side = kv.sides[blockIdx.y];
  const int64_t total = kv.clean_batch * kv.clean_pages;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += step) {
    const int64_t i = at / kv.clean_pages;
    const int64_t j = at % kv.clean_pages;
    const int64_t length = kv.kv_lens[i];
    const int64_t rows = length - j * kv.page_size;
    int32_t page = 0;
    if (rows > 0) {
      page = side.table[i * kv.pages_per_sequence + j];
      if (side.owned_rows != nullptr) {
        atomicMax(&side.owned_rows[page], static_cast<int32_t>(min(rows, kv.page_size)));
      }
    } else if (length > 0) {
      page = side.table[i * kv.pages_per_sequence];
    }
    side.clean_table[at] = page;
  }
}

// A block for each sequence, head and side. Sequences may share a last page: then both write zeros.
__global__ void ZeroTailsKernel(PagedKv kv) {
  const PagedSide side = kv.sides[blockIdx.z];
  const int64_t chunks = side.head_bytes / 16;
  for (int64_t i = blockIdx.x; i < kv.batch; i += gridDim.x) {
    const int64_t length = kv.kv_lens[i];
    if (length % kv.page_size == 0) continue;
    const int64_t page = side.clean_table[i * kv.clean_pages + length / kv.page_size];
    const int64_t first = side.owned_rows[page];
    std::byte* base =
        side.pages + page * side.bytes.batch + static_cast<int64_t>(blockIdx.y) * side.bytes.head;
    for (int64_t c = threadIdx.x; c < (kv.page_size - first) * chunks; c += blockDim.x) {
      *reinterpret_cast<uint4*>(base + (first + c / chunks) * side.bytes.seq + c % chunks * 16) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace

cudaError_t WriteEmptyRows(const EmptyRows& rows, cudaStream_t stream) {
  if (rows.num_spans == 0 || rows.num_heads == 0) return cudaSuccess;
  const dim3 grid(GridOf(std::min<int64_t>(rows.longest_span, 1024)), GridOf(rows.num_spans));
  EmptyRowsKernel<<<grid, kThreads, 0, stream>>>(rows);
  return cudaGetLastError();
}

template <bool kToRows>
cudaError_t MoveLse(const LseSegments& t, cudaStream_t stream) {
  if (t.count == 0 || t.num_heads == 0) return cudaSuccess;
  const dim3 grid(GridOf((t.longest * t.num_heads + kThreads - 1) / kThreads), GridOf(t.count));
  LseKernel<kToRows><<<grid, kThreads, 0, stream>>>(t);
  return cudaGetLastError();
}

cudaError_t LseFromRows(const LseSegments& segments, cudaStream_t stream) {
  return MoveLse<false>(segments, stream);
}

cudaError_t LseToRows(const LseSegments& segments, cudaStream_t stream) {
  return MoveLse<true>(segments, stream);
}

cudaError_t WidenElements(DType dtype, const void* from, float* to, int64_t count,
                          cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned grid = GridOf((count + kThreads - 1) / kThreads);
  if (dtype == DType::kFloat16) {
    WidenKernel<<<grid, kThreads, 0, stream>>>(static_cast<const __half*>(from), to, count);
  } else {
    WidenKernel<<<grid, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(from), to, count);
  }
  return cudaGetLastError();
}

cudaError_t NarrowElements(DType dtype, const float* from, void* to, int64_t count,
                           cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned grid = GridOf((count + kThreads - 1) / kThreads);
  if (dtype == DType::kFloat16) {
    NarrowKernel<<<grid, kThreads, 0, stream>>>(from, static_cast<__half*>(to), count);
  } else {
    NarrowKernel<<<grid, kThreads, 0, stream>>>(from, static_cast<__nv_bfloat16*>(to), count);
  }
  return cudaGetLastError();
}

cudaError_t RaiseMinusInfinity(const float* from, float* to, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned grid = GridOf((count + kThreads - 1) / kThreads);
  RaiseMinusInfinityKernel<<<grid, kThreads, 0, stream>>>(from, to, count);
  return cudaGetLastError();
}

cudaError_t GatherFloats(const float* from, int64_t distance, float* to, int count,
                         cudaStream_t stream) {
  GatherKernel<<<1, static_cast<unsigned>(count), 0, stream>>>(from, distance, to);
  return cudaGetLastError();
}

cudaError_t SumSinkGradients(const SinkGradient& s, cudaStream_t stream) {
  const unsigned grid = GridOf(s.heads * kSinkPartials);
  if (s.dtype == DType::kFloat16) {
    SinkPartialsKernel<__half><<<grid, 32, 0, stream>>>(s);
  } else {
    SinkPartialsKernel<__nv_bfloat16><<<grid, 32, 0, stream>>>(s);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  SinkSumsKernel<<<GridOf((s.heads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(s);
  return cudaGetLastError();
}

cudaError_t PreparePages(const PagedKv& kv, cudaStream_t stream) {
  if (kv.batch == 0 || kv.num_kv_heads == 0) return cudaSuccess;
  const int64_t entries = kv.clean_batch * kv.clean_pages;
  const dim3 tables(GridOf((entries + kThreads - 1) / kThreads), 2);
  CleanTablesKernel<<<tables, kThreads, 0, stream>>>(kv);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (kv.sides[0].owned_rows == nullptr) return cudaSuccess;
  const dim3 tails(GridOf(kv.batch), static_cast<unsigned>(kv.num_kv_heads), 2);
  ZeroTailsKernel<<<tails, kThreads, 0, stream>>>(kv);
  return cudaGetLastError();
}

}  // namespace attnd
