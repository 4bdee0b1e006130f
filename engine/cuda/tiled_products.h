// Products and cells of a tile of kRows query rows and kKeys keys. Device code, as tiled_memory.h.
#pragma once

#include "engine/cuda/tiled_memory.h"

namespace attnd::tiled {

// 64 rows of a matrix, by the elements where they start.
struct Operand {
  const Matrix& matrix;
  const int64_t* starts;
  int components;
};

// sums[i][j] += the dot product of row 4 * ty + i of `a` and row 4 * tx + j of `b`. Starts with a
// barrier.
__device__ inline void AddDots(const Operand& a, const Operand& b, float* stage,
                               float (&sums)[4][4]) {
  float* const b_stage = stage + kChunk * kPitch;
  for (int c0 = 0; c0 < a.components; c0 += kChunk) {
    __syncthreads();
    LoadChunk(a.matrix, a.starts, a.components, c0, stage);
    LoadChunk(b.matrix, b.starts, b.components, c0, b_stage);
    __syncthreads();
#pragma unroll 8
    for (int c = 0; c < kChunk; ++c) {
      const float4 x = *reinterpret_cast<const float4*>(&stage[c * kPitch + 4 * Ty()]);
      const float4 y = *reinterpret_cast<const float4*>(&b_stage[c * kPitch + 4 * Tx()]);
      const float left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
      }
    }
  }
}

// sums[i][.] += sum_n weights[n][4 * ty + i] * (row n of b), with columns as in StoreRows. Rows
// with weight 0 take no part where b has something that is not finite. Starts with a barrier.
template <int kSums>
__device__ inline void AddWeighted(const Operand& b, Shared& shared, float (&sums)[4][kSums]) {
  constexpr int kColumns = 16 * kSums;
  constexpr int kSliceRows = kSliceFloats / kColumns;
  for (int n0 = 0; n0 < 64; n0 += kSliceRows) {
    __syncthreads();
    const bool finite = LoadSlice<kColumns>(b.matrix, b.starts, b.components, n0, shared.stage);
    const bool all_finite = __syncthreads_and(finite) != 0;
#pragma unroll 4
    for (int n = 0; n < kSliceRows; ++n) {
      const float4 w =
          *reinterpret_cast<const float4*>(&shared.weights[(n0 + n) * kPitch + 4 * Ty()]);
      const float weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int q = 0; q < kSums / 4; ++q) {
        const float4 y =
            *reinterpret_cast<const float4*>(&shared.stage[n * kColumns + 64 * q + 4 * Tx()]);
        const float values[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!all_finite && weights[i] == 0) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sums[i][4 * q + e] = fmaf(weights[i], values[e], sums[i][4 * q + e]);
          }
        }
      }
    }
  }
}

// Of the 16 threads that share a row.
__device__ inline float MaxOfRow(float x) {
  for (int step = 8; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ inline float SumOfRow(float x) {
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ inline bool AnyOfRow(bool x) {
  const unsigned half = threadIdx.x % 32 < 16 ? 0xFFFFu : 0xFFFF0000u;
  return (__ballot_sync(~0u, x) & half) != 0;
}

// What a thread has seen in its four rows: bit i is of row 4 * ty + i.
struct Suspicions {
  uint32_t sees = 0;      // A key.
  uint32_t overflow = 0;  // A product past float32, or a NaN.
};

__device__ inline void LookAtProducts(uint32_t visible, const float (&cells)[4][4], Suspicions& s) {
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const uint32_t is_visible = visible >> e & 1;
    s.sees |= is_visible << (e / 4);
    if (is_visible != 0 && !isfinite(cells[e / 4][e % 4])) s.overflow |= 1u << (e / 4);
  }
}

// Cells of rows 4 * ty + i and keys 4 * tx + j -> weights[key][row].
__device__ inline void SetWeightsByKey(const float (&cells)[4][4], Shared& shared) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<float4*>(&shared.weights[(4 * Tx() + j) * kPitch + 4 * Ty()]) =
        make_float4(cells[0][j], cells[1][j], cells[2][j], cells[3][j]);
  }
}

