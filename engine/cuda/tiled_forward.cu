#include <algorithm>

#include "engine/cuda/tiled_exact.h"

namespace attnd::tiled {
namespace {

constexpr int64_t kMaxGrid = int64_t{1} << 20;  // Loops cover the rest.

// What a thread knows of its four rows so far. `sum` is of its own keys only; the rest is the same
// in the 16 threads of a row.
struct RowStates {
  float max[4];
  float sum[4];
};

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

// Writes LSE, and gives what makes O of the sums: 0 in rows without a finite logit.
__device__ void FinishRows(const Problem& p, const ForwardTargets& f, const Shared& shared,
                           const RowStates& rows, float (&factors)[4]) {
  float largest_p = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * Ty() + i;
    const float own = SumOfRow(rows.sum[i]);
    const auto sink = static_cast<float>(SinkOf(p, shared.head[r]));
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

// Marks the rows whose results float32 could not hold. They are computed again in double.
template <int kSums>
__device__ void MarkRows(const Suspicions& s, const RowStates& rows, const float (&sums)[4][kSums],
                         Shared& shared) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bool is_wrong = (s.overflow >> i & 1) != 0 || !isfinite(rows.sum[i]);
#pragma unroll
    for (int n = 0; n < kSums; ++n) is_wrong = is_wrong || !isfinite(sums[i][n]);
    const bool sees = AnyOfRow((s.sees >> i & 1) != 0);
    is_wrong = AnyOfRow(is_wrong) || (sees && !isfinite(rows.max[i]));
    if (Tx() == 0) shared.is_wrong[4 * Ty() + i] = is_wrong;
  }
}

// O and LSE of tile row r in double, by all threads. Where inputs are not finite, they stay.
__device__ __noinline__ void RepairRow(const Problem& p, const ForwardTargets& f,
                                       const TilePlace& place, int r, Shared& shared) {
  auto* const stage = reinterpret_cast<double*>(shared.stage);
  const double top = ExactMaximum(p, shared, place, r, stage);
  if (!isfinite(top)) return;
  const double sink = SinkOf(p, shared.head[r]), max = sink > top ? sink : top;
  const int c = static_cast<int>(threadIdx.x);
  double own = 0, out = 0;
  for (int64_t first = shared.first[r]; first < shared.last[r]; first += kThreads) {
    const int64_t j = first + threadIdx.x;
    const bool sees = j < shared.last[r] && ExactIsVisible(p, shared, place, r, j);
    const double weight = sees ? exp(ExactCellOf(p, shared, place, r, j).logit - max) : 0;
    own += weight;
    __syncthreads();
    stage[threadIdx.x] = sees && Keeps(p, shared, r, j) ? weight : -1;  // -1: V is not read.
    __syncthreads();
    for (int n = 0; n < kThreads && c < p.head_dim_v; ++n) {
      if (stage[n] < 0) continue;
      const int64_t v =
          KeyStart(p, p.v, p.pages_v, {place.sequence, KvHeadOf(p, shared, r)}, first + n);
      out += stage[n] * static_cast<double>(LoadOne(p.v.dtype, p.v.data, v + c * p.v.strides.dim) *
                                            p.v.factor);
    }
  }
  const double sum = ReduceBlock<Reduction::kSum>(own, stage) + exp(sink - max);
  const auto value = static_cast<float>(out / sum * static_cast<double>(p.dropout.keep_factor));
  if (c < p.head_dim_v) {
    WithType(f.out.dtype, [&](auto tag) {
      StoreOne<typename decltype(tag)::Type>(f.out.data, shared.out[r] + c * p.out.strides.dim,
                                             value * f.out.factor);
    });
  }
  RaiseAmax(f.out.amax, c < p.head_dim_v ? LargerOf(0, value) : 0);
  RaiseAmax(f.amax_s, c == 0 ? static_cast<float>(exp(top - max) / sum) : 0);
  if (c == 0 && f.lse != nullptr) f.lse[shared.lse_at[r]] = static_cast<float>(max + log(sum));
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
    Suspicions suspicions;
    TilePlace place = {i, 0, DiagonalShift(p.band, s)};
    for (int64_t j = keys.first / kKeys * kKeys; j < keys.last; j += kKeys) {
      place.first_key = j;
      __syncthreads();
      SetKeys(p, i, kv_head, j, keys, shared);
      const uint32_t visible = VisibleCells(p, shared, place);
      if (IsHiddenByBias(p, visible)) continue;
      float cells[4][4] = {}, cap_slopes[4][4];
      AddDots({p.q, shared.q, p.head_dim_qk}, {p.k, shared.k, p.head_dim_qk}, shared.stage, cells);
      LookAtProducts(visible, cells, suspicions);
      ToLogits(p, shared, place, visible, cells, cap_slopes);
      Softmax(cells, rows, sums);
      const uint32_t kept = KeptCells(p, shared, place);
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        if ((kept >> e & 1) == 0) cells[e / 4][e % 4] = 0;
      }
      SetWeightsByKey(cells, shared);
      AddWeighted({p.v, shared.v, p.head_dim_v}, shared, sums);
    }
    MarkRows(suspicions, rows, sums, shared);
    __syncthreads();
    float factors[4];
    FinishRows(p, f, shared, rows, factors);
    StoreRows(f.out, p.out, shared.out, p.head_dim_v, sums, factors, shared.stage);
    if (__syncthreads_or(threadIdx.x < kRows && shared.is_wrong[threadIdx.x]) == 0) continue;
    for (int r = 0; r < kRows; ++r) {
      if (shared.is_wrong[r]) RepairRow(p, f, place, r, shared);
    }
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
