// With x the logit of a cell, P = exp(x - shift) / sum and keep what dropout multiplies it with:
//   D = sum of dO * O over a row     dP = keep * (dO . v)     dx = P * (dP - D)
//   dQ += scale * slope * dx * k     dK += scale * slope * dx * q     dV += keep * P * dO
// where slope is the soft cap's. Shift and sum are LSE and 1, but of rows with a large LSE, whose
// own rounding would be one of P: these get maximum, sum and D anew, and where float32 does not
// hold their logits everything about logits in double. Every gradient has its own pass over the
// cells it is a sum of.
#include <algorithm>

#include "engine/cuda/tiled_exact.h"

namespace attnd::tiled {
namespace {

constexpr int64_t kMaxGrid = int64_t{1} << 20;  // Loops cover the rest.

// As on the CPU (engine/cpu/row_statistics.h).
constexpr float kLargestLse = 64;

// Adds to SetRows. A row without gradients becomes one that sees no key, and of such rows nothing
// is read.
__device__ void SetRowStatistics(const Gradients& g, Shared& shared) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kRows) return;
  shared.statistics[r] = {-INFINITY, 0, 0, false};
  if (shared.first[r] < shared.last[r]) shared.statistics[r] = g.rows[shared.lse_at[r]];
  if (shared.statistics[r].shift == -INFINITY) {
    shared.first[r] = shared.last[r] = 0;
    shared.q[r] = shared.out[r] = shared.lse_at[r] = -1;
  }
}

// A tile's cells.
struct Cells {
  float p[4][4];        // P
  float d_logit[4][4];  // dx, or the gradient of q.k
  uint32_t kept;
};

// What a thread has of its cells, as Cells.
struct CellCopies {
  float p[16];
  float d_logit[16];
};

// Replaces those whose bit is set: their rows are exact, or their products pass float32. Of inputs
// that are not finite they stay.
__device__ __noinline__ void ReplaceCells(const Problem& p, const Gradients& g,
                                          const Shared& shared, const TilePlace& place,
                                          uint32_t in_double, bool of_product, uint32_t kept,
                                          CellCopies& cells) {
  for (int e = 0; e < 16; ++e) {
    if ((in_double >> e & 1) == 0) continue;
    const int r = 4 * Ty() + e / 4;
    const int64_t key = place.first_key + 4 * Tx() + e % 4;
    const RowStatistics& row = shared.statistics[r];
    const ExactCell cell = ExactCellOf(p, shared, place, r, key);
    if (isnan(cell.logit)) continue;
    const double weight = exp(cell.logit - row.shift) * static_cast<double>(row.inverse_sum);
    double dp = 0;
    if ((kept >> e & 1) != 0) {
      dp = static_cast<double>(p.dropout.keep_factor) *
           ExactWeightGradient(p, g.d_out, shared, place, r, key);
    }
    double dx = weight * (dp - row.d);
    if (of_product) dx *= static_cast<double>(p.scale) * cell.cap_slope;
    cells.p[e] = static_cast<float>(weight);
    cells.d_logit[e] = static_cast<float>(dx);
  }
}

