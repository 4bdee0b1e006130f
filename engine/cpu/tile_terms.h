// What a tile's logits get beside q . k, and what dropout keeps of its probabilities, panel by
// panel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "engine/core/attention_problem.h"
#include "engine/cpu/tile_plan.h"

namespace attnd {

class TileTerms {
 public:
  // `bias` as in ForwardBuffers. The scratch is what TermScratch says; all that is passed outlives
  // this.
  TileTerms(const AttentionProblem& problem, const std::byte* bias, const Tile& tile,
            const TermScratch& scratch)
      : p_(problem), bias_(bias), tile_(tile), scratch_(scratch) {}

  bool has_terms() const { return p_.bias_kind != BiasKind::kNone; }
  bool has_dropout() const { return p_.dropout.probability > 0; }
  bool before_scale() const { return p_.bias_kind == BiasKind::kPreScale; }

  // Fill scratch.terms with the bias or ALiBi, and scratch.keep with 0 or 1 / (1 - p), for up to
  // kTileKeys keys; row 0 is keys.first. Lanes of no row get anything finite.
  void FillTerms(int64_t panel, const KeyRange& keys);
  void FillKeep(int64_t panel, const KeyRange& keys);

  // Of the bias filled last: whether some cell may hide (it is not finite), and whether all do.
  bool may_hide() const { return may_hide_; }
  bool hides_all() const { return hides_all_; }
  // Whether the cell of a lane and a key of the block filled last is hidden.
  bool Hides(int64_t key, int64_t lane) const {
    return may_hide_ && TermsFrom(key)[lane] == -std::numeric_limits<float>::infinity();
  }

  // Rows of a block, from key j on.
  const float* TermsFrom(int64_t key) const { return Row(scratch_.terms, terms_first_, key); }
  const float* KeepFrom(int64_t key) const { return Row(scratch_.keep, keep_first_, key); }

 private:
  static const float* Row(const float* block, int64_t first, int64_t key) {
    return block + (key - first) * kPanelRows;
  }
  int64_t RowsOfPanel(int64_t panel) const;
  void FillBias(int64_t panel, const KeyRange& keys);
  void FillAlibiTerms(int64_t panel, const KeyRange& keys) const;

  const AttentionProblem& p_;
  const std::byte* const bias_;
  const Tile& tile_;
  const TermScratch& scratch_;
  int64_t terms_first_ = 0;
  int64_t keep_first_ = 0;
  bool may_hide_ = false;
  bool hides_all_ = false;
};

// A cap that float32 holds: one below its range leaves nothing of any logit, one above it all. 0:
// none.
float FloatSoftcap(const std::optional<double>& cap);

// What the softmax's denominator of head n has beside the keys, as a logit; -inf: nothing.
float SinkOf(const AttentionProblem& problem, const float* softmax_offset, int64_t n);

}  // namespace attnd
