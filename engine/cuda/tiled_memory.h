// What blocks of the tiled kernels keep in shared memory, and how it gets there and back. Device
// code; every function is called by all kThreads threads of a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "engine/cuda/tiled_kernels.h"

namespace attnd::tiled {

inline constexpr int kThreads = 256;  // 16 x 16, each with 4 x 4 cells of a tile.
inline constexpr int kChunk = 32;     // Components of a product's chunk.
inline constexpr int kPitch = 68;     // Floats between rows of 64: keeps float4s apart and aligned.
inline constexpr int kSliceFloats = 4096;

struct Shared {
  alignas(16) float stage[2 * kChunk * kPitch];  // Two chunks, or a slice.
  alignas(16) float weights[kKeys * kPitch];
  // Of the tile's rows. Elements where they start in Q, in O and in LSE; -1: nothing to read there.
  int64_t q[kRows], out[kRows], lse_at[kRows];
  int64_t first[kRows], last[kRows];  // Visible keys.
  int64_t head[kRows], row[kRows];
  DropoutKey dropout_key[kRows];
  bool is_wrong[kRows];             // Float32 could not hold the row.
  RowStatistics statistics[kRows];  // Backward.
  // Of the tile's keys, in K and in V; -1: not to be read.
  int64_t k[kKeys], v[kKeys];
};
static_assert(kSliceFloats <= 2 * kChunk * kPitch);
static_assert(sizeof(Shared) <= 48 * 1024);

// A thread's place in the tile: rows 4 * ty .. 4 * ty + 3, columns 4 * tx .. 4 * tx + 3.
__device__ inline int Tx() { return static_cast<int>(threadIdx.x) % 16; }
__device__ inline int Ty() { return static_cast<int>(threadIdx.x) / 16; }

template <typename T>
struct TypeTag {
  using Type = T;
};

// function(TypeTag<the type>{})
template <typename Function>
__device__ inline void WithType(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat32: return function(TypeTag<float>{});
    case DType::kFloat16: return function(TypeTag<__half>{});
    case DType::kBFloat16: return function(TypeTag<__nv_bfloat16>{});
    case DType::kFloat8E4M3: return function(TypeTag<__nv_fp8_e4m3>{});
    case DType::kFloat8E5M2: return function(TypeTag<__nv_fp8_e5m2>{});
    case DType::kUnspecified:
    case DType::kInt32: return;
  }
}

__device__ inline float LoadOne(DType dtype, const std::byte* data, int64_t element) {
  float value = 0;
  WithType(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    value = static_cast<float>(reinterpret_cast<const T*>(data)[element]);
  });
  return value;
}

// float to T: to nearest even; FP8 saturates.
template <typename T>
__device__ inline void StoreOne(std::byte* data, int64_t element, float value) {
  reinterpret_cast<T*>(data)[element] = T(value);
}

__device__ inline int64_t HeadStart(const Matrix& m, int64_t head) {
  if (m.group_heads == 0) return head * m.strides.head;
  return head / m.group_heads * m.group_stride + head % m.group_heads * m.strides.head;
}

__device__ inline int64_t RowStart(const Matrix& m, int64_t sequence, int64_t token_row,
                                   int64_t row, int64_t head) {
  return sequence * m.strides.batch + token_row * m.start_multiplier + row * m.strides.seq +
         HeadStart(m, head);
}

// Threads 0 .. kRows - 1 each fill one row of `tile`. Follows and precedes a barrier.
__device__ inline void SetRows(const Problem& p, int64_t sequence, const RowTile& tile,
                               Shared& shared) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kRows) return;
  shared.q[r] = shared.out[r] = shared.lse_at[r] = -1;
  shared.first[r] = shared.last[r] = 0;
  shared.head[r] = shared.row[r] = 0;
  if (r >= tile.rows) return;
  const Sequence s = p.sequences[sequence];
  const int64_t n = tile.first + r;
  const int64_t head = tile.head + n / s.q_len, row = n % s.q_len;
  const KeyRange keys = VisibleKeys(p.band, s, row, row);
  shared.first[r] = keys.first;
  shared.last[r] = keys.last;
  shared.head[r] = head;
  shared.row[r] = row;
  if (keys.first < keys.last) shared.q[r] = RowStart(p.q, sequence, s.q_row, row, head);
  shared.out[r] = RowStart(p.out, sequence, s.q_row, row, head);
  shared.lse_at[r] = sequence * p.lse.batch + (s.q_row + row) * p.lse.seq + head * p.lse.head;
  if (p.dropout.on) shared.dropout_key[r] = DropoutKeyOf(p.dropout, sequence, head);
}

struct SequenceHead {
  int64_t sequence;
  int64_t head;
};

// Where a key of a KV head starts in `m`, which is K or V; `pages` is its page table, or null.
__device__ inline int64_t KeyStart(const Problem& p, const Matrix& m, const int32_t* pages,
                                   const SequenceHead& at, int64_t key) {
  if (pages == nullptr) {
    return RowStart(m, at.sequence, p.sequences[at.sequence].kv_row, key, at.head);
  }
  const int64_t entry = at.sequence * p.pages_per_sequence + key / p.page_size;
  return RowStart(m, pages[entry], 0, key % p.page_size, at.head);
}

__device__ inline int64_t KvHeadOf(const Problem& p, const Shared& shared, int r) {
  return shared.head[r] / p.heads.shared();
}