// The same -> weights[row][key].
__device__ inline void SetWeightsByRow(const float (&cells)[4][4], Shared& shared) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<float4*>(&shared.weights[(4 * Ty() + i) * kPitch + 4 * Tx()]) =
        make_float4(cells[i][0], cells[i][1], cells[i][2], cells[i][3]);
  }
}

// The tile that a block is at: all its rows are of one sequence.
struct TilePlace {
  int64_t sequence;
  int64_t first_key;
  int64_t diagonal_shift;  // Query row i has its diagonal at key i + this.
};

__device__ inline int64_t DiagonalShift(const Band& band, const Sequence& s) {
  return band.bottom_right ? s.kv_len - s.q_len : 0;
}

__device__ inline bool HasDenseBias(const Problem& p) {
  return p.bias_kind == BiasKind::kPreScale || p.bias_kind == BiasKind::kPostScale;
}

// Of the cell of tile row r and key `key`.
__device__ inline float BiasOf(const Problem& p, const Shared& shared, const TilePlace& place,
                               int r, int64_t key) {
  const Strides& bs = p.bias_strides;
  return LoadOne(
      p.q.dtype, p.bias,
      place.sequence * bs.batch + shared.head[r] * bs.head + shared.row[r] * bs.seq + key * bs.dim);
}

// Bit 4 * i + j: neither the mask nor a bias of -inf hides the cell.
__device__ inline uint32_t VisibleCells(const Problem& p, const Shared& shared,
                                        const TilePlace& place) {
  const bool has_bias = HasDenseBias(p);
  uint32_t visible = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * Ty() + i;
    const int64_t key0 = place.first_key + 4 * Tx();
    const int64_t first = shared.first[r] - key0, last = shared.last[r] - key0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bool is_visible = j >= first && j < last;
      if (has_bias && is_visible) is_visible = BiasOf(p, shared, place, r, key0 + j) != -INFINITY;
      visible |= (is_visible ? 1u : 0u) << (4 * i + j);
    }
  }
  return visible;
}

// Whether a bias hides all of the tile from all of its rows. A barrier; follows one.
__device__ inline bool IsHiddenByBias(const Problem& p, uint32_t visible) {
  return HasDenseBias(p) && __syncthreads_or(visible != 0) == 0;
}

// Products q.k of a tile -> logits, -inf in cells that are not visible; and the derivative of the
// soft cap at them.
__device__ inline void ToLogits(const Problem& p, const Shared& shared, const TilePlace& place,
                                uint32_t visible, float (&cells)[4][4], float (&cap_slopes)[4][4]) {
  const bool pre_scale = p.bias_kind == BiasKind::kPreScale;
  const bool post_scale = p.bias_kind == BiasKind::kPostScale;
  const bool alibi = p.bias_kind == BiasKind::kAlibi;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * Ty() + i;
    const int64_t key0 = place.first_key + 4 * Tx();
    const float slope = alibi ? p.alibi_slopes[shared.head[r]] : 0;
    const int64_t distance = key0 - (shared.row[r] + place.diagonal_shift);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool is_visible = (visible >> (4 * i + j) & 1) != 0;
      float bias = 0;
      if ((pre_scale || post_scale) && is_visible) {
        bias = BiasOf(p, shared, place, r, key0 + j);
      }
      float x = cells[i][j];
      if (pre_scale) x += bias;
      x *= p.scale;
      cap_slopes[i][j] = 1;
      if (p.softcap != 0) {
        const float t = tanhf(x / p.softcap);
        x = p.softcap * t;
        cap_slopes[i][j] = 1 - t * t;
      }
      if (post_scale) x += bias;
      if (alibi) x -= slope * fabsf(static_cast<float>(distance + j));
      cells[i][j] = is_visible ? x : -INFINITY;
    }
  }
}

// Bit 4 * i + j: dropout keeps the cell.
__device__ inline uint32_t KeptCells(const Problem& p, const Shared& shared,
                                     const TilePlace& place) {
  if (!p.dropout.on) return ~0u;
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * Ty() + i;
    kept |= KeepsFour(p.dropout, shared.dropout_key[r], shared.row[r], place.first_key / 4 + Tx())
            << (4 * i);
  }
  return kept;
}

}  // namespace attnd::tiled
