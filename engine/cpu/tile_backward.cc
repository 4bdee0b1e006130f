#include "engine/cpu/tile_backward.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/cpu/amax.h"
#include "engine/cpu/panel_product.h"
#include "engine/cpu/row_kernels.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of a tensor that lies as O does.
HeadRows RowsAt(const AttentionProblem& problem, const std::byte* base, const SequenceHead& at) {
  const Strides& s = problem.out.strides;
  const int64_t q_row = problem.sequences[static_cast<size_t>(at.sequence)].q_row;
  HeadRows rows;
  rows.dtype = problem.out_dtype;
  rows.base = base + problem.out.byte_offset +
              (at.head * s.head + (problem.q_is_thd ? q_row * s.seq : at.sequence * s.batch)) *
                  SizeOf(problem.out_dtype);
  rows.cols = problem.head_dim_v;
  rows.seq_stride = s.seq;
  rows.dim_stride = s.dim;
  return rows;
}

}  // namespace

int64_t LseElement(const AttentionProblem& problem, const SequenceHead& at, int64_t row) {
  const Strides& s = problem.lse;
  const int64_t q_row = problem.sequences[static_cast<size_t>(at.sequence)].q_row;
  return (problem.q_is_thd ? q_row + row : row) * s.seq + at.head * s.head +
         (problem.q_is_thd ? 0 : at.sequence * s.batch);
}

HeadRows OutRows(const BackwardContext& context, const SequenceHead& at) {
  HeadRows rows = RowsAt(context.problem, context.buffers.out, at);
  rows.factor = context.problem.out_descale();
  return rows;
}

HeadRows OutGradientRows(const BackwardContext& context, const SequenceHead& at) {
  HeadRows rows = RowsAt(context.problem, context.buffers.d_out, at);
  rows.factor = context.problem.d_out_descale();
  return rows;
}

GradientTile::GradientTile(const BackwardContext& context, const Tile& tile,
                           const GradientScratch& scratch)
    : p_(context.problem),
      context_(context),
      tile_(tile),
      s_(scratch),
      extent_(p_.sequences[static_cast<size_t>(tile.sequence)]),
      terms_(p_, context.buffers.bias, tile, scratch.terms),
      d_qk_(RoundUp(p_.head_dim_qk, kLaneGroup)),
      d_v_(RoundUp(p_.head_dim_v, kLaneGroup)),
      in_double_(p_, {.buffers = context.buffers.inputs,
                      .bias = context.buffers.bias,
                      .softmax_offset = context.buffers.softmax_offset}) {}

GradientPanel GradientTile::OpenPanel(int64_t number, int64_t slot) const {
  GradientPanel panel = {number, slot};
  panel.rows = std::min(kPanelRows, tile_.rows() - number * kPanelRows);
  panel.seen_by_all = {0, extent_.kv_len};
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    const int64_t at = slot * kPanelRows + lane;
    s_.visible[at] = {};
    s_.shift[at] = s_.inverse_sum[at] = s_.d[at] = 0;
    s_.is_exact[at] = false;
    if (lane >= panel.rows) continue;
    const int64_t r = number * kPanelRows + lane;
    const KeyRange keys = p_.mask.VisibleKeys(tile_.QueryOf(r), extent_.q_len, extent_.kv_len);
    const RowStatistics& row =
        context_.rows[LseElement(p_, {tile_.sequence, tile_.HeadOf(r)}, tile_.QueryOf(r))];
    if (IsEmpty(keys) || row.shift == -kInfinity) continue;
    s_.visible[at] = keys;
    s_.shift[at] = static_cast<float>(row.shift);
    s_.inverse_sum[at] = row.inverse_sum;
    s_.d[at] = static_cast<float>(row.d);
    s_.is_exact[at] = row.is_exact;
    panel.seen_by_any = Span(panel.seen_by_any, keys);
    panel.seen_by_all = Intersect(panel.seen_by_all, keys);
  }
  return panel;
}

