// What one thread does with one tile: online softmax over its keys, and the rows that come out.
#pragma once

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"
#include "engine/cpu/tile_plan.h"

namespace attnd {

// Everything a task needs; all of it is read-only and shared by the threads.
struct TileContext {
  const AttentionProblem& problem;
  const ForwardBuffers& buffers;
};

// Computes the tile's chunk of keys and writes its rows of out and lse, or, where there are several
// chunks, its partial results. INTERNAL if oneDNN fails, RESOURCE_EXHAUSTED if it finds no memory.
absl::Status ComputeTile(const TileContext& context, const Tile& tile, const TileScratch& scratch);

// Merges the partial results of all chunks of the tile (tile.chunk is 0) and writes its rows.
void MergeChunks(const TileContext& context, const Tile& tile);

// O = 0, LSE = -inf.
void ClearRows(const TileContext& context, const UnownedRows& rows);

}  // namespace attnd
