#include <algorithm>

#include "engine/cuda/tiled_products.h"

namespace attnd::tiled {
namespace {

constexpr int64_t kMaxGrid = int64_t{1} << 20;  // Loops cover the rest.

// What a thread knows of its four rows so far. `sum` is of its own keys only; the rest is the same
// in the 16 threads of a row.
struct RowStates {
  float max[4];
  float sum[4];
};

__device__ float MaxOfRow(float x) {
  for (int step = 8; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ float SumOfRow(float x) {
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Logits -> exp(logit - row maximum so far), with the sums of older tiles brought to that maximum.
// NaN stays NaN: fmaxf passes it by, and expf does not.
template <int kSums>
__device__ void Softmax(float (&cells)[4][4], RowStates& rows, float (&sums)[4][kSums]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float here = fmaxf(fmaxf(cells[i][0], cells[i][1]), fmaxf(cells[i][2], cells[i][3]));
    const float max = fmaxf(rows.max[i], MaxOfRow(here));
    const bool none = max == -INFINITY;
    const float base = none ? 0 : max;
    const float shrink = none ? 1 : expf(rows.max[i] - max);
    rows.max[i] = max;
    rows.sum[i] *= shrink;
#pragma unroll
    for (int n = 0; n < kSums; ++n) sums[i][n] *= shrink;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      cells[i][j] = expf(cells[i][j] - base);
      rows.sum[i] += cells[i][j];
    }
  }
}

__device__ float SinkOf(const Problem& p, int64_t head) {
  switch (p.softmax_kind) {
    case SoftmaxKind::kVanilla: return -INFINITY;
    case SoftmaxKind::kOffByOne: return 0;
    case SoftmaxKind::kLearnable: return p.softmax_offset[head];
  }
  return -INFINITY;
}

// Writes LSE, and gives what makes O of the sums: 0 in rows without a finite logit.
__device__ void FinishRows(const Problem& p, const ForwardTargets& f, const Shared& shared,
                           const RowStates& rows, float (&factors)[4]) {
  float largest_p = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * Ty() + i;
    const float own = SumOfRow(rows.sum[i]);
    const float sink = SinkOf(p, shared.head[r]);
    float lse = sink;
    factors[i] = 0;
    if (own != 0) {
      const float max = fmaxf(rows.max[i], sink);
      const float weight = expf(rows.max[i] - max);
      const float sum = own * weight + expf(sink - max);
      lse = max + logf(sum);
      largest_p = LargerOf(largest_p, weight / sum);
      factors[i] = weight / sum * p.dropout.keep_factor;
    }
    if (f.lse != nullptr && Tx() == 0 && shared.lse_at[r] >= 0) f.lse[shared.lse_at[r]] = lse;
  }
  RaiseAmax(f.amax_s, largest_p);
}

template <int kSums>
__global__ void __launch_bounds__(kThreads, kSums == 16 ? 1 : 2)
    ForwardKernel(const __grid_constant__ Problem p, const __grid_constant__ ForwardTargets f) {
  __shared__ Shared shared;
  for (int64_t n = blockIdx.x; n < p.tasks.rows; n += gridDim.x) {
    // The last rows of a causal sequence take longest: they start first.
    const int64_t task = p.tasks.rows - 1 - n;
    const int64_t i = SequenceOfTask<&Sequence::first_row_task>(p.sequences, p.batch, task);
    const Sequence s = p.sequences[i];
    const RowTile tile = RowTileOf(s.q_len, p.heads, task - s.first_row_task);
    const int64_t kv_head = tile.head / p.heads.shared();
    const KeyRange keys = KeysOfTile(p.band, s, tile);
    __syncthreads();
    SetRows(p, i, tile, shared);
    RowStates rows;
    float sums[4][kSums] = {};
    for (int r = 0; r < 4; ++r) {
      rows.max[r] = -INFINITY;
      rows.sum[r] = 0;
    }
    TilePlace place = {i, 0, DiagonalShift(p.band, s)};
    for (int64_t j = keys.first / kKeys * kKeys; j < keys.last; j += kKeys) {
      place.first_key = j;
      __syncthreads();
      SetKeys(p, i, kv_head, j, keys, shared);
      float cells[4][4] = {}, cap_slopes[4][4];
      AddDots({p.q, shared.q, p.head_dim_qk}, {p.k, shared.k, p.head_dim_qk}, shared.stage, cells);
      ToLogits(p, shared, place, cells, cap_slopes);
      Softmax(cells, rows, sums);
      const uint32_t kept = KeptCells(p, shared, place);
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        if ((kept >> e & 1) == 0) cells[e / 4][e % 4] = 0;
      }
      SetWeightsByKey(cells, shared);
      AddWeighted({p.v, shared.v, p.head_dim_v}, shared, sums);
    }
    __syncthreads();
    float factors[4];
    FinishRows(p, f, shared, rows, factors);
    StoreRows(f.out, p.out, shared.out, p.head_dim_v, sums, factors, shared.stage);
  }
}

__global__ void FillLseKernel(float* lse, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < count;
       n += step) {
    lse[n] = -INFINITY;
  }
}

unsigned GridOf(int64_t blocks) { return static_cast<unsigned>(std::min(blocks, kMaxGrid)); }

}  // namespace

cudaError_t LaunchForward(const Problem& p, const ForwardTargets& f, cudaStream_t stream) {
  if (p.tasks.rows == 0) return cudaSuccess;
  const unsigned grid = GridOf(p.tasks.rows);
  if (p.head_dim_v <= 64) {
    ForwardKernel<4><<<grid, kThreads, 0, stream>>>(p, f);
  } else if (p.head_dim_v <= 128) {
    ForwardKernel<8><<<grid, kThreads, 0, stream>>>(p, f);
  } else {
    ForwardKernel<16><<<grid, kThreads, 0, stream>>>(p, f);
  }
  return cudaGetLastError();
}

cudaError_t FillLse(float* lse, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  FillLseKernel<<<GridOf(CeilDiv(count, kThreads)), kThreads, 0, stream>>>(lse, count);
  return cudaGetLastError();
}

}  // namespace attnd::tiled