void GradientTile::ReadPanel(const GradientPanel& panel) {
  for (int64_t r = 0; r < panel.rows;) {  // Piece by piece of one head.
    const int64_t tile_row = panel.number * kPanelRows + r;
    const int64_t n = tile_.HeadOf(tile_row), row = tile_.QueryOf(tile_row);
    const int64_t piece = std::min(panel.rows - r, tile_.first_row + tile_.num_rows - row);
    GatherRows(QueryRows(p_, context_.inputs, tile_.sequence, n), row, piece, s_.q_rows + r * d_qk_,
               d_qk_);
    GatherRows(OutGradientRows(context_, {tile_.sequence, n}), row, piece, s_.d_out_rows + r * d_v_,
               d_v_);
    r += piece;
  }
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    if (!IsEmpty(s_.visible[panel.slot * kPanelRows + lane])) continue;
    std::fill_n(s_.q_rows + lane * d_qk_, d_qk_, 0.0f);
    std::fill_n(s_.d_out_rows + lane * d_v_, d_v_, 0.0f);
  }
  const bool is_finite = AllFinite(s_.q_rows, kPanelRows * d_qk_);
  q_is_finite_ = q_is_finite_ && is_finite;
  largest_q_ = std::max(largest_q_, LargestOf(s_.q_rows, kPanelRows * d_qk_));
  rows_are_finite_ = is_finite && AllFinite(s_.d_out_rows, kPanelRows * d_v_);
  ToPanel(s_.q_rows, d_qk_, kPanelRows, p_.head_dim_qk,
          s_.q_panels + panel.slot * d_qk_ * kPanelRows);
  ToPanel(s_.d_out_rows, d_v_, kPanelRows, p_.head_dim_v,
          s_.d_out_panels + panel.slot * d_v_ * kPanelRows);
}

void GradientTile::ReadKeys(const KeyRange& keys) {
  keys_ = keys;
  const int64_t count = keys.last - keys.first;
  GatherRows(KeyRows(p_, context_.inputs, tile_.sequence, tile_.kv_head), keys.first, count, s_.k,
             d_qk_);
  GatherRows(ValueRows(p_, context_.inputs, tile_.sequence, tile_.kv_head), keys.first, count, s_.v,
             d_v_);
  std::fill_n(s_.k + count * d_qk_, kProductStep * d_qk_, 0.0f);
  std::fill_n(s_.v + count * d_v_, kProductStep * d_v_, 0.0f);
  k_is_finite_ = AllFinite(s_.k, count * d_qk_);
  largest_k_ = LargestOf(s_.k, count * d_qk_);
}

bool GradientTile::StartBlock(const GradientPanel& panel, const KeyRange& keys, Block& block) {
  const KeyRange seen = Intersect(panel.seen_by_any, keys);
  if (IsEmpty(seen)) return false;
  block.keys = {keys.first + (seen.first - keys.first) / kProductStep * kProductStep,
                keys.first + RoundUp(seen.last - keys.first, kProductStep)};
  const KeyRange existing = {block.keys.first, std::min(block.keys.last, extent_.kv_len)};
  GradientBlock& b = block.numbers;
  if (terms_.has_terms()) {
    terms_.FillTerms(panel.number, existing);
    if (terms_.hides_all()) return false;
    b.terms = s_.terms.terms;
    b.terms_before_scale = terms_.before_scale();
  }
  if (terms_.has_dropout()) {
    terms_.FillKeep(panel.number, existing);
    b.keep = s_.terms.keep;
  }
  Multiply(panel, block.keys);
  const int64_t lanes = panel.slot * kPanelRows;
  for (size_t v = 0; v < kPanelRows; ++v) {
    const KeyRange visible = Intersect(s_.visible[lanes + static_cast<int64_t>(v)], keys);
    const int64_t first = block.keys.first;
    block.first[v] = static_cast<float>(IsEmpty(visible) ? 0 : visible.first - first);
    block.last[v] = static_cast<float>(IsEmpty(visible) ? 0 : visible.last - first);
  }
  b.keys = block.keys.last - block.keys.first;
  b.logits = s_.logits;
  b.d_logits = s_.d_logits;
  b.scale = static_cast<float>(p_.scale);
  b.softcap = FloatSoftcap(p_.logit_softcap);
  b.first = block.first.data();
  b.last = block.last.data();
  b.shift = s_.shift + lanes;
  b.inverse_sum = s_.inverse_sum + lanes;
  b.d = s_.d + lanes;
  b.sum = s_.sum + lanes;
  b.m = s_.m + lanes;
  b.l = s_.l + lanes;
  b.weighted = s_.weighted + lanes;
  return true;
}

