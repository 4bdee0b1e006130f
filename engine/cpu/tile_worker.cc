#include "engine/cpu/tile_worker.h"

#include <dnnl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "engine/core/status.h"
#include "engine/cpu/head_rows.h"
#include "engine/cpu/reference_attention.h"
#include "engine/cpu/row_kernels.h"
#include "engine/cpu/softmax_kernels.h"

namespace attnd {
namespace {

// Rows of one product where the mask cuts through a block, so that little is computed in vain.
constexpr int64_t kMaskedBlockRows = 64;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

absl::Status CheckGemm(dnnl_status_t status) {
  if (status == dnnl_success) return absl::OkStatus();
  if (status == dnnl_out_of_memory) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kPoolExhausted, "",
                     "oneDNN found no memory for a matrix product");
  }
  return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                   "oneDNN refused a matrix product");
}

// Rows of query heads of one tile: state [rows, ...] is head by head.
struct RowState {
  float* acc;  // [rows, d_v]
  float* m;    // [rows]
  float* l;    // [rows]
};

RowState PartialState(const Tile& tile, int64_t chunk, int64_t d_v) {
  float* acc = tile.partials + chunk * tile.partial_stride;
  float* m = acc + tile.num_heads * tile.num_rows * d_v;
  return {acc, m, m + tile.num_heads * tile.num_rows};
}

// What float32 could not hold: a result that is not finite, or no maximum although keys are
// visible.
bool IsSuspicious(const TileContext& context, const Tile& tile, const RowState& state, int64_t r) {
  const AttentionProblem& p = context.problem;
  if (state.m[r] == -kInfinity) {
    const SequenceExtent& extent = p.sequences[static_cast<size_t>(tile.sequence)];
    const KeyRange keys =
        p.mask.VisibleKeys(tile.first_row + r % tile.num_rows, extent.q_len, extent.kv_len);
    return keys.first != keys.last;
  }
  return !std::isfinite(state.m[r]) || !std::isfinite(state.l[r]) ||
         !AllFinite(state.acc + r * p.head_dim_v, p.head_dim_v);
}

// Finite inputs can have products past float32: such rows are computed again in double. Inputs that
// are not finite themselves make results that are not, and stay.
void RepairRows(const TileContext& context, const Tile& tile, const RowState& state) {
  const AttentionProblem& p = context.problem;
  const ForwardBuffers& b = context.buffers;
  std::optional<bool> keys_are_finite;
  for (int64_t r = 0; r < tile.num_heads * tile.num_rows; ++r) {
    if (!IsSuspicious(context, tile, state, r)) continue;
    if (!keys_are_finite) {
      const int64_t keys = p.sequences[static_cast<size_t>(tile.sequence)].kv_len;
      keys_are_finite = AllRowsFinite(KeyRows(p, b, tile.sequence, tile.kv_head), 0, keys) &&
                        AllRowsFinite(ValueRows(p, b, tile.sequence, tile.kv_head), 0, keys);
    }
    const int64_t n = tile.first_head + r / tile.num_rows;
    const int64_t row = tile.first_row + r % tile.num_rows;
    if (!*keys_are_finite || !AllRowsFinite(QueryRows(p, b, tile.sequence, n), row, 1)) continue;
    ReferenceForwardRow(p, b, tile.sequence, n, row);
  }
}

