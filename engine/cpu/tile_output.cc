#include "engine/cpu/tile_output.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/cpu/amax.h"
#include "engine/cpu/finite_reads.h"
#include "engine/cpu/head_rows.h"
#include "engine/cpu/reference_attention.h"
#include "engine/cpu/row_kernels.h"
#include "engine/cpu/softmax_kernels.h"
#include "engine/cpu/tile_terms.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What float32 could not hold: a result that is not finite, or no maximum although keys are
// visible. `r` counts from state.first.
bool IsSuspicious(const TileContext& context, const Tile& tile, const RowState& state, int64_t r) {
  const AttentionProblem& p = context.problem;
  if (state.m[r] == -kInfinity) {
    const SequenceExtent& extent = p.sequences[static_cast<size_t>(tile.sequence)];
    const int64_t row = tile.QueryOf(state.first + r);
    const KeyRange keys = p.mask.VisibleKeys(row, extent.q_len, extent.kv_len);
    if (!p.bias) return keys.first != keys.last;
    // A bias of -inf is a mask.
    const HeadRows bias =
        BiasRows(p, context.buffers.bias, {tile.sequence, tile.HeadOf(state.first + r)}, keys);
    return !IsRowOf(bias, row, -kInfinity);
  }
  return !std::isfinite(state.m[r]) || !std::isfinite(state.l[r]) ||
         !AllFinite(state.acc + r * state.acc_stride, p.head_dim_v);
}

// Finite inputs can have products past float32: such rows are computed again in double. Inputs that
// are not finite themselves make results that are not, and stay.
void RepairRows(const TileContext& context, const Tile& tile, const RowState& state) {
  if (AllFinite(state.m, state.count) && AllFinite(state.l, state.count) &&
      AllFinite(state.acc, state.count * state.acc_stride)) {
    return;
  }
  FiniteReads finite(context.problem, context.buffers, tile.sequence, tile.kv_head);
  for (int64_t r = 0; r < state.count; ++r) {
    if (!IsSuspicious(context, tile, state, r)) continue;
    const int64_t n = tile.HeadOf(state.first + r);
    const int64_t row = tile.QueryOf(state.first + r);
    if (!finite.Row(n, row)) continue;
    ReferenceForwardRow(context.problem, context.buffers, tile.sequence, n, row);
  }
}

// Calls fn(r, sequence, row, head) for each row of the state, as out and lse count them.
template <typename Fn>
void ForEachRow(const TileContext& context, const Tile& tile, const RowState& state, const Fn& fn) {
  const AttentionProblem& p = context.problem;
  const int64_t start = p.q_is_thd ? p.sequences[static_cast<size_t>(tile.sequence)].q_row : 0;
  const int64_t sequence = p.q_is_thd ? 0 : tile.sequence;
  int64_t n = tile.HeadOf(state.first);
  int64_t row = tile.QueryOf(state.first);
  for (int64_t r = 0; r < state.count; ++r) {
    fn(r, sequence, start + row, n);
    if (++row == tile.first_row + tile.num_rows) {
      row = tile.first_row;
      ++n;
    }
  }
}

int64_t OutElement(const AttentionProblem& p, int64_t sequence, int64_t row, int64_t n) {
  const Strides& os = p.out.strides;
  return sequence * os.batch + row * os.seq + n * os.head;
}

void WriteRow(const TileContext& context, const RowState& state, int64_t r, int64_t element) {
  const AttentionProblem& p = context.problem;
  const bool is_empty = state.m[r] == -kInfinity;  // Then acc may hold 0 * NaN.
  float* o = state.acc + r * state.acc_stride;
  if (is_empty) std::fill(o, o + p.head_dim_v, 0.0f);
  const float factor = is_empty ? 0.0f : 1.0f / state.l[r] * p.out_scale();
  std::byte* out = context.buffers.out + p.out.byte_offset + element * SizeOf(p.out_dtype);
  if (p.out.strides.dim == 1) {
    FromScaledFloat(o, factor, p.head_dim_v, p.out_dtype, out);
    return;
  }
  for (int64_t c = 0; c < p.head_dim_v; ++c) {
    StoreElement(p.out_dtype, out, c * p.out.strides.dim, o[c] * factor);
  }
}

// Before sinks are added. The largest P of a row is that of its maximum, exp(0) over the sum.
void RaiseRowsAmax(const TileContext& context, const Tile& tile, const RowState& state) {
  const AttentionProblem& p = context.problem;
  float weight = 0, out = 0;
  for (int64_t r = 0; r < state.count; ++r) {
    if (state.m[r] == -kInfinity) continue;
    const float sink =
        SinkOf(p, context.buffers.softmax_offset, tile.HeadOf(state.first + r)) - state.m[r];
    const float factor = 1 / (state.l[r] + std::exp(sink));
    weight = std::max(weight, factor);
    out = std::max(out, LargestOf(state.acc + r * state.acc_stride, p.head_dim_v) * factor);
  }
  RaiseAmax(context.buffers.amax, weight);
  RaiseAmax(context.buffers.amax + 1, out);
}