KeyRange GradientTile::ComputeBlock(const GradientPanel& panel, const KeyRange& keys,
                                    bool through_cap) {
  Block block;
  if (!StartBlock(panel, keys, block)) return {};
  std::array<bool, kPanelRows> in_double{};
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    in_double[static_cast<size_t>(lane)] =
        s_.is_exact[panel.slot * kPanelRows + lane] || HasOverflow(panel, block.keys, lane);
  }
  block.numbers.through_cap = through_cap;
  SoftmaxGradient(block.numbers);
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    if (in_double[static_cast<size_t>(lane)]) ComputeLane(panel, block.keys, lane, through_cap);
  }
  return block.keys;
}

void GradientTile::AddToStatistics(const GradientPanel& panel, const KeyRange& keys) {
  Block block;
  if (!StartBlock(panel, keys, block)) return;
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    if (!HasOverflow(panel, block.keys, lane)) continue;
    block.numbers.m[lane] = std::numeric_limits<float>::quiet_NaN();
  }
  AddSoftmaxStatistics(block.numbers);
}

bool GradientTile::MayOverflow() const {
  const double largest = static_cast<double>(largest_q_) * static_cast<double>(largest_k_) *
                         static_cast<double>(p_.head_dim_qk);
  return q_is_finite_ && k_is_finite_ && largest >= std::numeric_limits<float>::max();
}

bool GradientTile::HasOverflow(const GradientPanel& panel, const KeyRange& block,
                               int64_t lane) const {
  if (!MayOverflow()) return false;
  const KeyRange keys = Intersect(s_.visible[panel.slot * kPanelRows + lane], block);
  for (int64_t j = keys.first; j < keys.last; ++j) {
    if (!std::isfinite(s_.logits[Cell(block, j, lane)])) return true;
  }
  return false;
}

void GradientTile::ComputeLane(const GradientPanel& panel, const KeyRange& block, int64_t lane,
                               bool through_cap) {
  const int64_t r = panel.number * kPanelRows + lane, at = panel.slot * kPanelRows + lane;
  const int64_t n = tile_.HeadOf(r), query = tile_.QueryOf(r);
  const RowStatistics& row = context_.rows[LseElement(p_, {tile_.sequence, n}, query)];
  const KeyRange keys = Intersect(s_.visible[at], block);
  in_double_.ComputeLogits(tile_.sequence, n, query, keys);
  const float* d_out = s_.d_out_panels + panel.slot * d_v_ * kPanelRows + lane;
  for (const ReferenceCell& cell : in_double_.cells()) {
    const double p = std::exp(cell.logit - row.shift) * static_cast<double>(row.inverse_sum);
    double dp = 0;
    for (int64_t c = 0; c < p_.head_dim_v && cell.keep_factor != 0; ++c) {
      dp += cell.keep_factor * static_cast<double>(d_out[c * kPanelRows]) *
            static_cast<double>(Value(cell.j)[c]);
    }
    const double slope = through_cap ? cell.cap_slope : 1;
    s_.logits[Cell(block, cell.j, lane)] = static_cast<float>(p * cell.keep_factor);
    s_.d_logits[Cell(block, cell.j, lane)] = static_cast<float>(p * (dp - row.d) * slope);
  }
}

// Lanes of a group without rows keep what they held, which SoftmaxGradient masks.
void GradientTile::Multiply(const GradientPanel& panel, const KeyRange& block) const {
  PanelProduct product;
  product.rows = block.last - block.first;
  product.last_lane = RoundUp(panel.rows, kLaneGroup);
  product.a_depth_stride = 1;
  product.depth = p_.head_dim_qk;
  product.a = Key(block.first);
  product.a_row_stride = d_qk_;
  product.b = s_.q_panels + panel.slot * d_qk_ * kPanelRows;
  product.c = s_.logits;
  attnd::Multiply(product);
  product.depth = p_.head_dim_v;
  product.a = Value(block.first);
  product.a_row_stride = d_v_;
  product.b = s_.d_out_panels + panel.slot * d_v_ * kPanelRows;
  product.c = s_.d_logits;
  attnd::Multiply(product);
}