void WriteRows(const TileContext& context, const Tile& tile, const RowState& state) {
  const AttentionProblem& p = context.problem;
  const int64_t first_row =
      tile.first_row + (p.q_is_thd ? p.sequences[static_cast<size_t>(tile.sequence)].q_row : 0);
  const int64_t sequence = p.q_is_thd ? 0 : tile.sequence;
  const Strides& os = p.out.strides;
  for (int64_t r = 0; r < tile.num_heads * tile.num_rows; ++r) {
    const int64_t n = tile.first_head + r / tile.num_rows;
    const int64_t row = first_row + r % tile.num_rows;
    const bool is_empty = state.m[r] == -kInfinity;  // Then acc may hold 0 * NaN.
    float* o = state.acc + r * p.head_dim_v;
    if (is_empty) std::fill(o, o + p.head_dim_v, 0.0f);
    const float factor = is_empty ? 0.0f : 1.0f / state.l[r];
    std::byte* out = context.buffers.out + p.out.byte_offset +
                     (sequence * os.batch + row * os.seq + n * os.head) * SizeOf(p.out_dtype);
    if (os.dim == 1) {
      FromScaledFloat(o, factor, p.head_dim_v, p.out_dtype, out);
    } else {
      for (int64_t c = 0; c < p.head_dim_v; ++c) {
        StoreElement(p.out_dtype, out, c * os.dim, o[c] * factor);
      }
    }
    if (context.buffers.lse == nullptr) continue;
    context.buffers.lse[sequence * p.lse.batch + row * p.lse.seq + n * p.lse.head] =
        is_empty ? -kInfinity : state.m[r] + std::log(state.l[r]);
  }
  RepairRows(context, tile, state);
}

// A cap that float32 holds: one below its range leaves nothing of any logit, one above it all. 0:
// none.
float FloatSoftcap(const std::optional<double>& cap) {
  if (!cap || *cap > std::numeric_limits<float>::max()) return 0;
  return std::max(static_cast<float>(*cap), std::numeric_limits<float>::min());
}

class TileComputation {
 public:
  TileComputation(const TileContext& context, const Tile& tile, const TileScratch& scratch)
      : p_(context.problem),
        context_(context),
        tile_(tile),
        scratch_(scratch),
        extent_(p_.sequences[static_cast<size_t>(tile.sequence)]),
        rows_(tile.num_heads * tile.num_rows) {
    state_ = tile.partials == nullptr ? RowState{scratch.acc, scratch.m, scratch.l}
                                      : PartialState(tile, tile.chunk, p_.head_dim_v);
  }

  absl::Status Run() {
    std::fill(state_.acc, state_.acc + rows_ * p_.head_dim_v, 0.0f);
    std::fill(state_.m, state_.m + rows_, -kInfinity);
    std::fill(state_.l, state_.l + rows_, 0.0f);
    const KeyRange keys = ChunkKeys(FindVisibleKeys());
    if (keys.first < keys.last) {
      ReadQueries();
      const HeadRows k = KeyRows(p_, context_.buffers, tile_.sequence, tile_.kv_head);
      const HeadRows v = ValueRows(p_, context_.buffers, tile_.sequence, tile_.kv_head);
      for (int64_t first = keys.first; first < keys.last; first += kTileKeys) {
        const CancellationToken* cancellation = context_.buffers.cancellation;
        if (cancellation != nullptr && cancellation->IsCancelled()) {
          return absl::CancelledError("cancelled while it was computed");
        }
        const int64_t last = std::min(keys.last, first + kTileKeys);
        keys_ = {first, last};
        k_ = ReadRows(k, first, last - first, scratch_.k);
        v_ = ReadRows(v, first, last - first, scratch_.v);
        v_is_finite_.reset();
        for (int64_t row = 0; row < rows_; row += kBlockRows) {
          ATTND_RETURN_IF_ERROR(AddKeysToBlock(row, std::min(rows_, row + kBlockRows)));
        }
      }
    }
    if (tile_.partials == nullptr) WriteRows(context_, tile_, state_);
    return absl::OkStatus();
  }

 private:
  // Fills scratch_.visible and returns the keys that some row sees, or an empty range.
  KeyRange FindVisibleKeys() {
    for (int64_t r = 0; r < rows_; ++r) {
      scratch_.visible[r] =
          p_.mask.VisibleKeys(tile_.first_row + r % tile_.num_rows, extent_.q_len, extent_.kv_len);
    }
    return UnionOfRows(0, rows_);
  }

  KeyRange UnionOfRows(int64_t first_row, int64_t last_row) const {
    KeyRange all = {std::numeric_limits<int64_t>::max(), 0};
    for (int64_t r = first_row; r < last_row; ++r) {
      const KeyRange& keys = scratch_.visible[r];
      if (keys.first == keys.last) continue;
      all.first = std::min(all.first, keys.first);
      all.last = std::max(all.last, keys.last);
    }
    return all.last == 0 ? KeyRange{} : all;
  }

