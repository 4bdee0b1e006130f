#include "engine/cpu/reference_row.h"

#include <cmath>
#include <cstdlib>
#include <limits>

#include "engine/core/dropout_mask.h"

namespace attnd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

void ReferenceRow::Compute(int64_t i, int64_t n, int64_t row) {
  const SequenceExtent& extent = p_.sequences[static_cast<size_t>(i)];
  ComputeLogits(i, n, row, p_.mask.VisibleKeys(row, extent.q_len, extent.kv_len));
  Normalize(n);
}

void ReferenceRow::ComputeLogits(int64_t i, int64_t n, int64_t row, const KeyRange& keys) {
  cells_.clear();
  if (keys.first < keys.last) {
    const int64_t start = QueryElement(p_.q, i, n, row);
    for (int64_t c = 0; c < p_.head_dim_qk; ++c) {
      q_[static_cast<size_t>(c)] = LoadQ(start + c * p_.q.strides.dim);
    }
  }
  for (int64_t j = keys.first; j < keys.last; ++j) {
    if (IsHidden(i, n, row, j)) continue;
    ComputeLogit(i, n, row, cells_.emplace_back(ReferenceCell{.j = j}));
  }
  if (p_.dropout.probability == 0) return;
  const DropoutMask mask(p_.dropout, i, n);
  for (ReferenceCell& cell : cells_) {
    cell.keep_factor = mask.Keeps(row, cell.j) ? KeepScale(p_.dropout) : 0;
  }
}

double ReferenceRow::BiasOf(int64_t i, int64_t n, int64_t row, int64_t j) const {
  return p_.bias ? LoadElement(p_.dtype, in_.bias, BiasElement(i, n, row, j)) : 0;
}

bool ReferenceRow::IsHidden(int64_t i, int64_t n, int64_t row, int64_t j) const {
  return BiasOf(i, n, row, j) == -kInfinity;
}

void ReferenceRow::ComputeLogit(int64_t i, int64_t n, int64_t row, ReferenceCell& cell) const {
  const int64_t k = KeyElement(i, n, cell.j);
  double x = 0;
  for (int64_t c = 0; c < p_.head_dim_qk; ++c) {
    x += q_[static_cast<size_t>(c)] * LoadK(k + c * p_.k.strides.dim);
  }
  const double bias = BiasOf(i, n, row, cell.j);
  if (p_.bias_kind == BiasKind::kPreScale) x += bias;
  x *= p_.scale;
  if (p_.logit_softcap) {
    const double t = std::tanh(x / *p_.logit_softcap);
    x = *p_.logit_softcap * t;
    cell.cap_slope = 1 - t * t;
  }
  if (p_.bias_kind == BiasKind::kPostScale) x += bias;
  if (p_.bias_kind == BiasKind::kAlibi) {
    const SequenceExtent& extent = p_.sequences[static_cast<size_t>(i)];
    const int64_t diagonal = row + (p_.mask.bottom_right ? extent.kv_len - extent.q_len : 0);
    x -= p_.alibi_slopes[static_cast<size_t>(n)] * static_cast<double>(std::abs(cell.j - diagonal));
  }
  cell.logit = x;
}

void ReferenceRow::Normalize(int64_t n) {
  const double sink = Sink(n);
  double m = -kInfinity;
  for (const ReferenceCell& cell : cells_) {
    // Once NaN, it stays so: no number is above it.
    if (cell.logit > m || std::isnan(cell.logit)) m = cell.logit;
  }
  if (m == -kInfinity) {
    cells_.clear();
    lse_ = sink;
    return;
  }
  if (sink > m) m = sink;
  sink_weight_ = std::exp(sink - m);
  double l = sink_weight_;
  for (ReferenceCell& cell : cells_) {
    cell.weight = std::exp(cell.logit - m);
    l += cell.weight;
  }
  for (ReferenceCell& cell : cells_) cell.weight /= l;
  sink_weight_ /= l;
  maximum_ = m;
  sum_ = l;
  lse_ = m + std::log(l);
}

double ReferenceRow::Sink(int64_t n) const {
  switch (p_.softmax_kind) {
    case SoftmaxKind::kVanilla: return -kInfinity;
    case SoftmaxKind::kOffByOne: return 0;
    case SoftmaxKind::kLearnable: return in_.softmax_offset[n];
  }
  return -kInfinity;
}

int64_t ReferenceRow::QueryElement(const TensorView& view, int64_t i, int64_t n,
                                   int64_t row) const {
  const int64_t start = p_.sequences[static_cast<size_t>(i)].q_row * view.start_multiplier;
  return i * view.strides.batch + start + row * view.strides.seq + view.HeadStart(n);
}

int64_t ReferenceRow::KeyElement(int64_t i, int64_t n, int64_t j) const {
  return RowElement(p_.k, in_.page_table_k, i, n, j);
}

int64_t ReferenceRow::ValueElement(int64_t i, int64_t n, int64_t j) const {
  return RowElement(p_.v, in_.page_table_v, i, n, j);
}

int64_t ReferenceRow::RowElement(const TensorView& view, const int32_t* pages, int64_t i, int64_t n,
                                 int64_t j) const {
  const Strides& s = view.strides;
  const int64_t head = n / (p_.num_heads / p_.num_kv_heads) * s.head;
  if (p_.is_paged) {
    const int64_t page = pages[i * p_.pages_per_sequence + j / p_.page_size];
    return page * s.batch + (j % p_.page_size) * s.seq + head;
  }
  const int64_t start = p_.sequences[static_cast<size_t>(i)].kv_row * view.start_multiplier;
  return i * s.batch + start + j * s.seq + head;
}

int64_t ReferenceRow::BiasElement(int64_t i, int64_t n, int64_t row, int64_t j) const {
  const Strides& bs = p_.bias_strides;
  return i * bs.batch + n * bs.head + row * bs.seq + j * bs.dim;
}

}  // namespace attnd
