#include "engine/cpu/tile_plan.h"

#include <algorithm>

#include "engine/cpu/scratch_carver.h"

namespace attnd {
namespace {

constexpr int64_t kMinTileRows = 128;  // K and V are copied once for so many rows,
constexpr int64_t kMaxTileRows = 512;  // or more where there are enough tiles.
constexpr int64_t kTargetTiles = 32;   // Enough to keep that many cores busy.
constexpr int64_t kMinChunkKeys = 512;
constexpr int64_t kUnownedBlockRows = 64;

// For a >= 0, without overflow.
int64_t CeilDiv(int64_t a, int64_t b) { return a == 0 ? 0 : (a - 1) / b + 1; }

// The last index whose first number is <= value: `first` rises, and first[count] is the total.
int64_t Locate(const int64_t* first, int64_t count, int64_t value) {
  return std::upper_bound(first, first + count + 1, value) - first - 1;
}

TileScratch CarveScratch(Carver& carver, const AttentionProblem& problem, int64_t rows) {
  const int64_t panels = NumPanels(rows);
  const int64_t panel_rows = panels * kPanelRows;
  const int64_t d_qk = problem.head_dim_qk;
  const int64_t d_v = PaddedValueDim(problem.head_dim_v);
  TileScratch scratch;
  scratch.logits = carver.Floats((kTileKeys + kProductStep) * kPanelRows);
  scratch.acc = carver.Floats(panel_rows * d_v);
  scratch.m = carver.Floats(panel_rows);
  scratch.l = carver.Floats(panel_rows);
  scratch.q = carver.Floats(panel_rows * d_qk);
  scratch.k = carver.Floats((kTileKeys + kProductStep) * d_qk);
  scratch.v = carver.Floats(kTileKeys * d_v);
  scratch.rows = carver.Floats(kPanelRows * std::max(d_qk, d_v));
  scratch.visible = reinterpret_cast<KeyRange*>(carver.Integers(2 * panel_rows));
  scratch.groups = reinterpret_cast<LaneGroup*>(carver.Integers(4 * panel_rows / kLaneGroup));
  scratch.terms = CarveTerms(carver, problem);
  return scratch;
}

}  // namespace

TermScratch CarveTerms(Carver& carver, const AttentionProblem& problem) {
  TermScratch scratch;
  if (problem.bias_kind != BiasKind::kNone) {
    scratch.terms = carver.Floats(kTileKeys * kPanelRows);
    scratch.rows = carver.Floats(kPanelRows * kTileKeys);
  }
  if (problem.dropout.probability > 0) scratch.keep = carver.Floats(kTileKeys * kPanelRows);
  return scratch;
}

KeyRange Intersect(const KeyRange& a, const KeyRange& b) {
  const KeyRange keys = {std::max(a.first, b.first), std::min(a.last, b.last)};
  return IsEmpty(keys) ? KeyRange{} : keys;
}

KeyRange Span(const KeyRange& a, const KeyRange& b) {
  if (IsEmpty(a)) return b;
  if (IsEmpty(b)) return a;
  return {std::min(a.first, b.first), std::max(a.last, b.last)};
}

TilePlan::TilePlan(const AttentionProblem& problem, int threads)
    : problem_(problem), threads_(threads) {
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  max_tile_rows_ = problem.max_seqlen_q >= kMaxTileRows
                       ? kMaxTileRows
                       : std::min(kMaxTileRows, problem.max_seqlen_q * group);
  Carver scratch(nullptr);
  CarveScratch(scratch, problem, max_tile_rows_);
  scratch_floats_ = scratch.used();

  Carver all(nullptr);
  for (int table = 0; table < 3; ++table) all.Integers(problem.batch + 2);
  for (int thread = 0; thread < threads; ++thread) all.Floats(scratch_floats_);
  all.Floats(MaxPartialFloats());
  workspace_bytes_ = all.used() * static_cast<int64_t>(sizeof(float));
}

void TilePlan::Bind(std::span<std::byte> workspace) {
  Carver carver(reinterpret_cast<float*>(workspace.data()));
  first_task_ = carver.Integers(problem_.batch + 2);
  first_partial_ = carver.Integers(problem_.batch + 2);
  first_unowned_ = carver.Integers(problem_.batch + 2);
  scratch_ = carver.Floats(threads_ * scratch_floats_);
  partials_ = carver.Floats(MaxPartialFloats());

  int64_t tasks = 0;
  int64_t partials = 0;
  for (int64_t i = 0; i < problem_.batch; ++i) {
    first_task_[i] = tasks;
    first_partial_[i] = partials;
    const Cut cut = CutSequence(problem_.sequences[static_cast<size_t>(i)]);
    const int64_t chunks = problem_.num_kv_heads * cut.head_tiles * cut.row_tiles * cut.chunks;
    tasks += chunks;
    if (cut.chunks > 1) {
      partials += chunks * cut.heads_per_tile * cut.rows_per_tile * (problem_.head_dim_v + 2);
    }
  }
  first_task_[problem_.batch] = tasks;
  first_partial_[problem_.batch] = partials;
  has_partials_ = partials > 0;

  int64_t blocks = 0;
  for (int64_t gap = 0; gap < num_gaps(); ++gap) {
    first_unowned_[gap] = blocks;
    blocks += CeilDiv(GapAt(gap).num_rows, kUnownedBlockRows);
  }
  first_unowned_[num_gaps()] = blocks;
}

int64_t TilePlan::TargetTiles() const {
  return problem_.batch_invariant ? kTargetTiles : CeilDiv(kTargetTiles, problem_.batch);
}

TilePlan::Cut TilePlan::CutSequence(const SequenceExtent& extent) const {
  const int64_t group = problem_.num_heads / problem_.num_kv_heads;
  Cut cut;
  if (extent.q_len == 0) return cut;
  if (extent.q_len < kMinTileRows) {
    cut.heads_per_tile = std::min(group, kMinTileRows / extent.q_len);
  }
  cut.head_tiles = CeilDiv(group, cut.heads_per_tile);
  const int64_t heads = problem_.num_kv_heads * cut.head_tiles;
  const int64_t rows = RoundUp(heads * extent.q_len / TargetTiles(), kPanelRows);
  cut.rows_per_tile = std::min(extent.q_len, std::clamp(rows, kMinTileRows, kMaxTileRows));
  cut.row_tiles = CeilDiv(extent.q_len, cut.rows_per_tile);
  const int64_t wanted = TargetTiles() / (heads * cut.row_tiles);
  cut.chunks =
      std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, CeilDiv(extent.kv_len, kMinChunkKeys)));
  return cut;
}

