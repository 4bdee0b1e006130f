#include "engine/cpu/gradient_passes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/cpu/amax.h"
#include "engine/cpu/gradient_kernels.h"
#include "engine/cpu/panel_product.h"
#include "engine/cpu/row_kernels.h"
#include "engine/cpu/row_statistics.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kTileRows = 128;  // Of a pass over all rows.

// The gradient of Q, K or V: `factor` times what was summed, and stored times `scale`.
struct Gradient {
  const TensorView& view;
  float factor;
  float scale;
  float* amax;  // Of this gradient; null: not wanted.
};

float* AmaxAt(const BackwardContext& context, int64_t number) {
  return context.buffers.amax == nullptr ? nullptr : context.buffers.amax + number;
}

Gradient QueryGradient(const BackwardContext& context) {
  const AttentionProblem& p = context.problem;
  return {p.q, static_cast<float>(p.scale), p.fp8.scale_d_q, AmaxAt(context, 1)};
}

Gradient KeyGradient(const BackwardContext& context) {
  const AttentionProblem& p = context.problem;
  return {p.k, static_cast<float>(p.scale), p.fp8.scale_d_k, AmaxAt(context, 2)};
}

Gradient ValueGradient(const BackwardContext& context) {
  const AttentionProblem& p = context.problem;
  return {p.v, 1, p.fp8.scale_d_v, AmaxAt(context, 3)};
}

// Row j, which lies in its buffer as row j of `like` does in the inputs.
void StoreGradientRow(const BackwardContext& context, const Gradient& gradient,
                      const HeadRows& like, int64_t j, const float* values) {
  if (gradient.amax != nullptr) {
    RaiseAmax(gradient.amax, LargestOf(values, like.cols) * gradient.factor);
  }
  const float factor = gradient.factor * gradient.scale;
  const auto buffer = static_cast<size_t>(gradient.view.buffer);
  std::byte* to = context.buffers.grads[buffer] + (like.base - context.buffers.inputs[buffer]) +
                  j * like.seq_stride * SizeOf(like.dtype);
  if (like.dim_stride == 1) {
    FromScaledFloat(values, factor, like.cols, like.dtype, to);
    return;
  }
  for (int64_t c = 0; c < like.cols; ++c) {
    StoreElement(like.dtype, to, c * like.dim_stride, values[c] * factor);
  }
}

// All rows of sequence i that query heads first_head .. first_head + num_heads - 1 have.
Tile WholeTile(const AttentionProblem& p, int64_t i, int64_t first_head, int64_t num_heads) {
  Tile tile;
  tile.sequence = i;
  tile.kv_head = first_head / (p.num_heads / p.num_kv_heads);
  tile.first_head = first_head;
  tile.num_heads = num_heads;
  tile.num_rows = p.sequences[static_cast<size_t>(i)].q_len;
  return tile;
}

// The tile's keys within `keys`, kTileKeys at a time: calls fn(keys) for each piece.
template <typename Fn>
void ForEachKeyTile(const KeyRange& keys, const Fn& fn) {
  for (int64_t first = keys.first; first < keys.last; first += kTileKeys) {
    fn(KeyRange{first, std::min(keys.last, first + kTileKeys)});
  }
}