// `of_product`: d_logit is to be the gradient of q.k. Raises `largest` to the largest |d_logit|
// where that is wanted. False: a bias hides all cells, and all are 0.
__device__ bool ComputeCells(const Problem& p, const Gradients& g, Shared& shared,
                             const TilePlace& place, bool of_product, Cells& cells,
                             float& largest) {
#pragma unroll
  for (int e = 0; e < 16; ++e) cells.p[e / 4][e % 4] = cells.d_logit[e / 4][e % 4] = 0;
  __syncthreads();
  const uint32_t visible = VisibleCells(p, shared, place);
  if (IsHiddenByBias(p, visible)) return false;
  AddDots({g.d_out, shared.out, p.head_dim_v}, {p.v, shared.v, p.head_dim_v}, shared.stage,
          cells.d_logit);
  AddDots({p.q, shared.q, p.head_dim_qk}, {p.k, shared.k, p.head_dim_qk}, shared.stage, cells.p);
  cells.kept = KeptCells(p, shared, place);
  uint32_t in_double = 0;
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const bool is_exact = shared.statistics[4 * Ty() + e / 4].is_exact;
    in_double |= (is_exact || !isfinite(cells.p[e / 4][e % 4]) ? 1u : 0u) << e;
  }
  in_double &= visible;
  float cap_slopes[4][4];
  ToLogits(p, shared, place, visible, cells.p, cap_slopes);
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const RowStatistics& row = shared.statistics[4 * Ty() + e / 4];
    float& weight = cells.p[e / 4][e % 4];
    float& d_logit = cells.d_logit[e / 4][e % 4];
    const bool is_visible = (visible >> e & 1) != 0;
    // What hidden cells have of products, and so of slopes, may be anything.
    weight = is_visible ? expf(weight - static_cast<float>(row.shift)) * row.inverse_sum : 0;
    const float dp = (cells.kept >> e & 1) != 0 ? p.dropout.keep_factor * d_logit : 0;
    float dx = weight * (dp - static_cast<float>(row.d));
    if (of_product) dx *= p.scale * cap_slopes[e / 4][e % 4];
    d_logit = is_visible ? dx : 0;
  }
  if (in_double != 0) {
    CellCopies copies;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      copies.p[e] = cells.p[e / 4][e % 4];
      copies.d_logit[e] = cells.d_logit[e / 4][e % 4];
    }
    ReplaceCells(p, g, shared, place, in_double, of_product, cells.kept, copies);
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      cells.p[e / 4][e % 4] = copies.p[e];
      cells.d_logit[e / 4][e % 4] = copies.d_logit[e];
    }
  }
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    if (g.amax_dp != nullptr) largest = LargerOf(largest, cells.d_logit[e / 4][e % 4]);
  }
  return true;
}

// P -> keep * P
__device__ void DropWeights(const Problem& p, Cells& cells) {
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    float& x = cells.p[e / 4][e % 4];
    x = (cells.kept >> e & 1) != 0 ? x * p.dropout.keep_factor : 0;
  }
}

// shared.statistics by LSE and the sum of dO * O. The latter is the diagonal of
// a product, so that its terms are summed as those of dO . v are: where a row sees one key, O is
// its value, and dx is exactly 0.
__device__ void StartRows(const Problem& p, const Gradients& g, Shared& shared) {
  float cells[4][4] = {};
  AddDots({g.d_out, shared.out, p.head_dim_v}, {p.out, shared.out, p.head_dim_v}, shared.stage,
          cells);
  if (Tx() != Ty()) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * Ty() + i;
    shared.statistics[r] = {-INFINITY, 0, 1, false};
    if (shared.first[r] >= shared.last[r]) continue;
    shared.statistics[r] = {g.lse[shared.lse_at[r]], cells[i][i], 1, false};
  }
}

// What a thread has summed of its four rows over its own keys; the maximum is of all 16 threads'.
struct RowSums {
  float max[4];
  float sum[4];       // of exp(logit - max)
  float weighted[4];  // of the same times keep * dP
  Suspicions suspicions;
};

__device__ void AddKeys(const Problem& p, const Gradients& g, Shared& shared,
                        const TilePlace& place, RowSums& rows) {
  __syncthreads();
  const uint32_t visible = VisibleCells(p, shared, place);
  if (IsHiddenByBias(p, visible)) return;
  float cells[4][4] = {}, dp[4][4] = {}, cap_slopes[4][4];
  AddDots({g.d_out, shared.out, p.head_dim_v}, {p.v, shared.v, p.head_dim_v}, shared.stage, dp);
  AddDots({p.q, shared.q, p.head_dim_qk}, {p.k, shared.k, p.head_dim_qk}, shared.stage, cells);
  LookAtProducts(visible, cells, rows.suspicions);
  ToLogits(p, shared, place, visible, cells, cap_slopes);
  const uint32_t kept = KeptCells(p, shared, place) & visible;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float here = fmaxf(fmaxf(cells[i][0], cells[i][1]), fmaxf(cells[i][2], cells[i][3]));
    const float max = fmaxf(rows.max[i], MaxOfRow(here));
    const bool none = max == -INFINITY;
    const float shrink = none ? 1 : expf(rows.max[i] - max);
    rows.max[i] = max;
    rows.sum[i] *= shrink;
    rows.weighted[i] *= shrink;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float weight = expf(cells[i][j] - (none ? 0 : max));
      rows.sum[i] += weight;
      if ((kept >> (4 * i + j) & 1) != 0) {
        rows.weighted[i] += weight * p.dropout.keep_factor * dp[i][j];
      }
    }
  }
}

