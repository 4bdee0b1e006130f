// How one backward call is cut into tasks, and where its scratch lies in the workspace.
//
// K and V get their gradients by blocks of keys, for each of which a task goes over all rows that
// share its KV head; Q gets its by tiles of rows, for each of which a task goes over their keys;
// and a bias by blocks of its own cells, for each of which a task goes over all sequences and heads
// that add it. So every sum is one task's, in an order that has nothing to do with threads, nor
// with how the problem is cut: each term is added to the sum of those before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "engine/core/attention_problem.h"
#include "engine/cpu/tile_plan.h"

namespace attnd {

// What backward starts from in a row: P = exp(logit - shift) / sum, dP less d.
struct RowStatistics {
  double shift = -std::numeric_limits<double>::infinity();  // So: the row has no gradients.
  double d = 0;                                             // rowsum(dO * O)
  float inverse_sum = 1;
  bool is_exact =
      false;  // Float32 does not hold the row's logits: its cells are computed in double.
};

// One thread's scratch. `panels` is NumPanels of BackwardPlanner::max_tile_rows(), `keys` is
// max_block_keys() + kProductStep, and dimensions are rounded up to kLaneGroup.
struct GradientScratch {
  float* q_panels = nullptr;      // [panels, d_qk, kPanelRows]
  float* d_out_panels = nullptr;  // [panels, d_v, kPanelRows]
  float* dq = nullptr;            // [panels, kPanelRows, d_qk]
  float* shift = nullptr;         // [panels, kPanelRows], as the three below: RowStatistics
  float* inverse_sum = nullptr;
  float* d = nullptr;
  bool* is_exact = nullptr;
  float* sum = nullptr;  // [panels, kPanelRows]
  float* m = nullptr;    // [panels, kPanelRows], as the two below: AddSoftmaxStatistics
  float* l = nullptr;
  float* weighted = nullptr;
  KeyRange* visible = nullptr;  // [panels, kPanelRows]
  float* q_rows = nullptr;      // [kPanelRows, d_qk], of the panel read last
  float* d_out_rows = nullptr;  // [kPanelRows, d_v]
  float* k = nullptr;           // [keys, d_qk]
  float* v = nullptr;           // [keys, d_v]
  float* dk = nullptr;          // [keys, d_qk]
  float* dv = nullptr;          // [keys, d_v]
  float* logits = nullptr;      // [kTileKeys, kPanelRows]
  float* d_logits = nullptr;    // [kTileKeys, kPanelRows]
  float* d_bias = nullptr;      // [panels, kTileKeys, kPanelRows]; null without a dense bias
  TermScratch terms;
};

// Keys keys.first .. keys.last - 1 of a KV head.
struct KeyBlock {
  int64_t sequence = 0;
  int64_t kv_head = 0;
  KeyRange keys;
};

// Cells of the bias: of its sequence and head (0 on broadcast axes) rows first_row .. first_row +
// num_rows - 1 and some keys. Where rows are broadcast, the block is of all rows.
struct BiasBlock {
  int64_t sequence = 0;
  int64_t head = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
  KeyRange keys;
};

// Query rows of the longest sequence; max_seqlen_q may be a bound far above it.
int64_t LongestQuery(const AttentionProblem& problem);

// The problem must outlive this. Const methods are thread-safe.
class BackwardPlanner {
 public:
  BackwardPlanner(const AttentionProblem& problem, int threads);

  int64_t workspace_bytes() const { return workspace_bytes_; }
  int64_t max_tile_rows() const { return max_tile_rows_; }
  int64_t max_block_keys() const { return max_block_keys_; }

  // Cuts the sequences; the workspace has workspace_bytes() and outlives this. Needed before the
  // methods below.
  void Bind(std::span<std::byte> workspace);

  int64_t num_key_blocks() const { return first_key_block_[problem_.batch]; }
  KeyBlock KeyBlockAt(int64_t task) const;

  int64_t num_query_tiles() const { return first_query_tile_[problem_.batch]; }
  Tile QueryTileAt(int64_t task) const;

  int64_t num_bias_blocks() const;
  BiasBlock BiasBlockAt(int64_t task) const;

  // Of each row, where its LSE is in the lse buffer.
  RowStatistics* rows() const { return rows_; }
  GradientScratch ScratchOf(int thread) const;

 private:
  struct QueryCut {
    int64_t heads_per_tile = 1;
    int64_t head_tiles = 0;  // Of one KV head.
    int64_t row_tiles = 0;
  };
  QueryCut CutQueries(int64_t q_len) const;

  const AttentionProblem& problem_;
  const int threads_;
  const int64_t max_tile_rows_;
  const int64_t max_block_keys_;
  int64_t rows_per_tile_ = 0;
  int64_t keys_per_block_ = 0;
  int64_t scratch_floats_ = 0;  // Of one thread.
  int64_t workspace_bytes_ = 0;

  // In the workspace: numbers of each sequence's first task, and of all at the end.
  int64_t* first_key_block_ = nullptr;
  int64_t* first_query_tile_ = nullptr;
  RowStatistics* rows_ = nullptr;
  float* scratch_ = nullptr;
};

}  // namespace attnd