  KeyRange ChunkKeys(KeyRange all) const {
    const int64_t size = (all.last - all.first + tile_.num_chunks - 1) / tile_.num_chunks;
    const int64_t first = std::min(all.last, all.first + tile_.chunk * size);
    return {first, std::min(all.last, first + size)};
  }

  void ReadQueries() {
    HeadRows rows = QueryRows(p_, context_.buffers, tile_.sequence, tile_.first_head);
    if (tile_.num_heads == 1) {
      q_ = ReadRows(rows, tile_.first_row, tile_.num_rows, scratch_.q);
      return;
    }
    for (int64_t n = 0; n < tile_.num_heads; ++n) {
      rows = QueryRows(p_, context_.buffers, tile_.sequence, tile_.first_head + n);
      GatherRows(rows, tile_.first_row, tile_.num_rows,
                 scratch_.q + n * tile_.num_rows * p_.head_dim_qk);
    }
    q_ = {scratch_.q, p_.head_dim_qk};
  }

  // Rows first_row .. last_row - 1 of the tile against keys_, in smaller pieces where some see less
  // than others.
  absl::Status AddKeysToBlock(int64_t first_row, int64_t last_row) {
    KeyRange keys = UnionOfRows(first_row, last_row);
    keys = {std::max(keys.first, keys_.first), std::min(keys.last, keys_.last)};
    if (keys.first >= keys.last) return absl::OkStatus();

    if (last_row - first_row > kMaskedBlockRows && IsMasked(first_row, last_row, keys)) {
      for (int64_t row = first_row; row < last_row; row += kMaskedBlockRows) {
        ATTND_RETURN_IF_ERROR(AddKeysToBlock(row, std::min(last_row, row + kMaskedBlockRows)));
      }
      return absl::OkStatus();
    }
    return MultiplyBlock(first_row, last_row, keys);
  }

  absl::Status MultiplyBlock(int64_t first_row, int64_t last_row, KeyRange keys) {
    SoftmaxBlock block;
    block.rows = last_row - first_row;
    block.keys = keys.last - keys.first;
    block.first_key = keys.first;
    block.visible = scratch_.visible + first_row;
    block.scale = static_cast<float>(p_.scale);
    block.softcap = FloatSoftcap(p_.logit_softcap);
    block.logits = scratch_.logits;
    block.ld = block.keys;
    block.m = state_.m + first_row;
    block.l = state_.l + first_row;
    block.acc = state_.acc + first_row * p_.head_dim_v;
    block.d_v = p_.head_dim_v;
    const float* k = k_.data + (keys.first - keys_.first) * k_.ld;
    ATTND_RETURN_IF_ERROR(CheckGemm(dnnl_sgemm('N', 'T', block.rows, block.keys, p_.head_dim_qk,
                                               1.0f, q_.data + first_row * q_.ld, q_.ld, k, k_.ld,
                                               0.0f, block.logits, block.ld)));
    OnlineSoftmax(block);
    return AddValues(block, IsMasked(first_row, last_row, keys));
  }

  // acc += P V. A masked key has P = 0, and 0 * NaN would be NaN: where some row does not see some
  // key and V is not all finite, only visible keys are touched.
  absl::Status AddValues(const SoftmaxBlock& block, bool is_masked) {
    const float* v = v_.data + (block.first_key - keys_.first) * v_.ld;
    if (is_masked && !VIsFinite()) {
      AddVisibleValues(block, v);
      return absl::OkStatus();
    }
    return CheckGemm(dnnl_sgemm('N', 'N', block.rows, p_.head_dim_v, block.keys, 1.0f, block.logits,
                                block.ld, v, v_.ld, 1.0f, block.acc, p_.head_dim_v));
  }