// The statistics of tile row r in double, by all threads. Where inputs are not finite, they stay.
__device__ __noinline__ void NormalizeInDouble(const Problem& p, const Gradients& g,
                                               const TilePlace& place, int r, Shared& shared) {
  auto* const stage = reinterpret_cast<double*>(shared.stage);
  const double top = ExactMaximum(p, shared, place, r, stage);
  if (!isfinite(top)) return;
  const double sink = SinkOf(p, shared.head[r]), max = sink > top ? sink : top;
  double own = 0, weighted = 0;
  for (int64_t j = shared.first[r] + threadIdx.x; j < shared.last[r]; j += kThreads) {
    if (!ExactIsVisible(p, shared, place, r, j)) continue;
    const double weight = exp(ExactCellOf(p, shared, place, r, j).logit - max);
    own += weight;
    if (weight == 0 || !Keeps(p, shared, r, j)) continue;
    weighted += weight * static_cast<double>(p.dropout.keep_factor) *
                ExactWeightGradient(p, g.d_out, shared, place, r, j);
  }
  const double sum = ReduceBlock<Reduction::kSum>(own, stage) + exp(sink - max);
  const double d = ReduceBlock<Reduction::kSum>(weighted, stage) / sum;
  if (isfinite(d) && threadIdx.x == 0) {
    shared.statistics[r] = {max, d, static_cast<float>(1 / sum), true};
  }
}

// Whether a row's LSE is too large to start from; a NaN comes from the inputs.
__device__ bool IsLarge(const RowStatistics& row, const Shared& shared, int r) {
  return shared.first[r] < shared.last[r] && fabs(row.shift) > kLargestLse;
}

// Replaces the statistics of rows with a large LSE.
__device__ void NormalizeRows(const Problem& p, const Gradients& g, const RowTile& tile,
                              TilePlace place, Shared& shared) {
  const KeyRange keys = KeysOfTile(p.band, p.sequences[place.sequence], tile);
  const int64_t kv_head = tile.head / p.heads.shared();
  RowSums rows = {{-INFINITY, -INFINITY, -INFINITY, -INFINITY}, {}, {}, {}};
  for (int64_t j = keys.first / kKeys * kKeys; j < keys.last; j += kKeys) {
    place.first_key = j;
    __syncthreads();
    SetKeys(p, place.sequence, kv_head, j, keys, shared);
    AddKeys(p, g, shared, place, rows);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * Ty() + i;
    const float own = SumOfRow(rows.sum[i]), weighted = SumOfRow(rows.weighted[i]);
    const bool sees = AnyOfRow((rows.suspicions.sees >> i & 1) != 0);
    const bool overflow = AnyOfRow((rows.suspicions.overflow >> i & 1) != 0);
    const bool holds = !overflow && isfinite(rows.max[i]) && isfinite(own) && isfinite(weighted);
    if (Tx() != 0) continue;
    RowStatistics& row = shared.statistics[r];
    const bool is_large = IsLarge(row, shared, r);
    shared.is_wrong[r] = is_large && sees && !holds;
    if (!is_large) continue;
    if (!sees) {
      row.shift = -INFINITY;
    } else if (holds) {
      const auto sink = static_cast<float>(SinkOf(p, shared.head[r]));
      const float max = fmaxf(rows.max[i], sink), shrink = expf(rows.max[i] - max);
      const float sum = own * shrink + expf(sink - max);
      row = {max, weighted * shrink / sum, 1 / sum, false};
    }
  }
  __syncthreads();
  for (int r = 0; r < kRows; ++r) {
    if (shared.is_wrong[r]) NormalizeInDouble(p, g, place, r, shared);
  }
  __syncthreads();
}

