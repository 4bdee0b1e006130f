#include "engine/cpu/tile_worker.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "engine/cpu/few_rows.h"
#include "engine/cpu/head_rows.h"
#include "engine/cpu/logit_terms.h"
#include "engine/cpu/panel_product.h"
#include "engine/cpu/row_kernels.h"
#include "engine/cpu/softmax_kernels.h"
#include "engine/cpu/tile_terms.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kGroups = kPanelRows / kLaneGroup;

struct FloatRows {
  const float* data = nullptr;
  int64_t stride = 0;
};

// Keys against which the same lanes of a panel are computed.
struct Segment {
  KeyRange keys;
  int64_t first_lane = 0;
  int64_t last_lane = 0;
};

// At most five: what both groups of a panel see some of, and before and after that one of them.
class Segments {
 public:
  explicit Segments(const std::array<KeyRange, kGroups>& keys) {
    static_assert(kGroups == 2);
    const KeyRange both = Intersect(keys[0], keys[1]);
    Add(both, 0, kPanelRows);
    for (int64_t group = 0; group < kGroups; ++group) {
      const KeyRange& own = keys[static_cast<size_t>(group)];
      const int64_t lane = group * kLaneGroup;
      if (IsEmpty(both)) {
        Add(own, lane, lane + kLaneGroup);
      } else {
        Add({own.first, both.first}, lane, lane + kLaneGroup);
        Add({both.last, own.last}, lane, lane + kLaneGroup);
      }
    }
  }
  const Segment* begin() const { return segments_.data(); }
  const Segment* end() const { return segments_.data() + size_; }

 private:
  void Add(const KeyRange& keys, int64_t first_lane, int64_t last_lane) {
    if (!IsEmpty(keys)) segments_[size_++] = {keys, first_lane, last_lane};
  }

  std::array<Segment, 5> segments_;
  size_t size_ = 0;
};

class TileComputation {
 public:
  TileComputation(const TileContext& context, const Tile& tile, const TileScratch& scratch)
      : p_(context.problem),
        context_(context),
        tile_(tile),
        scratch_(scratch),
        terms_(p_, context.buffers.bias, tile, scratch.terms),
        extent_(p_.sequences[static_cast<size_t>(tile.sequence)]),
        rows_(tile.rows()),
        panels_(NumPanels(rows_)),
        d_v_(PaddedValueDim(p_.head_dim_v)),
        is_few_(rows_ <= kFewRows) {}

  absl::Status Run() {
    std::fill_n(scratch_.acc, panels_ * d_v_ * kPanelRows, 0.0f);
    std::fill_n(scratch_.m, panels_ * kPanelRows, -kInfinity);
    std::fill_n(scratch_.l, panels_ * kPanelRows, 0.0f);
    const KeyRange keys = ChunkKeys(FindVisibleKeys());
    if (!IsEmpty(keys)) {
      ReadQueries();
      const HeadRows k = KeyRows(p_, context_.buffers, tile_.sequence, tile_.kv_head);
      const HeadRows v = ValueRows(p_, context_.buffers, tile_.sequence, tile_.kv_head);
      for (int64_t first = keys.first; first < keys.last; first += kTileKeys) {
        const CancellationToken* cancellation = context_.buffers.cancellation;
        if (cancellation != nullptr && cancellation->IsCancelled()) {
          return absl::CancelledError("cancelled while it was computed");
        }
        ReadKeys(k, v, {first, std::min(keys.last, first + kTileKeys)});
        for (int64_t panel = 0; panel < panels_; ++panel) AddKeysToPanel(panel);
      }
    }
    for (int64_t panel = 0; panel < panels_; ++panel) WritePanel(panel);
    return absl::OkStatus();
  }

 private:
  // Fills scratch_.visible and scratch_.groups, and returns the keys that some row sees, or an
  // empty range. Lanes past the last row see what it sees; groups past it see nothing.
  KeyRange FindVisibleKeys() {
    KeyRange any;
    std::fill_n(scratch_.groups, panels_ * kGroups, LaneGroup{});
    int64_t row = 0;
    for (int64_t first = 0; first < rows_; first += kLaneGroup) {
      LaneGroup group = {{}, {0, extent_.kv_len}};
      for (int64_t r = first; r < first + kLaneGroup; ++r) {
        const KeyRange visible =
            p_.mask.VisibleKeys(tile_.first_row + row, extent_.q_len, extent_.kv_len);
        if (r < rows_ - 1 && ++row == tile_.num_rows) row = 0;
        scratch_.visible[r] = visible;
        group.seen_by_any = Span(group.seen_by_any, visible);
        group.seen_by_all = Intersect(group.seen_by_all, visible);
      }
      scratch_.groups[first / kLaneGroup] = group;
      any = Span(any, group.seen_by_any);
    }
    return any;
  }

  KeyRange ChunkKeys(KeyRange all) const {
    const int64_t size = (all.last - all.first + tile_.num_chunks - 1) / tile_.num_chunks;
    const int64_t first = std::min(all.last, all.first + tile_.chunk * size);
    return {first, std::min(all.last, first + size)};
  }