  // Whether one of the rows does not see all of `keys`.
  bool IsMasked(int64_t first_row, int64_t last_row, KeyRange keys) const {
    return std::any_of(scratch_.visible + first_row, scratch_.visible + last_row,
                       [&](const KeyRange& visible) {
                         return visible.first > keys.first || visible.last < keys.last;
                       });
  }

  // Of all the keys at hand; looked at once, and only where it matters.
  bool VIsFinite() {
    if (!v_is_finite_) {
      v_is_finite_ = true;
      for (int64_t j = 0; j < keys_.last - keys_.first && *v_is_finite_; ++j) {
        v_is_finite_ = AllFinite(v_.data + j * v_.ld, p_.head_dim_v);
      }
    }
    return *v_is_finite_;
  }

  void AddVisibleValues(const SoftmaxBlock& block, const float* v) const {
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t first = std::max<int64_t>(0, block.visible[r].first - block.first_key);
      const int64_t last = std::min(block.keys, block.visible[r].last - block.first_key);
      for (int64_t j = first; j < last; ++j) {
        const float probability = block.logits[r * block.ld + j];
        for (int64_t c = 0; c < p_.head_dim_v; ++c) {
          block.acc[r * p_.head_dim_v + c] += probability * v[j * v_.ld + c];
        }
      }
    }
  }

  const AttentionProblem& p_;
  const TileContext& context_;
  const Tile& tile_;
  const TileScratch& scratch_;
  const SequenceExtent& extent_;
  const int64_t rows_;
  RowState state_;
  FloatMatrix q_;  // [rows_, d_qk]
  KeyRange keys_;  // Of the key tile at hand:
  FloatMatrix k_;  // [keys, d_qk]
  FloatMatrix v_;  // [keys, d_v]
  std::optional<bool> v_is_finite_;
};

}  // namespace

absl::Status ComputeTile(const TileContext& context, const Tile& tile, const TileScratch& scratch) {
  return TileComputation(context, tile, scratch).Run();
}

void MergeChunks(const TileContext& context, const Tile& tile) {
  const int64_t d_v = context.problem.head_dim_v;
  const RowState sum = PartialState(tile, 0, d_v);
  for (int64_t chunk = 1; chunk < tile.num_chunks; ++chunk) {
    const RowState part = PartialState(tile, chunk, d_v);
    for (int64_t r = 0; r < tile.num_heads * tile.num_rows; ++r) {
      if (part.m[r] == -kInfinity) continue;
      if (sum.m[r] == -kInfinity) {
        std::copy_n(part.acc + r * d_v, d_v, sum.acc + r * d_v);
        sum.m[r] = part.m[r];
        sum.l[r] = part.l[r];
        continue;
      }
      const float m = std::max(sum.m[r], part.m[r]);
      const float keep = std::exp(sum.m[r] - m);
      const float add = std::exp(part.m[r] - m);
      for (int64_t c = r * d_v; c < (r + 1) * d_v; ++c) {
        sum.acc[c] = sum.acc[c] * keep + part.acc[c] * add;
      }
      sum.l[r] = sum.l[r] * keep + part.l[r] * add;
      sum.m[r] = m;
    }
  }
  WriteRows(context, tile, sum);
}

void ClearRows(const TileContext& context, const UnownedRows& rows) {
  const AttentionProblem& p = context.problem;
  const Strides& os = p.out.strides;
  const int64_t size = SizeOf(p.out_dtype);
  for (int64_t row = rows.first_row; row < rows.first_row + rows.num_rows; ++row) {
    for (int64_t n = 0; n < p.num_heads; ++n) {
      std::byte* out = context.buffers.out + p.out.byte_offset +
                       (rows.sequence * os.batch + row * os.seq + n * os.head) * size;
      for (int64_t c = 0; c < p.head_dim_v; ++c) StoreElement(p.out_dtype, out, c * os.dim, 0.0f);
      if (context.buffers.lse == nullptr) continue;
      context.buffers.lse[rows.sequence * p.lse.batch + row * p.lse.seq + n * p.lse.head] =
          -kInfinity;
    }
  }
}

}  // namespace attnd