// g.rows of rows that see a key.
__global__ void __launch_bounds__(kThreads)
    RowStatisticsKernel(const __grid_constant__ Problem p, const __grid_constant__ Gradients g) {
  __shared__ Shared shared;
  for (int64_t task = blockIdx.x; task < p.tasks.rows; task += gridDim.x) {
    const int64_t i = SequenceOfTask<&Sequence::first_row_task>(p.sequences, p.batch, task);
    const Sequence s = p.sequences[i];
    const RowTile tile = RowTileOf(s.q_len, p.heads, task - s.first_row_task);
    __syncthreads();
    SetRows(p, i, tile, shared);
    StartRows(p, g, shared);
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x);
    const bool is_large = r < kRows && IsLarge(shared.statistics[r], shared, r);
    if (__syncthreads_or(is_large) != 0) {
      NormalizeRows(p, g, tile, {i, 0, DiagonalShift(p.band, s)}, shared);
    }
    if (r < kRows && shared.first[r] < shared.last[r]) {
      g.rows[shared.lse_at[r]] = shared.statistics[r];
    }
  }
}

template <int kSums>
__global__ void __launch_bounds__(kThreads, kSums == 16 ? 1 : 2)
    QueryGradientKernel(const __grid_constant__ Problem p, const __grid_constant__ Gradients g) {
  __shared__ Shared shared;
  float largest = 0;
  for (int64_t n = blockIdx.x; n < p.tasks.rows; n += gridDim.x) {
    const int64_t task = p.tasks.rows - 1 - n;
    const int64_t i = SequenceOfTask<&Sequence::first_row_task>(p.sequences, p.batch, task);
    const Sequence s = p.sequences[i];
    const RowTile tile = RowTileOf(s.q_len, p.heads, task - s.first_row_task);
    const int64_t kv_head = tile.head / p.heads.shared();
    const KeyRange keys = KeysOfTile(p.band, s, tile);
    __syncthreads();
    SetRows(p, i, tile, shared);
    SetRowStatistics(g, shared);
    float sums[4][kSums] = {};
    TilePlace place = {i, 0, DiagonalShift(p.band, s)};
    for (int64_t j = keys.first / kKeys * kKeys; j < keys.last; j += kKeys) {
      place.first_key = j;
      __syncthreads();
      SetKeys(p, i, kv_head, j, keys, shared);
      Cells cells;
      if (!ComputeCells(p, g, shared, place, /*of_product=*/true, cells, largest)) continue;
      SetWeightsByKey(cells.d_logit, shared);
      AddWeighted({p.k, shared.k, p.head_dim_qk}, shared, sums);
    }
    const float ones[4] = {1, 1, 1, 1};
    StoreRows(g.dq, p.q, shared.q, p.head_dim_qk, sums, ones, shared.stage);
  }
  RaiseAmax(g.amax_dp, largest);
}

template <int kSums>
__global__ void __launch_bounds__(kThreads, kSums == 16 ? 1 : 2)
    KeyGradientKernel(const __grid_constant__ Problem p, const __grid_constant__ Gradients g) {
  __shared__ Shared shared;
  for (int64_t task = blockIdx.x; task < p.tasks.keys; task += gridDim.x) {
    const int64_t i = SequenceOfTask<&Sequence::first_key_task>(p.sequences, p.batch, task);
    const Sequence s = p.sequences[i];
    const int64_t tiles = CeilDiv(s.kv_len, kKeys);
    const int64_t kv_head = (task - s.first_key_task) / tiles;
    const TilePlace place = {i, (task - s.first_key_task) % tiles * kKeys,
                             DiagonalShift(p.band, s)};
    __syncthreads();
    SetKeys(p, i, kv_head, place.first_key, {0, s.kv_len}, shared);
    float dk[4][kSums] = {}, dv[4][kSums] = {};
    // All rows that share the KV head, head by head.
    const int64_t row_tiles = RowTasks(s.q_len, p.heads) / p.heads.kv;
    for (int64_t n = kv_head * row_tiles; n < (kv_head + 1) * row_tiles; ++n) {
      const RowTile tile = RowTileOf(s.q_len, p.heads, n);
      const KeyRange keys = KeysOfTile(p.band, s, tile);
      if (keys.last <= place.first_key || keys.first >= place.first_key + kKeys) continue;
      __syncthreads();
      SetRows(p, i, tile, shared);
      SetRowStatistics(g, shared);
      Cells cells;
      float largest = 0;  // The rows' pass has that.
      if (!ComputeCells(p, g, shared, place, /*of_product=*/true, cells, largest)) continue;
      DropWeights(p, cells);
      SetWeightsByRow(cells.p, shared);
      AddWeighted({g.d_out, shared.out, p.head_dim_v}, shared, dv);
      __syncthreads();
      SetWeightsByRow(cells.d_logit, shared);
      AddWeighted({p.q, shared.q, p.head_dim_qk}, shared, dk);
    }
    const float ones[4] = {1, 1, 1, 1};
    StoreRows(g.dk, p.k, shared.k, p.head_dim_qk, dk, ones, shared.stage);
    StoreRows(g.dv, p.v, shared.v, p.head_dim_v, dv, ones, shared.stage);
  }
}