// Once for each row, when all its keys are in. Rows without keys stay as they are.
void AddSinks(const TileContext& context, const Tile& tile, const RowState& state) {
  for (int64_t r = 0; r < state.count; ++r) {
    if (state.m[r] == -kInfinity) continue;
    const float sink =
        SinkOf(context.problem, context.buffers.softmax_offset, tile.HeadOf(state.first + r));
    if (sink > state.m[r]) {
      const float keep = std::exp(state.m[r] - sink);
      float* o = state.acc + r * state.acc_stride;
      for (int64_t c = 0; c < context.problem.head_dim_v; ++c) o[c] *= keep;
      state.l[r] *= keep;
      state.m[r] = sink;
    }
    state.l[r] += std::exp(sink - state.m[r]);
  }
}

// All rows of the tile's partial results of one chunk.
RowState PartialRows(const Tile& tile, int64_t chunk, int64_t d_v) {
  RowState state;
  state.count = tile.num_heads * tile.num_rows;
  state.acc = tile.partials + chunk * tile.partial_stride;
  state.acc_stride = d_v;
  state.m = state.acc + state.count * d_v;
  state.l = state.m + state.count;
  return state;
}

}  // namespace

void StorePartialRows(const Tile& tile, const RowState& state, int64_t d_v) {
  const RowState part = PartialRows(tile, tile.chunk, d_v);
  for (int64_t r = 0; r < state.count; ++r) {
    std::copy_n(state.acc + r * state.acc_stride, d_v, part.acc + (state.first + r) * d_v);
  }
  std::copy_n(state.m, state.count, part.m + state.first);
  std::copy_n(state.l, state.count, part.l + state.first);
}

void WriteRows(const TileContext& context, const Tile& tile, const RowState& state) {
  if (context.buffers.amax != nullptr) RaiseRowsAmax(context, tile, state);
  if (context.problem.softmax_kind != SoftmaxKind::kVanilla) AddSinks(context, tile, state);
  ForEachRow(context, tile, state, [&](int64_t r, int64_t i, int64_t row, int64_t n) {
    WriteRow(context, state, r, OutElement(context.problem, i, row, n));
  });
  if (context.buffers.lse != nullptr) {
    const AttentionProblem& p = context.problem;
    const Strides& strides = p.lse;
    LogSumExp(state.m, state.l, state.count, state.l);
    ForEachRow(context, tile, state, [&](int64_t r, int64_t i, int64_t row, int64_t n) {
      const float lse =
          state.m[r] == -kInfinity ? SinkOf(p, context.buffers.softmax_offset, n) : state.l[r];
      context.buffers.lse[i * strides.batch + row * strides.seq + n * strides.head] = lse;
    });
  }
  RepairRows(context, tile, state);
}

void MergeChunks(const TileContext& context, const Tile& tile) {
  const int64_t d_v = context.problem.head_dim_v;
  const RowState sum = PartialRows(tile, 0, d_v);
  for (int64_t chunk = 1; chunk < tile.num_chunks; ++chunk) {
    const RowState part = PartialRows(tile, chunk, d_v);
    for (int64_t r = 0; r < sum.count; ++r) {
      if (part.m[r] == -kInfinity) continue;
      if (sum.m[r] == -kInfinity) {
        std::copy_n(part.acc + r * d_v, d_v, sum.acc + r * d_v);
        sum.m[r] = part.m[r];
        sum.l[r] = part.l[r];
        continue;
      }
      const float m = std::max(sum.m[r], part.m[r]);
      const float keep = std::exp(sum.m[r] - m);
      const float add = std::exp(part.m[r] - m);
      for (int64_t c = r * d_v; c < (r + 1) * d_v; ++c) {
        sum.acc[c] = sum.acc[c] * keep + part.acc[c] * add;
      }
      sum.l[r] = sum.l[r] * keep + part.l[r] * add;
      sum.m[r] = m;
    }
  }
  WriteRows(context, tile, sum);
}

void ClearRows(const TileContext& context, const UnownedRows& rows) {
  const AttentionProblem& p = context.problem;
  const Strides& os = p.out.strides;
  const int64_t size = SizeOf(p.out_dtype);
  for (int64_t row = rows.first_row; row < rows.first_row + rows.num_rows; ++row) {
    for (int64_t n = 0; n < p.num_heads; ++n) {
      std::byte* out = context.buffers.out + p.out.byte_offset +
                       (rows.sequence * os.batch + row * os.seq + n * os.head) * size;
      for (int64_t c = 0; c < p.head_dim_v; ++c) StoreElement(p.out_dtype, out, c * os.dim, 0.0f);
      if (context.buffers.lse == nullptr) continue;
      context.buffers.lse[rows.sequence * p.lse.batch + row * p.lse.seq + n * p.lse.head] =
          -kInfinity;
    }
  }
}

}  // namespace attnd
