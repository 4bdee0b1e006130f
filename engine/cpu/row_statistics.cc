#include "engine/cpu/row_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/core/status.h"
#include "engine/cpu/finite_reads.h"
#include "engine/cpu/gradient_kernels.h"
#include "engine/cpu/reference_row.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// The shift of rows that are left to NormalizeRows.
constexpr double kToNormalize = std::numeric_limits<double>::infinity();

float RowSum(const BackwardContext& context, const SequenceHead& at, int64_t row,
             const GradientScratch& s) {
  const int64_t d_v = context.problem.head_dim_v;
  GatherRows(OutRows(context, at), row, 1, s.q_rows, d_v);
  GatherRows(OutGradientRows(context, at), row, 1, s.d_out_rows, d_v);
  return Dot(s.q_rows, s.d_out_rows, d_v);
}

bool IsHiddenByBias(const BackwardContext& context, const SequenceHead& at, int64_t row,
                    const KeyRange& keys) {
  const AttentionProblem& p = context.problem;
  return p.bias && IsRowOf(BiasRows(p, context.buffers.bias, at, keys), row, -kInfinity);
}

ReferenceRow InDouble(const BackwardContext& context) {
  return ReferenceRow(context.problem, {.buffers = context.buffers.inputs,
                                        .bias = context.buffers.bias,
                                        .softmax_offset = context.buffers.softmax_offset});
}

bool IsNear(double own, double given) {
  return std::isnan(own) || own == given || std::abs(own - given) <= 1e-2 + 1e-5 * std::abs(own);
}

absl::Status NotTheirs() {
  return InvalidField(reason::kInvalidField, "lse",
                      "does not belong to these inputs: Q, K and the spec give another "
                      "logarithm of the softmax's denominator");
}

// Completes rows of one tile.
class Normalization {
 public:
  Normalization(const BackwardContext& context, const Tile& tile, const GradientScratch& scratch)
      : p_(context.problem),
        context_(context),
        tile_(tile),
        s_(scratch),
        finite_(p_, context.inputs, tile.sequence, tile.kv_head),
        in_double_(InDouble(context)) {}

  bool IsLeft(int64_t r) const { return Row(r).shift == kToNormalize; }

  absl::Status Run() {
    ATTND_RETURN_IF_ERROR(SumAllKeys());
    for (int64_t r = 0; r < tile_.rows(); ++r) {
      if (!IsLeft(r)) continue;
      ATTND_RETURN_IF_ERROR(CheckNotCancelled(context_));
      ATTND_RETURN_IF_ERROR(Finish(r));
    }
    return absl::OkStatus();
  }

 private:
  SequenceHead HeadOf(int64_t r) const { return {tile_.sequence, tile_.HeadOf(r)}; }
  RowStatistics& Row(int64_t r) const {
    return context_.rows[LseElement(p_, HeadOf(r), tile_.QueryOf(r))];
  }