// Adds the gradients of a bias' cells that rows first_row .. first_row + 63 of a head and 64 keys
// bring.
__device__ void AddBiasGradients(const Problem& p, const Gradients& g, const TilePlace& place,
                                 const RowTile& tile, Shared& shared, float (&sums)[4][4]) {
  const Sequence s = p.sequences[place.sequence];
  const KeyRange keys = VisibleKeys(p.band, s, tile.first, tile.first + tile.rows - 1);
  if (keys.last <= place.first_key || keys.first >= place.first_key + kKeys) return;
  __syncthreads();
  SetRows(p, place.sequence, tile, shared);
  SetRowStatistics(g, shared);
  SetKeys(p, place.sequence, tile.head / p.heads.shared(), place.first_key, keys, shared);
  Cells cells;
  float largest = 0;
  const bool of_product = p.bias_kind == BiasKind::kPreScale;
  if (!ComputeCells(p, g, shared, place, of_product, cells, largest)) return;
#pragma unroll
  for (int e = 0; e < 16; ++e) sums[e / 4][e % 4] += cells.d_logit[e / 4][e % 4];
}

// A block's cells of the bias: all that is added to them, in order of sequences, heads and rows.
__device__ void SumBiasGradients(const Problem& p, const Gradients& g, const int64_t (&at)[4],
                                 Shared& shared, float (&sums)[4][4]) {
  const bool all_sequences = g.bias_shape[0] == 1, all_heads = g.bias_shape[1] == 1;
  const bool all_rows = g.bias_shape[2] == 1;
  for (int64_t i = at[0]; i < (all_sequences ? p.batch : at[0] + 1); ++i) {
    const Sequence s = p.sequences[i];
    const TilePlace place = {i, at[3], DiagonalShift(p.band, s)};
    for (int64_t head = at[1]; head < (all_heads ? p.heads.query : at[1] + 1); ++head) {
      const int64_t end = all_rows ? s.q_len : min(s.q_len, at[2] + kRows);
      for (int64_t row = at[2]; row < end; row += kRows) {
        const RowTile tile = {head, row, min(end - row, static_cast<int64_t>(kRows))};
        AddBiasGradients(p, g, place, tile, shared, sums);
      }
    }
  }
}

// A task is a tile of the bias' own cells.
__global__ void __launch_bounds__(kThreads, 2)
    BiasGradientKernel(const __grid_constant__ Problem p, const __grid_constant__ Gradients g) {
  __shared__ Shared shared;
  const bool all_rows = g.bias_shape[2] == 1;
  const int64_t row_tiles = CeilDiv(g.bias_shape[2], kRows);
  const int64_t key_tiles = CeilDiv(g.bias_shape[3], kKeys);
  const int64_t tasks = g.bias_shape[0] * g.bias_shape[1] * row_tiles * key_tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row_task = task / key_tiles, head_task = row_task / row_tiles;
    const int64_t at[4] = {head_task / g.bias_shape[1], head_task % g.bias_shape[1],
                           row_task % row_tiles * kRows, task % key_tiles * kKeys};
    float sums[4][4] = {};
    SumBiasGradients(p, g, at, shared, sums);
    __syncthreads();
    SetWeightsByRow(sums, shared);
    __syncthreads();
    const int64_t row_start = at[0] * p.bias_strides.batch + at[1] * p.bias_strides.head;
    for (int n = static_cast<int>(threadIdx.x); n < (all_rows ? 1 : kRows) * kKeys; n += kThreads) {
      const int r = n / kKeys, k = n % kKeys;
      if (at[2] + r >= g.bias_shape[2] || at[3] + k >= g.bias_shape[3]) continue;
      float sum = shared.weights[r * kPitch + k];
      for (int other = 1; all_rows && other < kRows; ++other) {
        sum += shared.weights[other * kPitch + k];
      }
      WithType(p.q.dtype, [&](auto tag) {
        StoreOne<typename decltype(tag)::Type>(
            g.d_bias, row_start + (at[2] + r) * p.bias_strides.seq + at[3] + k, sum);
      });
    }
  }
}

