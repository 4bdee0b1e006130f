// From the state of a tile's rows to the rows of out and lse.
#pragma once

#include <cstdint>

#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"
#include "engine/cpu/tile_plan.h"

namespace attnd {

// Everything a task needs; all of it is read-only and shared by the threads.
struct TileContext {
  const AttentionProblem& problem;
  const ForwardBuffers& buffers;
};

// Online softmax of rows first .. first + count - 1 of a tile, which go head by head.
struct RowState {
  int64_t first = 0;
  int64_t count = 0;
  float* acc = nullptr;  // Unnormalised output [count, d_v], rows acc_stride apart.
  int64_t acc_stride = 0;
  float* m = nullptr;  // [count], maximum; -inf: no key seen.
  float* l = nullptr;  // [count], sum of exp(s - m)
};

// Keeps the rows as partial results of the tile's chunk.
void StorePartialRows(const Tile& tile, const RowState& state, int64_t d_v);

// Writes the rows of out and lse, raises amax to what they have, and computes again what float32
// could not hold. Changes the state.
void WriteRows(const TileContext& context, const Tile& tile, const RowState& state);

// Merges the partial results of all chunks of the tile (tile.chunk is 0) and writes its rows.
void MergeChunks(const TileContext& context, const Tile& tile);

// O = 0, LSE = -inf.
void ClearRows(const TileContext& context, const UnownedRows& rows);

}  // namespace attnd