  // Fills s_.m, s_.l and s_.weighted.
  absl::Status SumAllKeys() {
    GradientTile gradient(context_, tile_, s_);
    const int64_t panels = gradient.num_panels();
    std::fill_n(s_.m, panels * kPanelRows, -kInfinity);
    std::fill_n(s_.l, panels * kPanelRows, 0.0f);
    std::fill_n(s_.weighted, panels * kPanelRows, 0.0f);
    KeyRange all;
    for (int64_t number = 0; number < panels; ++number) {
      const GradientPanel panel = gradient.OpenPanel(number, number);
      all = Span(all, panel.seen_by_any);
      if (!IsEmpty(panel.seen_by_any)) gradient.ReadPanel(panel);
    }
    for (int64_t first = all.first; first < all.last; first += kTileKeys) {
      ATTND_RETURN_IF_ERROR(CheckNotCancelled(context_));
      const KeyRange keys = {first, std::min(all.last, first + kTileKeys)};
      gradient.ReadKeys(keys);
      for (int64_t number = 0; number < panels; ++number) {
        gradient.AddToStatistics(gradient.OpenPanel(number, number), keys);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Finish(int64_t r) {
    RowStatistics& row = Row(r);
    const float sink = SinkOf(p_, context_.buffers.softmax_offset, tile_.HeadOf(r));
    float m = s_.m[r], l = s_.l[r], weighted = s_.weighted[r];
    if (!std::isfinite(m) || !std::isfinite(l) || !std::isfinite(weighted)) {
      return FinishInDouble(r);
    }
    if (sink > m) {
      const float keep = std::exp(m - sink);
      l *= keep;
      weighted *= keep;
      m = sink;
    }
    l += std::exp(sink - m);
    row.shift = m;
    row.inverse_sum = 1 / l;
    row.d = weighted / l;
    const float given = context_.buffers.lse[LseElement(p_, HeadOf(r), tile_.QueryOf(r))];
    if (IsNear(m + std::log(l), given)) return absl::OkStatus();
    return CheckLse(context_, HeadOf(r), tile_.QueryOf(r));
  }

  // Of inputs that are not finite nothing is made that is; they keep what forward gave them.
  absl::Status FinishInDouble(int64_t r) {
    const SequenceHead at = HeadOf(r);
    const int64_t query = tile_.QueryOf(r);
    RowStatistics& row = Row(r);
    const float given = context_.buffers.lse[LseElement(p_, at, query)];
    in_double_.Compute(at.sequence, at.head, query);
    if (!IsNear(static_cast<float>(in_double_.lse()), given)) return NotTheirs();
    row = {};
    if (given == -kInfinity && in_double_.cells().empty()) return absl::OkStatus();
    row.shift = given;
    row.d = RowSum(context_, at, query, s_);
    if (!finite_.Row(at.head, query)) return absl::OkStatus();
    row.shift = in_double_.maximum();
    row.inverse_sum = static_cast<float>(1 / in_double_.sum());
    row.d = WeightedSum();
    row.is_exact = true;
    return absl::OkStatus();
  }

  // sum of keep P (dO . v) over the cells of in_double_, with the dO that is in scratch.
  double WeightedSum() const {
    const HeadRows values = ValueRows(p_, context_.inputs, tile_.sequence, tile_.kv_head);
    double sum = 0;
    for (const ReferenceCell& cell : in_double_.cells()) {
      if (cell.keep_factor == 0) continue;
      GatherRows(values, cell.j, 1, s_.v, p_.head_dim_v);
      double dp = 0;
      for (int64_t c = 0; c < p_.head_dim_v; ++c) {
        dp += static_cast<double>(s_.d_out_rows[c]) * static_cast<double>(s_.v[c]);
      }
      sum += cell.weight * cell.keep_factor * dp;
    }
    return sum;
  }

  const AttentionProblem& p_;
  const BackwardContext& context_;
  const Tile& tile_;
  const GradientScratch& s_;
  FiniteReads finite_;
  ReferenceRow in_double_;
};

}  // namespace

absl::Status CheckNotCancelled(const BackwardContext& context) {
  const CancellationToken* cancellation = context.buffers.cancellation;
  if (cancellation == nullptr || !cancellation->IsCancelled()) return absl::OkStatus();
  return absl::CancelledError("cancelled while it was computed");
}

absl::Status CheckLse(const BackwardContext& context, const SequenceHead& at, int64_t row) {
  ReferenceRow reference = InDouble(context);
  reference.Compute(at.sequence, at.head, row);
  const float own = static_cast<float>(reference.lse());  // As forward returns it.
  const float given = context.buffers.lse[LseElement(context.problem, at, row)];
  return IsNear(own, given) ? absl::OkStatus() : NotTheirs();
}

bool StartRows(const BackwardContext& context, const RowBlock& rows, const GradientScratch& s) {
  const AttentionProblem& p = context.problem;
  const SequenceExtent& extent = p.sequences[static_cast<size_t>(rows.sequence)];
  const int64_t last_row = std::min(extent.q_len, rows.first_row + rows.num_rows);
  bool are_complete = true;
  for (int64_t n = 0; n < p.num_heads; ++n) {
    const SequenceHead at = {rows.sequence, n};
    for (int64_t row = rows.first_row; row < last_row; ++row) {
      const int64_t element = LseElement(p, at, row);
      const KeyRange keys = p.mask.VisibleKeys(row, extent.q_len, extent.kv_len);
      RowStatistics& statistics = context.rows[element];
      statistics = {};
      if (IsEmpty(keys)) continue;
      const float lse = context.buffers.lse[element];
      if (lse == -kInfinity && IsHiddenByBias(context, at, row, keys)) continue;
      if (std::abs(lse) > kLargestLse) {
        statistics.shift = kToNormalize;
        are_complete = false;
        continue;
      }
      statistics.shift = lse;
      statistics.d = RowSum(context, at, row, s);
    }
  }
  return are_complete;
}

absl::Status NormalizeRows(const BackwardContext& context, const Tile& tile,
                           const GradientScratch& scratch) {
  Normalization rows(context, tile, scratch);
  for (int64_t r = 0; r < tile.rows(); ++r) {
    if (rows.IsLeft(r)) return rows.Run();
  }
  return absl::OkStatus();
}

}  // namespace attnd