bool GradientTile::IsMasked(const GradientPanel& panel, const KeyRange& block) const {
  return block.first < panel.seen_by_all.first || block.last > panel.seen_by_all.last ||
         terms_.may_hide();
}

// Where a row does not see a key, what they would add is 0 times a number, or NaN: where there may
// be others than numbers, only pairs that see each other are added.
void GradientTile::AddToQueryGradient(const GradientPanel& panel, const KeyRange& block) {
  if (!k_is_finite_ && IsMasked(panel, block)) return AddPairsToQueryGradient(panel, block);
  PanelProduct product;
  product.rows = panel.rows;
  product.depth = block.last - block.first;
  product.a = s_.d_logits;
  product.a_row_stride = 1;
  product.a_depth_stride = kPanelRows;
  product.b = Key(block.first);
  product.b_stride = d_qk_;
  product.c = s_.dq + panel.slot * kPanelRows * d_qk_;
  product.c_stride = d_qk_;
  product.last_lane = d_qk_;
  product.accumulate = true;
  attnd::Multiply(product);
}

void GradientTile::AddToKeyGradients(const GradientPanel& panel, const KeyRange& block) {
  const bool is_whole = !IsMasked(panel, block) && !terms_.has_dropout();
  if (!rows_are_finite_ && !is_whole) return AddPairsToKeyGradients(panel, block);
  PanelProduct product;
  product.rows = block.last - block.first;
  product.depth = panel.rows;
  product.a_row_stride = kPanelRows;
  product.a_depth_stride = 1;
  product.accumulate = true;
  product.a = s_.d_logits;
  product.b = s_.q_rows;
  product.b_stride = product.c_stride = product.last_lane = d_qk_;
  product.c = s_.dk + (block.first - keys_.first) * d_qk_;
  attnd::Multiply(product);
  product.a = s_.logits;
  product.b = s_.d_out_rows;
  product.b_stride = product.c_stride = product.last_lane = d_v_;
  product.c = s_.dv + (block.first - keys_.first) * d_v_;
  attnd::Multiply(product);
}

void GradientTile::AddPairsToQueryGradient(const GradientPanel& panel,
                                           const KeyRange& block) const {
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    const KeyRange keys = Intersect(s_.visible[panel.slot * kPanelRows + lane], block);
    float* dq = s_.dq + (panel.slot * kPanelRows + lane) * d_qk_;
    for (int64_t j = keys.first; j < keys.last; ++j) {
      if (terms_.Hides(j, lane)) continue;
      const float gradient = s_.d_logits[Cell(block, j, lane)];
      for (int64_t c = 0; c < p_.head_dim_qk; ++c) dq[c] += gradient * Key(j)[c];
    }
  }
}

void GradientTile::AddPairsToKeyGradients(const GradientPanel& panel, const KeyRange& block) const {
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    const KeyRange keys = Intersect(s_.visible[panel.slot * kPanelRows + lane], block);
    for (int64_t j = keys.first; j < keys.last; ++j) {
      if (terms_.Hides(j, lane)) continue;
      const int64_t cell = Cell(block, j, lane);
      float* dk = s_.dk + (j - keys_.first) * d_qk_;
      for (int64_t c = 0; c < p_.head_dim_qk; ++c) {
        dk[c] += s_.d_logits[cell] * s_.q_rows[lane * d_qk_ + c];
      }
      if (terms_.has_dropout() && s_.terms.keep[cell] == 0) continue;
      float* dv = s_.dv + (j - keys_.first) * d_v_;
      for (int64_t c = 0; c < p_.head_dim_v; ++c) {
        dv[c] += s_.logits[cell] * s_.d_out_rows[lane * d_v_ + c];
      }
    }
  }
}

}  // namespace attnd
