// Cells in double, for rows whose logits float32 does not hold. Device code, slow and rarely
// needed: a thread computes a cell by itself.
#pragma once

#include "engine/cuda/tiled_products.h"

namespace attnd::tiled {

struct ExactCell {
  double logit = 0;  // NaN where Q or K has something that is not finite.
  double cap_slope = 1;
};

// dO . v of tile row r and a key, before dropout. `d_out` lies as Problem::out.
__device__ inline double ExactWeightGradient(const Problem& p, const Matrix& d_out,
                                             const Shared& shared, const TilePlace& place, int r,
                                             int64_t key) {
  const int64_t v = KeyStart(p, p.v, p.pages_v, {place.sequence, KvHeadOf(p, shared, r)}, key);
  double dp = 0;
  for (int c = 0; c < p.head_dim_v; ++c) {
    const float a = LoadOne(d_out.dtype, d_out.data, shared.out[r] + c * d_out.strides.dim);
    const float b = LoadOne(p.v.dtype, p.v.data, v + c * p.v.strides.dim);
    dp += static_cast<double>(a * d_out.factor) * static_cast<double>(b * p.v.factor);
  }
  return dp;
}

// Tile row r and a key that it sees.
__device__ inline __noinline__ ExactCell ExactCellOf(const Problem& p, const Shared& shared,
                                                     const TilePlace& place, int r, int64_t key) {
  const int64_t q = shared.q[r];
  const int64_t k = KeyStart(p, p.k, p.pages_k, {place.sequence, KvHeadOf(p, shared, r)}, key);
  double x = 0;
  for (int c = 0; c < p.head_dim_qk; ++c) {
    const float a = LoadOne(p.q.dtype, p.q.data, q + c * p.q.strides.dim);
    const float b = LoadOne(p.k.dtype, p.k.data, k + c * p.k.strides.dim);
    if (!isfinite(a) || !isfinite(b)) return {NAN, 1};
    x += static_cast<double>(a * p.q.factor) * static_cast<double>(b * p.k.factor);
  }
  const double bias = HasDenseBias(p) ? BiasOf(p, shared, place, r, key) : 0;
  if (p.bias_kind == BiasKind::kPreScale) x += bias;
  x *= p.exact_scale;
  ExactCell cell;
  if (p.exact_softcap != 0) {
    const double t = tanh(x / p.exact_softcap);
    x = p.exact_softcap * t;
    cell.cap_slope = 1 - t * t;
  }
  if (p.bias_kind == BiasKind::kPostScale) x += bias;
  if (p.bias_kind == BiasKind::kAlibi) {
    const auto distance = static_cast<double>(key - (shared.row[r] + place.diagonal_shift));
    x -= static_cast<double>(p.alibi_slopes[shared.head[r]]) * fabs(distance);
  }
  cell.logit = x;
  return cell;
}

// Whether tile row r sees a key that its mask shows: a bias may hide it.
__device__ inline bool ExactIsVisible(const Problem& p, const Shared& shared,
                                      const TilePlace& place, int r, int64_t key) {
  return !HasDenseBias(p) || BiasOf(p, shared, place, r, key) != -INFINITY;
}

__device__ inline bool Keeps(const Problem& p, const Shared& shared, int r, int64_t key) {
  if (!p.dropout.on) return true;
  return (KeepsFour(p.dropout, shared.dropout_key[r], shared.row[r], key / 4) >> (key % 4) & 1) !=
         0;
}

enum class Reduction { kSum, kMax };

// Of all threads' values, in a fixed order; a NaN stays. `stage` has room for kThreads doubles.
template <Reduction kReduction>
__device__ inline double ReduceBlock(double value, double* stage) {
  __syncthreads();
  stage[threadIdx.x] = value;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) {
      const double other = stage[threadIdx.x + step], own = stage[threadIdx.x];
      const bool takes_other = isnan(other) || other > own;
      stage[threadIdx.x] =
          kReduction == Reduction::kSum ? own + other : (takes_other ? other : own);
    }
    __syncthreads();
  }
  return stage[0];
}

__device__ inline double SinkOf(const Problem& p, int64_t head) {
  switch (p.softmax_kind) {
    case SoftmaxKind::kVanilla: return -INFINITY;
    case SoftmaxKind::kOffByOne: return 0;
    case SoftmaxKind::kLearnable: return p.softmax_offset[head];
  }
  return -INFINITY;
}

// The largest logit of tile row r, the sink's not among them; NaN where some is, -inf where the row
// sees no key. Called by all threads.
__device__ inline double ExactMaximum(const Problem& p, const Shared& shared,
                                      const TilePlace& place, int r, double* stage) {
  double max = -INFINITY;
  for (int64_t first = shared.first[r]; first < shared.last[r]; first += kThreads) {
    const int64_t j = first + threadIdx.x;
    double x = -INFINITY;
    if (j < shared.last[r] && ExactIsVisible(p, shared, place, r, j)) {
      x = ExactCellOf(p, shared, place, r, j).logit;
    }
    if (__syncthreads_or(isnan(x)) != 0) return NAN;
    max = x > max ? x : max;
  }
  return ReduceBlock<Reduction::kMax>(max, stage);
}

}  // namespace attnd::tiled
