// The part of backward that all gradients share: P and the gradient of the logits of a panel of
// query rows (panel_product.h) and a block of keys, from what forward returned.
#pragma once

#include <array>
#include <cstdint>

#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"
#include "engine/cpu/backward_plan.h"
#include "engine/cpu/gradient_kernels.h"
#include "engine/cpu/head_rows.h"
#include "engine/cpu/reference_row.h"
#include "engine/cpu/tile_terms.h"

namespace attnd {

// Everything a task needs, shared by the threads.
struct BackwardContext {
  const AttentionProblem& problem;
  const BackwardBuffers& buffers;
  ForwardBuffers inputs;          // Of the same call: what forward reads, without its outputs.
  RowStatistics* rows = nullptr;  // Where LSE has the row.
};

// Where row `row` of head n of sequence i has its LSE, in elements of the lse buffer.
int64_t LseElement(const AttentionProblem& problem, const SequenceHead& at, int64_t row);

// Rows of O, or dO, of one head.
HeadRows OutRows(const BackwardContext& context, const SequenceHead& at);
HeadRows OutGradientRows(const BackwardContext& context, const SequenceHead& at);

struct GradientPanel {
  int64_t number = 0;  // Of the tile's.
  int64_t slot = 0;    // Where scratch has it.
  int64_t rows = 0;
  KeyRange seen_by_any;
  KeyRange seen_by_all;  // By all rows that have gradients.
};

// Rows of a tile against keys of its KV head. Rows that see no key, or whose statistics say so,
// have no gradients, and nothing that belongs to them is read.
class GradientTile {
 public:
  GradientTile(const BackwardContext& context, const Tile& tile, const GradientScratch& scratch);

  int64_t num_panels() const { return NumPanels(tile_.rows()); }

  // Finds what the rows of panel `number` see, for scratch slot `slot`.
  GradientPanel OpenPanel(int64_t number, int64_t slot) const;
  // Reads Q and dO of the panel. scratch.q_rows and d_out_rows are of the panel read last.
  void ReadPanel(const GradientPanel& panel);
  // Reads K and V: up to BackwardPlanner::max_block_keys().
  void ReadKeys(const KeyRange& keys);

  // Computes scratch.logits and d_logits for the keys among `keys` that rows of the panel see, and
  // returns these: `keys` begin a multiple of kTileKeys after the keys read, are as many at most,
  // and what is returned is rounded outward to multiples of kProductStep after their first, or
  // empty where no row sees any. What no row sees is 0. With through_cap, the gradient is that of q
  // . k over scale.
  KeyRange ComputeBlock(const GradientPanel& panel, const KeyRange& keys, bool through_cap);

  // Adds the keys among `keys` to scratch.m, l and weighted of the panel's rows; m becomes NaN
  // where a product of numbers passes float32.
  void AddToStatistics(const GradientPanel& panel, const KeyRange& keys);

  // Add what a block gives (for the keys that ComputeBlock returned) to scratch.dq, or to
  // scratch.dk and dv, of which row 0 is the first key read; both without `scale`.
  void AddToQueryGradient(const GradientPanel& panel, const KeyRange& block);
  void AddToKeyGradients(const GradientPanel& panel, const KeyRange& block);

 private:
  // Some keys, and what the kernels are told of them.
  struct Block {
    KeyRange keys;
    std::array<float, kPanelRows> first, last;
    GradientBlock numbers;
  };
  // False: no row sees any.
  bool StartBlock(const GradientPanel& panel, const KeyRange& keys, Block& block);
  void Multiply(const GradientPanel& panel, const KeyRange& block) const;
  // Whether q . k of a lane may have passed float32 although Q and K are numbers.
  bool MayOverflow() const;
  bool HasOverflow(const GradientPanel& panel, const KeyRange& block, int64_t lane) const;
  // What SoftmaxGradient does, in double, for one lane.
  void ComputeLane(const GradientPanel& panel, const KeyRange& block, int64_t lane,
                   bool through_cap);
  void AddPairsToQueryGradient(const GradientPanel& panel, const KeyRange& block) const;
  void AddPairsToKeyGradients(const GradientPanel& panel, const KeyRange& block) const;
  bool IsMasked(const GradientPanel& panel, const KeyRange& block) const;

  float* Key(int64_t key) const { return s_.k + (key - keys_.first) * d_qk_; }
  float* Value(int64_t key) const { return s_.v + (key - keys_.first) * d_v_; }
  // One lane of a row of a block.
  static int64_t Cell(const KeyRange& block, int64_t key, int64_t lane) {
    return (key - block.first) * kPanelRows + lane;
  }

  const AttentionProblem& p_;
  const BackwardContext& context_;
  const Tile& tile_;
  const GradientScratch& s_;
  const SequenceExtent& extent_;
  TileTerms terms_;
  const int64_t d_qk_, d_v_;  // Rounded up.
  KeyRange keys_;             // Read.
  bool k_is_finite_ = true;
  bool rows_are_finite_ = true;  // Q and dO of the panel read last.
  bool q_is_finite_ = true;      // Of all panels read.
  // Of finite elements: of all panels read, and of the keys.
  float largest_q_ = 0, largest_k_ = 0;
  ReferenceRow in_double_;
};

}  // namespace attnd
