// How one forward call is cut into tasks, and where its scratch lies in the workspace.
//
// A tile is a block of query rows that share a KV head: rows of one query head, or, for short
// sequences, rows of several heads of one GQA group, head by head. A sequence with few tiles has
// the keys of each tile cut into chunks, whose partial results are merged afterwards (decode). How
// a sequence is cut depends on the problem's geometry and its own lengths, never on the number of
// threads or on load, so that results have the same bits on every team. With batch_invariant, it
// does not depend on the other sequences of the batch either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/core/attention_problem.h"
#include "engine/cpu/panel_product.h"
#include "engine/cpu/tile_scratch.h"

namespace attnd {

inline bool IsEmpty(const KeyRange& keys) { return keys.first >= keys.last; }
KeyRange Intersect(const KeyRange& a, const KeyRange& b);
// The shortest range with all of both.
KeyRange Span(const KeyRange& a, const KeyRange& b);

struct Tile {
  int64_t sequence = 0;
  int64_t kv_head = 0;
  int64_t first_head = 0;  // Query heads first_head .. first_head + num_heads - 1.
  int64_t num_heads = 0;
  int64_t first_row = 0;  // Rows first_row .. first_row + num_rows - 1 of each.
  int64_t num_rows = 0;
  int64_t chunk = 0;  // Of num_chunks.
  int64_t num_chunks = 1;

  // Rows of all heads, head by head, and what row r of them is.
  int64_t rows() const { return num_heads * num_rows; }
  int64_t HeadOf(int64_t r) const { return first_head + r / num_rows; }
  int64_t QueryOf(int64_t r) const { return first_row + r % num_rows; }

  // With several chunks: acc [rows, d_v], m [rows], l [rows] of chunk 0 where rows is num_heads *
  // num_rows, and the distance in floats to the next chunk's. Null otherwise.
  float* partials = nullptr;
  int64_t partial_stride = 0;
};

// Rows of the out buffer that belong to no sequence.
struct UnownedRows {
  int64_t sequence = 0;  // 0 on a THD side, where rows count from the start of the token buffer.
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

inline int64_t NumPanels(int64_t rows) { return RoundUp(rows, kPanelRows) / kPanelRows; }
inline int64_t PaddedValueDim(int64_t d_v) { return RoundUp(d_v, kProductStep); }

// The problem must outlive the plan. Const methods are thread-safe.
class TilePlan {
 public:
  TilePlan(const AttentionProblem& problem, int threads);

  // Depends on nothing that differs between the problems of one AttentionPlan.
  int64_t workspace_bytes() const { return workspace_bytes_; }
  int64_t max_tile_rows() const { return max_tile_rows_; }

  // Cuts the sequences; the workspace has workspace_bytes() and outlives the plan. Needed before
  // the methods below.
  void Bind(std::span<std::byte> workspace);

  // Tasks are the chunks of all tiles: KV head by KV head, and of each from the last rows (the
  // longest ones under a causal mask) to the first.
  int64_t num_tasks() const { return first_task_[problem_.batch]; }
  Tile TaskAt(int64_t task) const;

  bool has_partials() const { return has_partials_; }

  int64_t num_unowned_blocks() const { return first_unowned_[num_gaps()]; }
  UnownedRows UnownedAt(int64_t block) const;

  TileScratch ScratchOf(int thread) const;

 private:
  struct Cut {
    int64_t heads_per_tile = 1;
    int64_t rows_per_tile = 1;
    int64_t head_tiles = 0;  // Of one KV head.
    int64_t row_tiles = 0;
    int64_t chunks = 1;
  };
  Cut CutSequence(const SequenceExtent& extent) const;

  int64_t TargetTiles() const;
  int64_t MaxPartialFloats() const;
  // Places where unowned rows may be: after each dense sequence; before each THD one, and at the
  // end.
  int64_t num_gaps() const { return problem_.batch + (problem_.q_is_thd ? 1 : 0); }
  UnownedRows GapAt(int64_t gap) const;

  const AttentionProblem& problem_;
  const int threads_;
  int64_t max_tile_rows_ = 0;
  int64_t scratch_floats_ = 0;  // Of one thread.
  int64_t workspace_bytes_ = 0;

  // In the workspace: numbers of the first task, partial float and unowned block of each sequence
  // (gap), and the total at the end.
  int64_t* first_task_ = nullptr;
  int64_t* first_partial_ = nullptr;
  int64_t* first_unowned_ = nullptr;
  float* scratch_ = nullptr;
  float* partials_ = nullptr;
  bool has_partials_ = false;
};

}  // namespace attnd
