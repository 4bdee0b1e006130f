// What one thread does with one tile: online softmax over its keys, panel by panel.
#pragma once

#include "absl/status/status.h"
#include "engine/cpu/tile_output.h"
#include "engine/cpu/tile_plan.h"

namespace attnd {

// Computes the tile's chunk of keys and writes its rows of out and lse, or, where there are several
// chunks, its partial results. CANCELLED where the call was cancelled.
absl::Status ComputeTile(const TileContext& context, const Tile& tile, const TileScratch& scratch);

}  // namespace attnd