constexpr int kSinkThreads = 1024;

// A block for each head; a warp of it for every 32nd sequence.
__global__ void __launch_bounds__(kSinkThreads)
    SinkGradientKernel(const __grid_constant__ Problem p, const __grid_constant__ Gradients g) {
  __shared__ double warp_sums[kSinkThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int64_t head = blockIdx.x; head < p.heads.query; head += gridDim.x) {
    const float sink = p.softmax_offset[head];
    double sum = 0;
    for (int64_t i = warp; i < p.batch; i += kSinkThreads / 32) {
      const Sequence s = p.sequences[i];
      for (int64_t row = lane; row < s.q_len; row += 32) {
        const KeyRange keys = VisibleKeys(p.band, s, row, row);
        const int64_t at = i * p.lse.batch + (s.q_row + row) * p.lse.seq + head * p.lse.head;
        if (keys.first >= keys.last) continue;
        const RowStatistics& statistics = g.rows[at];
        if (statistics.shift == -INFINITY) continue;
        const double weight = exp(sink - statistics.shift) * statistics.inverse_sum;
        sum -= weight * statistics.d;
      }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    __syncthreads();
    if (lane == 0) warp_sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) continue;
    double total = 0;
    for (const double part : warp_sums) total += part;
    g.d_softmax_offset[head] = static_cast<float>(total);
  }
}

unsigned GridOf(int64_t blocks) { return static_cast<unsigned>(std::min(blocks, kMaxGrid)); }

template <int kSums>
void LaunchQueryGradients(const Problem& p, const Gradients& g, cudaStream_t stream) {
  if (p.tasks.rows == 0) return;
  QueryGradientKernel<kSums><<<GridOf(p.tasks.rows), kThreads, 0, stream>>>(p, g);
}

template <int kSums>
void LaunchKeyGradients(const Problem& p, const Gradients& g, cudaStream_t stream) {
  if (p.tasks.keys == 0) return;
  KeyGradientKernel<kSums><<<GridOf(p.tasks.keys), kThreads, 0, stream>>>(p, g);
}

}  // namespace

cudaError_t LaunchBackward(const Problem& p, const Gradients& g, cudaStream_t stream) {
  if (p.tasks.rows > 0) RowStatisticsKernel<<<GridOf(p.tasks.rows), kThreads, 0, stream>>>(p, g);
  const auto launch_q = p.head_dim_qk <= 64    ? LaunchQueryGradients<4>
                        : p.head_dim_qk <= 128 ? LaunchQueryGradients<8>
                                               : LaunchQueryGradients<16>;
  const int widest = std::max(p.head_dim_qk, p.head_dim_v);
  const auto launch_k = widest <= 64    ? LaunchKeyGradients<4>
                        : widest <= 128 ? LaunchKeyGradients<8>
                                        : LaunchKeyGradients<16>;
  launch_q(p, g, stream);
  launch_k(p, g, stream);
  if (g.d_bias != nullptr) {
    const int64_t tiles = g.bias_shape[0] * g.bias_shape[1] * CeilDiv(g.bias_shape[2], kRows) *
                          CeilDiv(g.bias_shape[3], kKeys);
    if (tiles > 0) BiasGradientKernel<<<GridOf(tiles), kThreads, 0, stream>>>(p, g);
  }
  if (g.d_softmax_offset != nullptr && p.heads.query > 0) {
    SinkGradientKernel<<<GridOf(p.heads.query), kSinkThreads, 0, stream>>>(p, g);
  }
  return cudaGetLastError();
}

}  // namespace attnd::tiled