absl::Status StoreQueryGradients(const BackwardContext& context, const Tile& tile,
                                 const GradientScratch& s) {
  const AttentionProblem& p = context.problem;
  const int64_t d_qk = RoundUp(p.head_dim_qk, kLaneGroup);
  const Gradient gradient = QueryGradient(context);
  for (int64_t r = 0; r < tile.rows(); ++r) {
    const SequenceHead at = {tile.sequence, tile.HeadOf(r)};
    if (!IsEmpty(s.visible[r]) && !s.is_exact[r]) {
      const float sink = SinkOf(p, context.buffers.softmax_offset, at.head);
      const float sum = s.sum[r] + std::exp(sink - s.shift[r]) * s.inverse_sum[r];
      // A sum that is NaN beside an LSE that is not has it from the inputs.
      if (std::abs(sum - 1) > 1e-2f || std::isnan(s.shift[r])) {
        ATTND_RETURN_IF_ERROR(CheckNotCancelled(context));
        ATTND_RETURN_IF_ERROR(CheckLse(context, at, tile.QueryOf(r)));
      }
    }
    StoreGradientRow(context, gradient, QueryRows(p, context.inputs, at.sequence, at.head),
                     tile.QueryOf(r), s.dq + r * d_qk);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ComputeKeyGradients(const BackwardContext& context, const KeyBlock& block,
                                 const GradientScratch& s) {
  const AttentionProblem& p = context.problem;
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t d_qk = RoundUp(p.head_dim_qk, kLaneGroup), d_v = RoundUp(p.head_dim_v, kLaneGroup);
  const int64_t count = block.keys.last - block.keys.first;
  std::fill_n(s.dk, (count + kProductStep) * d_qk, 0.0f);
  std::fill_n(s.dv, (count + kProductStep) * d_v, 0.0f);

  const Tile tile = WholeTile(p, block.sequence, block.kv_head * group, group);
  GradientTile gradient(context, tile, s);
  gradient.ReadKeys(block.keys);
  for (int64_t number = 0; number < gradient.num_panels(); ++number) {
    const GradientPanel panel = gradient.OpenPanel(number, 0);
    if (IsEmpty(Intersect(panel.seen_by_any, block.keys))) continue;
    ATTND_RETURN_IF_ERROR(CheckNotCancelled(context));
    gradient.ReadPanel(panel);
    ForEachKeyTile(block.keys, [&](const KeyRange& keys) {
      const KeyRange computed = gradient.ComputeBlock(panel, keys, /*through_cap=*/true);
      if (context.buffers.amax != nullptr) {
        RaiseAmax(context.buffers.amax,
                  LargestOf(s.d_logits, (computed.last - computed.first) * kPanelRows) *
                      static_cast<float>(p.scale));
      }
      if (!IsEmpty(computed)) gradient.AddToKeyGradients(panel, computed);
    });
  }
  const Gradient dk = KeyGradient(context), dv = ValueGradient(context);
  const HeadRows k = KeyRows(p, context.inputs, block.sequence, block.kv_head);
  const HeadRows v = ValueRows(p, context.inputs, block.sequence, block.kv_head);
  for (int64_t j = 0; j < count; ++j) {
    StoreGradientRow(context, dk, k, block.keys.first + j, s.dk + j * d_qk);
    StoreGradientRow(context, dv, v, block.keys.first + j, s.dv + j * d_v);
  }
  return absl::OkStatus();
}

absl::Status ComputeQueryGradients(const BackwardContext& context, const Tile& tile,
                                   const GradientScratch& s) {
  const int64_t d_qk = RoundUp(context.problem.head_dim_qk, kLaneGroup);
  GradientTile gradient(context, tile, s);
  const int64_t panels = gradient.num_panels();
  std::fill_n(s.dq, panels * kPanelRows * d_qk, 0.0f);
  std::fill_n(s.sum, panels * kPanelRows, 0.0f);
  KeyRange all;
  for (int64_t number = 0; number < panels; ++number) {
    const GradientPanel panel = gradient.OpenPanel(number, number);
    all = Span(all, panel.seen_by_any);
    if (!IsEmpty(panel.seen_by_any)) gradient.ReadPanel(panel);
  }
  absl::Status status;
  ForEachKeyTile(all, [&](const KeyRange& keys) {
    status.Update(CheckNotCancelled(context));
    if (!status.ok()) return;
    gradient.ReadKeys(keys);
    for (int64_t number = 0; number < panels; ++number) {
      const GradientPanel panel = gradient.OpenPanel(number, number);
      const KeyRange computed = gradient.ComputeBlock(panel, keys, /*through_cap=*/true);
      if (!IsEmpty(computed)) gradient.AddToQueryGradient(panel, computed);
    }
  });
  ATTND_RETURN_IF_ERROR(status);
  return StoreQueryGradients(context, tile, s);
}

namespace {

// Adds to s.d_bias what one head of one sequence gives, where its rows and keys are in the block.
absl::Status AddBiasOfHead(const BackwardContext& context, const BiasBlock& block,
                           const SequenceHead& at, const GradientScratch& s) {
  const AttentionProblem& p = context.problem;
  const SequenceExtent& extent = p.sequences[static_cast<size_t>(at.sequence)];
  const KeyRange keys = Intersect(block.keys, {0, extent.kv_len});
  const int64_t last_row = std::min(extent.q_len, block.first_row + block.num_rows);
  if (IsEmpty(keys)) return absl::OkStatus();
  const bool has_rows = p.bias_strides.seq != 0;
  const bool through_cap = p.bias_kind == BiasKind::kPreScale;
  for (int64_t first = block.first_row; first < last_row; first += kTileRows) {
    ATTND_RETURN_IF_ERROR(CheckNotCancelled(context));
    Tile tile = WholeTile(p, at.sequence, at.head, 1);
    tile.first_row = first;
    tile.num_rows = std::min(kTileRows, last_row - first);
    GradientTile gradient(context, tile, s);
    gradient.ReadKeys(keys);
    for (int64_t number = 0; number < gradient.num_panels(); ++number) {
      const GradientPanel panel = gradient.OpenPanel(number, 0);
      if (IsEmpty(Intersect(panel.seen_by_any, keys))) continue;
      gradient.ReadPanel(panel);
      const KeyRange computed = gradient.ComputeBlock(panel, keys, through_cap);
      if (IsEmpty(computed)) continue;
      const int64_t start = (has_rows ? number * kTileKeys : 0) + computed.first - keys.first;
      AddFloats(s.d_logits, (computed.last - computed.first) * kPanelRows,
                s.d_bias + start * kPanelRows);
    }
  }
  return absl::OkStatus();
}

// From s.d_bias to the block's rows of dBias; without rows of its own, the lanes are summed.
void StoreBiasGradients(const BackwardContext& context, const BiasBlock& block,
                        const GradientScratch& s) {
  const AttentionProblem& p = context.problem;
  const Strides& strides = p.bias_strides;
  const int64_t count = block.keys.last - block.keys.first;
  const int64_t num_rows = strides.seq == 0 ? 1 : block.num_rows;
  const float factor = p.bias_kind == BiasKind::kPreScale ? static_cast<float>(p.scale) : 1;
  for (int64_t first = 0; first < num_rows; first += kPanelRows) {
    const int64_t rows = std::min(kPanelRows, num_rows - first);
    FromPanel(s.d_bias + first * kTileKeys, strides.seq == 0 ? kPanelRows : rows, count,
              s.terms.rows, kTileKeys);
    if (strides.seq == 0) {
      for (int64_t lane = 1; lane < kPanelRows; ++lane) {
        AddFloats(s.terms.rows + lane * kTileKeys, count, s.terms.rows);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t element = block.sequence * strides.batch + block.head * strides.head +
                              (block.first_row + first + r) * strides.seq + block.keys.first;
      FromScaledFloat(s.terms.rows + r * kTileKeys, factor, count, p.dtype,
                      context.buffers.d_bias + element * SizeOf(p.dtype));
    }
  }
}

}  // namespace

absl::Status ComputeBiasGradients(const BackwardContext& context, const BiasBlock& block,
                                  const GradientScratch& s) {
  const AttentionProblem& p = context.problem;
  const int64_t rows = p.bias_strides.seq == 0 ? 1 : block.num_rows;
  std::fill_n(s.d_bias, NumPanels(rows) * kTileKeys * kPanelRows, 0.0f);
  const bool all_sequences = p.bias->shape[0] == 1, all_heads = p.bias->shape[1] == 1;
  for (int64_t i = 0; i < p.batch; ++i) {
    if (!all_sequences && i != block.sequence) continue;
    for (int64_t n = 0; n < p.num_heads; ++n) {
      if (!all_heads && n != block.head) continue;
      ATTND_RETURN_IF_ERROR(AddBiasOfHead(context, block, {i, n}, s));
    }
  }
  StoreBiasGradients(context, block, s);
  return absl::OkStatus();
}

void ComputeSinkGradient(const BackwardContext& context, int64_t n) {
  const AttentionProblem& p = context.problem;
  const double sink = context.buffers.softmax_offset[n];
  double sum = 0;
  for (int64_t i = 0; i < p.batch; ++i) {
    const SequenceExtent& extent = p.sequences[static_cast<size_t>(i)];
    for (int64_t row = 0; row < extent.q_len; ++row) {
      const int64_t element = LseElement(p, {i, n}, row);
      const KeyRange keys = p.mask.VisibleKeys(row, extent.q_len, extent.kv_len);
      const RowStatistics& statistics = context.rows[element];
      if (IsEmpty(keys) || statistics.shift == -kInfinity) continue;
      const double weight =
          std::exp(sink - statistics.shift) * static_cast<double>(statistics.inverse_sum);
      sum -= weight * statistics.d;
    }
  }
  context.buffers.d_softmax_offset[n] = static_cast<float>(sum);
}

}  // namespace attnd