  int64_t RowsOfPanel(int64_t panel) const {
    return std::min(kPanelRows, rows_ - panel * kPanelRows);
  }

  void ReadQueries() {
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const int64_t count = RowsOfPanel(panel);
      const int64_t d_qk = p_.head_dim_qk;
      const float* in_place = nullptr;
      int64_t stride = d_qk;
      for (int64_t r = 0; r < count;) {  // Piece by piece of one head.
        const int64_t tile_row = panel * kPanelRows + r;
        const int64_t n = tile_.HeadOf(tile_row);
        const int64_t row = tile_row % tile_.num_rows;
        const int64_t piece = std::min(count - r, tile_.num_rows - row);
        const HeadRows rows = QueryRows(p_, context_.buffers, tile_.sequence, n);
        if (piece == count && !is_few_) in_place = FloatsInPlace(rows, tile_.first_row + row);
        if (in_place != nullptr) {
          stride = rows.seq_stride;
        } else {
          GatherRows(rows, tile_.first_row + row, piece, scratch_.rows + r * d_qk, d_qk);
        }
        r += piece;
      }
      if (is_few_) return;  // They stay in scratch_.rows.
      ToPanel(in_place != nullptr ? in_place : scratch_.rows, stride, count, d_qk, Queries(panel));
    }
  }

  void ReadKeys(const HeadRows& k, const HeadRows& v, KeyRange keys) {
    keys_ = keys;
    v_is_finite_.reset();
    const int64_t count = keys.last - keys.first;
    // Copies pay where they are read more than once.
    k_ = {rows_ == 1 ? FloatsInPlace(k, keys.first) : nullptr, k.seq_stride};
    v_ = {rows_ == 1 ? FloatsInPlace(v, keys.first) : nullptr, v.seq_stride};
    if (k_.data == nullptr) {
      GatherRows(k, keys.first, count, scratch_.k, p_.head_dim_qk);
      std::fill_n(scratch_.k + count * p_.head_dim_qk, kProductStep * p_.head_dim_qk, 0.0f);
      k_ = {scratch_.k, p_.head_dim_qk};
    }
    if (v_.data == nullptr) {
      GatherRows(v, keys.first, count, scratch_.v, d_v_);
      v_ = {scratch_.v, d_v_};
    }
  }

  const float* Key(int64_t key) const { return k_.data + (key - keys_.first) * k_.stride; }
  const float* Value(int64_t key) const { return v_.data + (key - keys_.first) * v_.stride; }

  void AddKeysToPanel(int64_t panel) {
    const LaneGroup* groups = scratch_.groups + panel * kGroups;
    std::array<KeyRange, kGroups> keys;
    bool is_masked = false;
    for (size_t g = 0; g < keys.size(); ++g) {
      keys[g] = Intersect(groups[g].seen_by_any, keys_);
      const KeyRange all = Intersect(groups[g].seen_by_all, keys_);
      is_masked |= all.first != keys[g].first || all.last != keys[g].last;
    }
    if (terms_.has_terms()) {
      terms_.FillTerms(panel, Span(keys[0], keys[1]));
      if (terms_.hides_all()) return;
    }
    const Segments segments(keys);
    for (const Segment& segment : segments) MultiplyKeys(panel, segment);
    if (terms_.has_dropout()) terms_.FillKeep(panel, Span(keys[0], keys[1]));
    for (int64_t g = 0; g < kGroups; ++g) Softmax(panel, g, keys[static_cast<size_t>(g)]);
    // A masked, hidden or dropped key has P = 0, and 0 * NaN would be NaN: where some row does not
    // see or keep some key and V is not all finite, only visible and kept keys are touched.
    const bool visible_only =
        (is_masked || terms_.may_hide() || terms_.has_dropout()) && !VIsFinite();
    for (const Segment& segment : segments) {
      visible_only ? AddVisibleValues(panel, segment) : AddValues(panel, segment);
    }
  }

  // Logits of the segment. The product's last step may go on into keys that follow it, which are
  // keys of the tile, or the zeros after it.
  void MultiplyKeys(int64_t panel, const Segment& segment) const {
    if (is_few_) {
      MultiplyFewRows(FewRowsOf(segment.keys, Key(segment.keys.first), k_.stride, p_.head_dim_qk),
                      scratch_.rows);
      return;
    }
    PanelProduct product;
    product.rows = segment.keys.last - segment.keys.first;
    product.depth = p_.head_dim_qk;
    product.a = Key(segment.keys.first);
    product.a_row_stride = k_.stride;
    product.a_depth_stride = 1;
    product.b = Queries(panel);
    product.c = Logits(segment.keys.first);
    product.first_lane = segment.first_lane;
    product.last_lane = segment.last_lane;
    Multiply(product);
  }

  FewRows FewRowsOf(const KeyRange& keys, const float* kv, int64_t stride, int64_t dim) const {
    return {rows_, keys.last - keys.first, dim, kv, stride, Logits(keys.first)};
  }

  void Softmax(int64_t panel, int64_t group, const KeyRange& keys) const {
    if (IsEmpty(keys)) return;
    const int64_t lane = group * kLaneGroup;
    const int64_t r = panel * kPanelRows + lane;
    const KeyRange all = Intersect(scratch_.groups[r / kLaneGroup].seen_by_all, keys);
    SoftmaxBlock block;
    block.keys = keys.last - keys.first;
    block.logits = Logits(keys.first) + lane;
    block.scale = static_cast<float>(p_.scale);
    block.softcap = FloatSoftcap(p_.logit_softcap);
    if (terms_.has_terms()) {
      AddTerms({block.keys, terms_.TermsFrom(keys.first) + lane, block.logits,
                terms_.before_scale(), block.scale, block.softcap});
      block.scale = 1;
      block.softcap = 0;
    }
    if (!IsEmpty(all)) block.seen_by_all = {all.first - keys.first, all.last - keys.first};
    block.visible = scratch_.visible + r;
    block.first_key = keys.first;
    block.m = scratch_.m + r;
    block.l = scratch_.l + r;
    block.acc = Acc(panel) + lane;
    block.d_v = p_.head_dim_v;
    OnlineSoftmax(block);
    if (!terms_.has_dropout()) return;
    ScaleLogits(block.keys, terms_.KeepFrom(keys.first) + lane, block.logits);
  }

  void AddValues(int64_t panel, const Segment& segment) const {
    if (is_few_) {
      AddValuesOfFewRows(
          FewRowsOf(segment.keys, Value(segment.keys.first), v_.stride, p_.head_dim_v), Acc(panel));
      return;
    }
    PanelProduct product;
    product.rows = p_.head_dim_v;
    product.depth = segment.keys.last - segment.keys.first;
    product.a = Value(segment.keys.first);
    product.a_row_stride = 1;
    product.a_depth_stride = v_.stride;
    product.b = Logits(segment.keys.first);
    product.c = Acc(panel);
    product.first_lane = segment.first_lane;
    product.last_lane = segment.last_lane;
    product.accumulate = true;
    Multiply(product);
  }

  void AddVisibleValues(int64_t panel, const Segment& segment) const {
    for (int64_t lane = segment.first_lane; lane < segment.last_lane; ++lane) {
      const KeyRange keys = Intersect(segment.keys, scratch_.visible[panel * kPanelRows + lane]);
      for (int64_t j = keys.first; j < keys.last; ++j) {
        const float* v = Value(j);
        const float probability = Logits(j)[lane];
        if (terms_.has_dropout() && terms_.KeepFrom(j)[lane] == 0) continue;
        if (terms_.Hides(j, lane)) continue;
        for (int64_t c = 0; c < p_.head_dim_v; ++c) {
          Acc(panel)[c * kPanelRows + lane] += probability * v[c];
        }
      }
    }
  }

  // Of all the keys at hand; looked at once, and only where it matters.
  bool VIsFinite() {
    if (!v_is_finite_) {
      v_is_finite_ = true;
      for (int64_t j = keys_.first; j < keys_.last && *v_is_finite_; ++j) {
        v_is_finite_ = AllFinite(Value(j), p_.head_dim_v);
      }
    }
    return *v_is_finite_;
  }

  void WritePanel(int64_t panel) const {
    RowState state;
    state.first = panel * kPanelRows;
    state.count = RowsOfPanel(panel);
    state.acc = scratch_.rows;
    state.acc_stride = d_v_;
    state.m = scratch_.m + state.first;
    state.l = scratch_.l + state.first;
    FromPanel(Acc(panel), state.count, p_.head_dim_v, state.acc, state.acc_stride);
    if (tile_.partials == nullptr) {
      WriteRows(context_, tile_, state);
    } else {
      StorePartialRows(tile_, state, p_.head_dim_v);
    }
  }

  float* Queries(int64_t panel) const { return scratch_.q + panel * p_.head_dim_qk * kPanelRows; }
  float* Logits(int64_t key) const { return scratch_.logits + (key - keys_.first) * kPanelRows; }
  float* Acc(int64_t panel) const { return scratch_.acc + panel * d_v_ * kPanelRows; }

  const AttentionProblem& p_;
  const TileContext& context_;
  const Tile& tile_;
  const TileScratch& scratch_;
  TileTerms terms_;
  const SequenceExtent& extent_;
  const int64_t rows_;
  const int64_t panels_;
  const int64_t d_v_;  // Padded.
  const bool is_few_;
  // Of the key tile at hand, where it lies or in scratch:
  KeyRange keys_;
  FloatRows k_;
  FloatRows v_;
  std::optional<bool> v_is_finite_;
};

}  // namespace

absl::Status ComputeTile(const TileContext& context, const Tile& tile, const TileScratch& scratch) {
  return TileComputation(context, tile, scratch).Run();
}

}  // namespace attnd
