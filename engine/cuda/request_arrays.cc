#include "engine/cuda/request_arrays.h"

#include <algorithm>

namespace attnd {
namespace {

constexpr int64_t kAlignment = 16;

template <typename T>
T* ArrayAt(std::span<std::byte> block, int64_t offset) {
  return reinterpret_cast<T*>(block.data() + offset);
}

// Query rows of a sequence that see a key: first <= i < last. Rows go empty at the ends only, since
// the band moves one key a row.
KeyRange RowsThatSeeKeys(const BandMask& mask, const SequenceExtent& s) {
  KeyRange rows = {0, s.q_len};
  if (s.kv_len == 0) return {0, 0};
  const int64_t shift = mask.bottom_right ? s.kv_len - s.q_len : 0;
  // Row i sees no key if i + shift + right < 0, or if i + shift - left >= kv_len.
  if (mask.right && *mask.right < s.q_len) {
    rows.first = std::max<int64_t>(0, -(shift + *mask.right));
  }
  if (mask.left && *mask.left < s.q_len + s.kv_len) {
    rows.last = std::min(s.q_len, s.kv_len + *mask.left - shift);
  }
  return rows.first < rows.last ? rows : KeyRange{0, 0};
}

class SpanWriter {
 public:
  SpanWriter(const AttentionProblem& problem, RowSpan* spans, RequestArrays& result)
      : p_(problem), spans_(spans), result_(result) {}

  // Rows first .. last - 1 of sequence i, or of the token buffer where Q is THD.
  void Add(int64_t i, int64_t first, int64_t last, bool in_sequence) {
    if (first >= last) return;
    spans_[result_.num_spans++] = {i * p_.out.strides.batch + first * p_.out.strides.seq,
                                   i * p_.lse.batch + first * p_.lse.seq, last - first,
                                   in_sequence ? 1 : 0};
    result_.longest_span = std::max(result_.longest_span, last - first);
  }

 private:
  const AttentionProblem& p_;
  RowSpan* spans_;
  RequestArrays& result_;
};

void FillSpans(const AttentionProblem& p, RowSpan* spans, RequestArrays& result) {
  SpanWriter writer(p, spans, result);
  int64_t next_row = 0;  // THD: first row that no sequence so far covers.
  for (int64_t i = 0; i < p.batch; ++i) {
    const SequenceExtent& s = p.sequences[i];
    const KeyRange rows = RowsThatSeeKeys(p.mask, s);
    result.any_pair |= rows.first < rows.last;
    const int64_t start = p.q_is_thd ? s.q_row : 0;
    const int64_t place = p.q_is_thd ? 0 : i;
    if (p.q_is_thd && s.q_len > 0) {
      writer.Add(place, next_row, start, false);
      next_row = start + s.q_len;
    }
    writer.Add(place, start, start + rows.first, true);
    writer.Add(place, start + rows.last, start + s.q_len, true);
    if (!p.q_is_thd) writer.Add(place, s.q_len, p.max_seqlen_q, false);
  }
  if (p.q_is_thd) writer.Add(0, next_row, p.lse_desc.shape[0], false);
}

struct Slot {
  int64_t q_len = 0, kv_len = 0;
  int64_t skipped = 0;  // Query rows in front.
};

// How the graph is told of a sequence.
Slot SlotOf(const AttentionProblem& p, const SdpaDescription& d, const SequenceExtent& s) {
  const KeyRange rows = RowsThatSeeKeys(p.mask, s);
  if (rows.first == rows.last) return {};
  if (!d.ragged_q) return {s.q_len, s.kv_len, 0};
  // Rows cut off in front move a bottom-right diagonal by as much, and a top-left one has no rows
  // without keys there. Rows cut off behind would move a bottom-right diagonal.
  return {(p.mask.bottom_right ? s.q_len : rows.last) - rows.first, s.kv_len, rows.first};
}

int64_t StartOf(const TensorView& view, int64_t i, int64_t row) {
  return i * view.strides.batch + row * view.start_multiplier;
}

// One of the description's sequences: sequence i of the problem, or query head `head` of it where
// the description splits heads.
struct Place {
  int64_t i;
  int64_t head;
  const SequenceExtent& extent;
  Slot slot;
};

// Writes the arrays of lengths and offsets.
class ArrayWriter {
 public:
  ArrayWriter(const AttentionProblem& problem, const SdpaDescription& description,
              std::span<std::byte> block)
      : p_(problem),
        d_(description),
        block_(block),
        heads_(d_.splits_heads ? p_.num_heads : 1),
        slots_(d_.batch * PartsOf(d_, p_).batch) {}

  // `length_of` gives a Place's.
  template <typename LengthOf>
  void Lengths(int64_t at, LengthOf length_of) {
    int32_t* lengths = ArrayAt<int32_t>(block_, at);
    ForEach([&](int64_t n, const Place& place) {
      lengths[n] = static_cast<int32_t>(length_of(place));
    });
    std::fill(lengths + p_.batch * heads_, lengths + slots_, 0);
  }

  // `range_of` gives a Place's first element and elements.
  template <typename RangeOf>
  void Offsets(int64_t at, RangeOf range_of) {
    int64_t* offsets = ArrayAt<int64_t>(block_, at);
    int64_t end = 0;
    ForEach([&](int64_t n, const Place& place) {
      const auto [start, length] = range_of(place);
      offsets[n] = start;
      end = start + length;
    });
    std::fill(offsets + p_.batch * heads_, offsets + slots_ + 1, end);
  }