// Threads 0 .. kKeys - 1 each fill one key from first_key on, where it is one of `keys`. Follows
// and precedes a barrier.
__device__ inline void SetKeys(const Problem& p, int64_t sequence, int64_t kv_head,
                               int64_t first_key, const KeyRange& keys, Shared& shared) {
  const int n = static_cast<int>(threadIdx.x);
  if (n >= kKeys) return;
  const int64_t j = first_key + n;
  shared.k[n] = shared.v[n] = -1;
  if (j < keys.first || j >= keys.last) return;
  shared.k[n] = KeyStart(p, p.k, p.pages_k, {sequence, kv_head}, j);
  shared.v[n] = KeyStart(p, p.v, p.pages_v, {sequence, kv_head}, j);
}

// Components c0 .. c0 + kChunk - 1 of 64 rows -> [kChunk, kPitch], a column for each row. 0 where
// there is no such component, and in rows that are not to be read.
__device__ inline void LoadChunk(const Matrix& m, const int64_t* starts, int components, int c0,
                                 float* to) {
  constexpr int kLoads = kChunk * 64 / kThreads;
  // 8 components x 4 rows for a warp: neighbours in memory, and every bank of shared memory once.
  const int lane_c = static_cast<int>(threadIdx.x) % 8;
  const int lane_row =
      static_cast<int>(threadIdx.x) / 32 * 8 + static_cast<int>(threadIdx.x) / 8 % 4;
  WithType(m.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const T* data = reinterpret_cast<const T*>(m.data);
    float values[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int c = c0 + n % 4 * 8 + lane_c;
      const int64_t start = starts[lane_row + n / 4 * 4];
      values[n] = 0;
      if (start >= 0 && c < components) {
        values[n] = static_cast<float>(data[start + c * m.strides.dim]) * m.factor;
      }
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      to[(n % 4 * 8 + lane_c) * kPitch + lane_row + n / 4 * 4] = values[n];
    }
  });
}

// Rows first_row .. of 64 rows -> [kSliceFloats / kColumns, kColumns], with zeros as above. Returns
// whether all that this thread has loaded is finite.
template <int kColumns>
__device__ inline bool LoadSlice(const Matrix& m, const int64_t* starts, int components,
                                 int first_row, float* to) {
  constexpr int kLoads = kSliceFloats / kThreads;
  const int c = static_cast<int>(threadIdx.x) % kColumns;
  const int lane_row = static_cast<int>(threadIdx.x) / kColumns;
  bool finite = true;
  WithType(m.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const T* data = reinterpret_cast<const T*>(m.data) + c * m.strides.dim;
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int row = n * (kThreads / kColumns) + lane_row;
      const int64_t start = starts[first_row + row];
      float value = 0;
      if (start >= 0 && c < components) value = static_cast<float>(data[start]) * m.factor;
      to[row * kColumns + c] = value;
      finite = finite && isfinite(value);
    }
  });
  return finite;
}

// *amax = max(*amax, the largest of all threads of a warp); magnitudes are not negative.
__device__ inline void RaiseAmax(float* amax, float magnitude) {
  if (amax == nullptr) return;
  const unsigned largest = __reduce_max_sync(~0u, __float_as_uint(magnitude));
  // Floats that are not negative are in the order of their bits.
  if (threadIdx.x % 32 == 0 && largest > 0) {
    atomicMax(reinterpret_cast<unsigned*>(amax), largest);
  }
}

// max(largest, |value|), of finite values.
__device__ inline float LargerOf(float largest, float value) {
  const float magnitude = fabsf(value);
  return magnitude > largest && magnitude < INFINITY ? magnitude : largest;
}

// sums[a][.] times factors[a] -> rows 4 * ty + a of the target, which lies as `m` does. A row's
// columns are 4 * tx + 64 * q + (0 .. 3). A factor of 0 gives 0. Follows a barrier.
template <int kSums>
__device__ inline void StoreRows(const Target& target, const Matrix& m, const int64_t* starts,
                                 int components, const float (&sums)[4][kSums],
                                 const float (&factors)[4], float* stage) {
  float largest = 0;
#pragma unroll
  for (int q = 0; q < kSums / 4; ++q) {
    if (64 * q >= components) break;
    __syncthreads();
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      float4 value = make_float4(0, 0, 0, 0);
      if (factors[a] != 0) {
        value = make_float4(sums[a][4 * q] * factors[a], sums[a][4 * q + 1] * factors[a],
                            sums[a][4 * q + 2] * factors[a], sums[a][4 * q + 3] * factors[a]);
      }
      *reinterpret_cast<float4*>(&stage[(4 * Ty() + a) * 64 + 4 * Tx()]) = value;
    }
    __syncthreads();
    const int c = 64 * q + static_cast<int>(threadIdx.x) % 64;
    const int end = c < components ? 64 : 0;
    WithType(target.dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      for (int r = static_cast<int>(threadIdx.x) / 64; r < end; r += kThreads / 64) {
        if (starts[r] < 0) continue;
        const float value = stage[r * 64 + c - 64 * q];
        largest = LargerOf(largest, value);
        StoreOne<T>(target.data, starts[r] + c * m.strides.dim, value * target.factor);
      }
    });
  }
  RaiseAmax(target.amax, largest);
}

}  // namespace attnd::tiled