// Chunks are made only up to TargetTiles() of a sequence, and only of the smallest tiles: larger
// ones are made where there are enough.
int64_t TilePlan::MaxPartialFloats() const {
  if (problem_.max_seqlen_kv <= kMinChunkKeys) return 0;
  const int64_t rows = std::min(kMinTileRows, max_tile_rows_);
  return problem_.batch * TargetTiles() * rows * (problem_.head_dim_v + 2);
}

Tile TilePlan::TaskAt(int64_t task) const {
  task = num_tasks() - 1 - task;
  Tile tile;
  tile.sequence = Locate(first_task_, problem_.batch, task);
  const SequenceExtent& extent = problem_.sequences[static_cast<size_t>(tile.sequence)];
  const Cut cut = CutSequence(extent);
  const int64_t group = problem_.num_heads / problem_.num_kv_heads;

  // Within the sequence: KV head, row tile, head tile and chunk. So tasks that follow each other
  // find K and V in the cache.
  int64_t rest = task - first_task_[tile.sequence];
  const int64_t tile_number = rest / cut.chunks;
  tile.chunk = rest % cut.chunks;
  tile.num_chunks = cut.chunks;
  rest = tile_number;
  const int64_t head_tile = rest % cut.head_tiles;
  rest /= cut.head_tiles;
  const int64_t row_tile = rest % cut.row_tiles;
  tile.kv_head = rest / cut.row_tiles;

  tile.first_head = tile.kv_head * group + head_tile * cut.heads_per_tile;
  tile.num_heads = std::min(cut.heads_per_tile, group - head_tile * cut.heads_per_tile);
  tile.first_row = row_tile * cut.rows_per_tile;
  tile.num_rows = std::min(cut.rows_per_tile, extent.q_len - tile.first_row);
  if (cut.chunks > 1) {
    tile.partial_stride = cut.heads_per_tile * cut.rows_per_tile * (problem_.head_dim_v + 2);
    tile.partials =
        partials_ + first_partial_[tile.sequence] + tile_number * cut.chunks * tile.partial_stride;
  }
  return tile;
}

UnownedRows TilePlan::GapAt(int64_t gap) const {
  const auto index = static_cast<size_t>(gap);
  if (!problem_.q_is_thd) {
    const int64_t q_len = problem_.sequences[index].q_len;
    return {gap, q_len, problem_.max_seqlen_q - q_len};
  }
  UnownedRows rows;
  if (gap > 0) {
    const SequenceExtent& before = problem_.sequences[index - 1];
    rows.first_row = before.q_row + before.q_len;
  }
  const int64_t end =
      gap < problem_.batch ? problem_.sequences[index].q_row : problem_.out_desc.shape[0];
  rows.num_rows = end - rows.first_row;
  return rows;
}

UnownedRows TilePlan::UnownedAt(int64_t block) const {
  const int64_t gap = Locate(first_unowned_, num_gaps(), block);
  UnownedRows rows = GapAt(gap);
  const int64_t skipped = (block - first_unowned_[gap]) * kUnownedBlockRows;
  rows.first_row += skipped;
  rows.num_rows = std::min(rows.num_rows - skipped, kUnownedBlockRows);
  return rows;
}

TileScratch TilePlan::ScratchOf(int thread) const {
  Carver carver(scratch_ + thread * scratch_floats_);
  return CarveScratch(carver, problem_, max_tile_rows_);
}

}  // namespace attnd
