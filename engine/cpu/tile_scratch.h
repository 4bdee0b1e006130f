// What one thread computes a tile in.
#pragma once

#include <cstdint>

#include "engine/core/attention_problem.h"

namespace attnd {

inline constexpr int64_t kTileKeys = 128;  // Keys of one product.

// Keys that kLaneGroup rows see: any of them, and all of them.
struct LaneGroup {
  KeyRange seen_by_any;
  KeyRange seen_by_all;
};

// Scratch for TileTerms; null where the problem has no such terms.
struct TermScratch {
  float* terms = nullptr;  // [kTileKeys, kPanelRows]
  float* keep = nullptr;   // [kTileKeys, kPanelRows]
  float* rows = nullptr;   // [kPanelRows, kTileKeys]
};

// One thread's scratch. Rows are those of panels (panel_product.h), `panels` is NumPanels of
// TilePlan::max_tile_rows(), and d_v is PaddedValueDim.
struct TileScratch {
  float* logits = nullptr;      // [kTileKeys + kProductStep, kPanelRows]
  float* acc = nullptr;         // [panels, d_v, kPanelRows]
  float* m = nullptr;           // [panels, kPanelRows]
  float* l = nullptr;           // [panels, kPanelRows]
  float* q = nullptr;           // [panels, d_qk, kPanelRows]
  float* k = nullptr;           // [kTileKeys + kProductStep, d_qk]
  float* v = nullptr;           // [kTileKeys, d_v]
  float* rows = nullptr;        // [kPanelRows, max(d_qk, d_v)]
  KeyRange* visible = nullptr;  // [panels, kPanelRows]
  LaneGroup* groups = nullptr;  // [panels, kPanelRows / kLaneGroup]
  TermScratch terms;
};

}  // namespace attnd