 private:
  template <typename Visit>
  void ForEach(Visit visit) {
    for (int64_t i = 0; i < p_.batch; ++i) {
      const SequenceExtent& extent = p_.sequences[i];
      const Slot slot = SlotOf(p_, d_, extent);
      for (int64_t head = 0; head < heads_; ++head) {
        visit(i * heads_ + head, Place{i, head, extent, slot});
      }
    }
  }

  const AttentionProblem& p_;
  const SdpaDescription& d_;
  const std::span<std::byte> block_;
  const int64_t heads_;
  const int64_t slots_;
};

}  // namespace

RequestArrayLayout LayOutRequestArrays(const SdpaDescription& d, const AttentionProblem& p) {
  RequestArrayLayout layout;
  auto take = [&](int64_t bytes) {
    const int64_t at = layout.bytes;
    layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  const int64_t slots = d.batch * PartsOf(d, p).batch;
  const int64_t offsets = (slots + 1) * static_cast<int64_t>(sizeof(int64_t));
  const int64_t lens = slots * static_cast<int64_t>(sizeof(int32_t));
  if (d.ragged_q) {
    layout.q_offsets = take(offsets);
    layout.out_offsets = take(offsets);
    layout.lse_offsets = take(offsets);
  }
  if (d.ragged_kv) {
    layout.k_offsets = take(offsets);
    layout.v_offsets = take(offsets);
  }
  if (d.has_lengths) {
    layout.q_lens = take(lens);
    layout.kv_lens = take(lens);
  }
  if (IsFloat8(d.dtype)) {
    layout.fp8_scales = take(static_cast<int64_t>(kFp8ScaleFields.size()) * kFp8Slot *
                             static_cast<int64_t>(sizeof(float)));
  }
  layout.spans = take((3 * p.batch + 1) * static_cast<int64_t>(sizeof(RowSpan)));
  return layout;
}

RequestArrays FillRequestArrays(const AttentionProblem& p, const SdpaDescription& d,
                                std::span<std::byte> block) {
  RequestArrays result;
  const RequestArrayLayout layout = LayOutRequestArrays(d, p);
  FillSpans(p, ArrayAt<RowSpan>(block, layout.spans), result);
  if (IsFloat8(d.dtype)) {
    float* scales = ArrayAt<float>(block, layout.fp8_scales);
    for (size_t i = 0; i < kFp8ScaleFields.size(); ++i) {
      scales[i * kFp8Slot] = p.fp8.*kFp8ScaleFields[i].member;
    }
  }
  if (!d.has_lengths) return result;

  ArrayWriter writer(p, d, block);
  writer.Lengths(layout.q_lens, [](const Place& place) { return place.slot.q_len; });
  writer.Lengths(layout.kv_lens, [](const Place& place) { return place.slot.kv_len; });
  using Range = std::pair<int64_t, int64_t>;
  if (d.ragged_q) {
    auto q_like = [](const TensorView& view) {
      return [&view](const Place& x) {
        return Range(StartOf(view, x.i, x.extent.q_row) + view.HeadStart(x.head) +
                         x.slot.skipped * view.strides.seq,
                     x.slot.q_len * view.strides.seq);
      };
    };
    writer.Offsets(layout.q_offsets, q_like(p.q));
    writer.Offsets(layout.out_offsets, q_like(p.out));
    writer.Offsets(layout.lse_offsets, [&](const Place& x) {
      const int64_t row =
          p.q_is_thd ? x.extent.q_row
                     : (x.i * (d.splits_heads ? p.num_heads : 1) + x.head) * p.max_seqlen_q;
      return Range((row + x.slot.skipped) * d.lse.seq, x.slot.q_len * d.lse.seq);
    });
  }
  if (d.ragged_kv) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    auto kv_like = [group](const TensorView& view) {
      return [&view, group](const Place& x) {
        return Range(StartOf(view, x.i, x.extent.kv_row) + x.head / group * view.strides.head,
                     x.slot.kv_len * view.strides.seq);
      };
    };
    writer.Offsets(layout.k_offsets, kv_like(p.k));
    writer.Offsets(layout.v_offsets, kv_like(p.v));
  }
  return result;
}

bool WritesAllGradients(const AttentionProblem& p) {
  int64_t in_buffers = 0;
  for (const std::optional<TensorDesc>& desc : p.inputs) {
    if (desc) in_buffers += *NumElements(desc->shape);
  }
  int64_t q_rows = 0, kv_rows = 0;
  for (const SequenceExtent& s : p.sequences) {
    const KeyRange rows = RowsThatSeeKeys(p.mask, s);
    q_rows += rows.last - rows.first;
    // Keys in front of all that are seen may be in tiles that no query visits.
    const bool sees_the_first =
        rows.first < rows.last && p.mask.VisibleKeys(rows.first, s.q_len, s.kv_len).first == 0;
    if (sees_the_first) kv_rows += s.kv_len;
  }
  return q_rows * p.num_heads * p.head_dim_qk +
             kv_rows * p.num_kv_heads * (p.head_dim_qk + p.head_dim_v) ==
         in_buffers;
}

}  // namespace attnd
