#include "engine/cpu/tile_terms.h"

#include <algorithm>
#include <limits>

#include "engine/core/dropout_mask.h"
#include "engine/cpu/head_rows.h"
#include "engine/cpu/logit_terms.h"
#include "engine/cpu/panel_product.h"
#include "engine/cpu/row_kernels.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

int64_t TileTerms::RowsOfPanel(int64_t panel) const {
  return std::min(kPanelRows, tile_.rows() - panel * kPanelRows);
}

void TileTerms::FillTerms(int64_t panel, const KeyRange& keys) {
  terms_first_ = keys.first;
  p_.bias_kind == BiasKind::kAlibi ? FillAlibiTerms(panel, keys) : FillBias(panel, keys);
}

void TileTerms::FillBias(int64_t panel, const KeyRange& keys) {
  const int64_t count = RowsOfPanel(panel), num_keys = keys.last - keys.first;
  for (int64_t r = 0; r < count;) {  // Piece by piece of one head.
    const int64_t n = tile_.HeadOf(panel * kPanelRows + r);
    const int64_t row = tile_.QueryOf(panel * kPanelRows + r);
    const int64_t piece = std::min(count - r, tile_.first_row + tile_.num_rows - row);
    GatherRows(BiasRows(p_, bias_, {tile_.sequence, n}, keys), row, piece,
               scratch_.rows + r * kTileKeys, kTileKeys);
    r += piece;
  }
  may_hide_ = hides_all_ = false;
  for (int64_t r = 0; r < count && !may_hide_; ++r) {
    may_hide_ = !AllFinite(scratch_.rows + r * kTileKeys, num_keys);
  }
  if (may_hide_) {
    hides_all_ = true;
    for (int64_t r = 0; r < count && hides_all_; ++r) {
      const float* row = scratch_.rows + r * kTileKeys;
      hides_all_ = std::all_of(row, row + num_keys, [](float x) { return x == -kInfinity; });
    }
    if (hides_all_) return;
  }
  ToPanel(scratch_.rows, kTileKeys, count, num_keys, scratch_.terms);
}

void TileTerms::FillAlibiTerms(int64_t panel, const KeyRange& keys) const {
  const SequenceExtent& extent = p_.sequences[static_cast<size_t>(tile_.sequence)];
  const int64_t shift = p_.mask.bottom_right ? extent.kv_len - extent.q_len : 0;
  AlibiLanes lanes;
  for (int64_t r = 0; r < RowsOfPanel(panel); ++r) {
    const int64_t row = panel * kPanelRows + r;
    const auto lane = static_cast<size_t>(r);
    lanes.slope[lane] = static_cast<float>(p_.alibi_slopes[static_cast<size_t>(tile_.HeadOf(row))]);
    lanes.distance[lane] = static_cast<float>(keys.first - (tile_.QueryOf(row) + shift));
  }
  FillAlibi(lanes, keys.last - keys.first, scratch_.terms);
}

void TileTerms::FillKeep(int64_t panel, const KeyRange& keys) {
  keep_first_ = keys.first;
  DropoutLanes lanes;
  lanes.keep_factor = static_cast<float>(KeepScale(p_.dropout));
  for (int64_t r = 0; r < RowsOfPanel(panel); ++r) {
    const int64_t row = panel * kPanelRows + r;
    const auto lane = static_cast<size_t>(r);
    // Heads change rarely from one lane to the next.
    if (r == 0 || tile_.HeadOf(row) != tile_.HeadOf(row - 1)) {
      const DropoutMask mask(p_.dropout, tile_.sequence, tile_.HeadOf(row));
      lanes.key0[lane] = mask.key()[0];
      lanes.key1[lane] = mask.key()[1];
      lanes.threshold = mask.threshold();
    } else {
      lanes.key0[lane] = lanes.key0[lane - 1];
      lanes.key1[lane] = lanes.key1[lane - 1];
    }
    const auto query = static_cast<uint64_t>(tile_.QueryOf(row));
    lanes.row_low[lane] = static_cast<uint32_t>(query);
    lanes.row_high[lane] = static_cast<uint32_t>(query >> 32);
  }
  FillKeepFactors(lanes, keys.first, keys.last - keys.first, scratch_.keep);
}

float FloatSoftcap(const std::optional<double>& cap) {
  if (!cap || *cap > std::numeric_limits<float>::max()) return 0;
  return std::max(static_cast<float>(*cap), std::numeric_limits<float>::min());
}

float SinkOf(const AttentionProblem& problem, const float* softmax_offset, int64_t n) {
  switch (problem.softmax_kind) {
    case SoftmaxKind::kVanilla: break;
    case SoftmaxKind::kOffByOne: return 0;
    case SoftmaxKind::kLearnable: return softmax_offset[n];
  }
  return -kInfinity;
}

}  // namespace attnd
