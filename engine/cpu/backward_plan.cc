#include "engine/cpu/backward_plan.h"

#include <algorithm>

#include "engine/cpu/scratch_carver.h"

namespace attnd {
namespace {

constexpr int64_t kMinTileRows = 128;
constexpr int64_t kMaxTileRows = 256;
constexpr int64_t kMaxBlockKeys = 256;
constexpr int64_t kTargetTasks = 64;  // Of each kind: enough to keep that many cores busy.

int64_t CeilDiv(int64_t a, int64_t b) { return a == 0 ? 0 : (a - 1) / b + 1; }

int64_t Locate(const int64_t* first, int64_t count, int64_t value) {
  return std::upper_bound(first, first + count + 1, value) - first - 1;
}

// Of the bias' shape [1|b, 1|h, 1|s_q, s_kv].
int64_t BiasAxis(const AttentionProblem& problem, size_t axis) { return problem.bias->shape[axis]; }

bool BiasHasRows(const AttentionProblem& problem) { return problem.bias_strides.seq != 0; }

RowStatistics* CarveRows(Carver& carver, const AttentionProblem& problem) {
  constexpr int64_t kIntegers = sizeof(RowStatistics) / sizeof(int64_t);
  static_assert(sizeof(RowStatistics) == kIntegers * sizeof(int64_t));
  const int64_t rows = *NumElements(problem.lse_desc.shape);
  return reinterpret_cast<RowStatistics*>(carver.Integers(kIntegers * rows));
}

GradientScratch CarveScratch(Carver& carver, const AttentionProblem& problem, int64_t rows,
                             int64_t block_keys) {
  const int64_t panel_rows = RoundUp(std::max<int64_t>(rows, 1), kPanelRows);
  const int64_t keys = block_keys + kProductStep;
  const int64_t d_qk = RoundUp(problem.head_dim_qk, kLaneGroup);
  const int64_t d_v = RoundUp(problem.head_dim_v, kLaneGroup);
  GradientScratch scratch;
  scratch.q_panels = carver.Floats(panel_rows * d_qk);
  scratch.d_out_panels = carver.Floats(panel_rows * d_v);
  scratch.dq = carver.Floats(panel_rows * d_qk);
  for (float** numbers : {&scratch.shift, &scratch.inverse_sum, &scratch.d, &scratch.sum,
                          &scratch.m, &scratch.l, &scratch.weighted}) {
    *numbers = carver.Floats(panel_rows);
  }
  scratch.is_exact = reinterpret_cast<bool*>(carver.Integers(panel_rows));
  scratch.visible = reinterpret_cast<KeyRange*>(carver.Integers(2 * panel_rows));
  scratch.q_rows = carver.Floats(kPanelRows * d_qk);
  scratch.d_out_rows = carver.Floats(kPanelRows * d_v);
  scratch.k = carver.Floats(keys * d_qk);
  scratch.v = carver.Floats(keys * d_v);
  scratch.dk = carver.Floats(keys * d_qk);
  scratch.dv = carver.Floats(keys * d_v);
  scratch.logits = carver.Floats(kTileKeys * kPanelRows);
  scratch.d_logits = carver.Floats(kTileKeys * kPanelRows);
  if (problem.bias) scratch.d_bias = carver.Floats(panel_rows * kTileKeys);
  scratch.terms = CarveTerms(carver, problem);
  return scratch;
}

}  // namespace

int64_t LongestQuery(const AttentionProblem& problem) {
  int64_t longest = 0;
  for (const SequenceExtent& extent : problem.sequences) {
    longest = std::max(longest, extent.q_len);
  }
  return longest;
}

BackwardPlanner::BackwardPlanner(const AttentionProblem& problem, int threads)
    : problem_(problem),
      threads_(threads),
      max_tile_rows_(problem.max_seqlen_q >= kMaxTileRows
                         ? kMaxTileRows
                         : std::min(kMaxTileRows, problem.max_seqlen_q *
                                                      (problem.num_heads / problem.num_kv_heads))),
      max_block_keys_(std::min(
          kMaxBlockKeys, RoundUp(std::min(problem.max_seqlen_kv, kMaxBlockKeys), kTileKeys))) {
  Carver scratch(nullptr);
  CarveScratch(scratch, problem, max_tile_rows_, max_block_keys_);
  scratch_floats_ = scratch.used();

  Carver all(nullptr);
  for (int table = 0; table < 2; ++table) all.Integers(problem.batch + 1);
  CarveRows(all, problem);
  for (int thread = 0; thread < threads; ++thread) all.Floats(scratch_floats_);
  workspace_bytes_ = all.used() * static_cast<int64_t>(sizeof(float));
}

void BackwardPlanner::Bind(std::span<std::byte> workspace) {
  Carver carver(reinterpret_cast<float*>(workspace.data()));
  first_key_block_ = carver.Integers(problem_.batch + 1);
  first_query_tile_ = carver.Integers(problem_.batch + 1);
  rows_ = CarveRows(carver, problem_);
  scratch_ = carver.Floats(threads_ * scratch_floats_);

  int64_t q_rows = 0, kv_rows = 0;
  for (const SequenceExtent& extent : problem_.sequences) {
    q_rows += extent.q_len;
    kv_rows += extent.kv_len;
  }
  rows_per_tile_ = std::clamp(RoundUp(problem_.num_heads * q_rows / kTargetTasks, kPanelRows),
                              kMinTileRows, kMaxTileRows);
  keys_per_block_ = std::clamp(RoundUp(problem_.num_kv_heads * kv_rows / kTargetTasks, kTileKeys),
                               kTileKeys, kMaxBlockKeys);
  int64_t key_blocks = 0, query_tiles = 0;
  for (int64_t i = 0; i < problem_.batch; ++i) {
    const SequenceExtent& extent = problem_.sequences[static_cast<size_t>(i)];
    first_key_block_[i] = key_blocks;
    first_query_tile_[i] = query_tiles;
    key_blocks += problem_.num_kv_heads * CeilDiv(extent.kv_len, keys_per_block_);
    const QueryCut cut = CutQueries(extent.q_len);
    query_tiles += problem_.num_kv_heads * cut.head_tiles * cut.row_tiles;
  }
  first_key_block_[problem_.batch] = key_blocks;
  first_query_tile_[problem_.batch] = query_tiles;
}

BackwardPlanner::QueryCut BackwardPlanner::CutQueries(int64_t q_len) const {
  const int64_t group = problem_.num_heads / problem_.num_kv_heads;
  QueryCut cut;
  if (q_len == 0) return cut;
  if (q_len < kMinTileRows) cut.heads_per_tile = std::min(group, kMinTileRows / q_len);
  cut.head_tiles = CeilDiv(group, cut.heads_per_tile);
  cut.row_tiles = CeilDiv(q_len, rows_per_tile_);
  return cut;
}

// The first keys have the most rows under a causal mask.
KeyBlock BackwardPlanner::KeyBlockAt(int64_t task) const {
  KeyBlock block;
  block.sequence = Locate(first_key_block_, problem_.batch, task);
  const int64_t kv_len = problem_.sequences[static_cast<size_t>(block.sequence)].kv_len;
  const int64_t blocks = CeilDiv(kv_len, keys_per_block_);
  const int64_t rest = task - first_key_block_[block.sequence];
  block.kv_head = rest / blocks;
  block.keys.first = rest % blocks * keys_per_block_;
  block.keys.last = std::min(kv_len, block.keys.first + keys_per_block_);
  return block;
}

Tile BackwardPlanner::QueryTileAt(int64_t task) const {
  Tile tile;
  tile.sequence = Locate(first_query_tile_, problem_.batch, task);
  const int64_t q_len = problem_.sequences[static_cast<size_t>(tile.sequence)].q_len;
  const QueryCut cut = CutQueries(q_len);
  const int64_t group = problem_.num_heads / problem_.num_kv_heads;
  int64_t rest = task - first_query_tile_[tile.sequence];
  const int64_t head_tile = rest % cut.head_tiles;
  rest /= cut.head_tiles;
  // From the last rows, the longest ones under a causal mask, to the first.
  const int64_t row_tile = cut.row_tiles - 1 - rest % cut.row_tiles;
  tile.kv_head = rest / cut.row_tiles;
  tile.first_head = tile.kv_head * group + head_tile * cut.heads_per_tile;
  tile.num_heads = std::min(cut.heads_per_tile, group - head_tile * cut.heads_per_tile);
  tile.first_row = row_tile * rows_per_tile_;
  tile.num_rows = std::min(rows_per_tile_, q_len - tile.first_row);
  return tile;
}

int64_t BackwardPlanner::num_bias_blocks() const {
  if (!problem_.bias) return 0;
  const int64_t row_blocks =
      BiasHasRows(problem_) ? CeilDiv(BiasAxis(problem_, 2), kMinTileRows) : 1;
  return BiasAxis(problem_, 0) * BiasAxis(problem_, 1) * row_blocks *
         CeilDiv(BiasAxis(problem_, 3), kTileKeys);
}

BiasBlock BackwardPlanner::BiasBlockAt(int64_t task) const {
  const int64_t key_blocks = CeilDiv(BiasAxis(problem_, 3), kTileKeys);
  BiasBlock block;
  block.keys.first = task % key_blocks * kTileKeys;
  block.keys.last = std::min(BiasAxis(problem_, 3), block.keys.first + kTileKeys);
  task /= key_blocks;
  block.num_rows = LongestQuery(problem_);
  if (BiasHasRows(problem_)) {
    const int64_t row_blocks = CeilDiv(BiasAxis(problem_, 2), kMinTileRows);
    block.first_row = task % row_blocks * kMinTileRows;
    block.num_rows = std::min(kMinTileRows, BiasAxis(problem_, 2) - block.first_row);
    task /= row_blocks;
  }
  block.head = task % BiasAxis(problem_, 1);
  block.sequence = task / BiasAxis(problem_, 1);
  return block;
}

GradientScratch BackwardPlanner::ScratchOf(int thread) const {
  Carver carver(scratch_ + thread * scratch_floats_);
  return CarveScratch(carver, problem_, max_tile_rows_, max_block_keys_);
}

}  // namespace attnd
