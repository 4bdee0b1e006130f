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
  void Add(int64_t i, int64_t first, int64_t last) {
    if (first >= last) return;
    spans_[result_.num_spans++] = {i * p_.out.strides.batch + first * p_.out.strides.seq,
                                   i * p_.lse.batch + first * p_.lse.seq, last - first};
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
    if (!p.q_is_thd) {
      writer.Add(i, 0, rows.first);
      writer.Add(i, rows.last, p.max_seqlen_q);
      continue;
    }
    if (s.q_len == 0) continue;
    writer.Add(0, next_row, s.q_row + rows.first);
    writer.Add(0, s.q_row + rows.last, s.q_row + s.q_len);
    next_row = s.q_row + s.q_len;
  }
  if (p.q_is_thd) writer.Add(0, next_row, p.lse_desc.shape[0]);
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

}  // namespace

RequestArrayLayout LayOutRequestArrays(const SdpaDescription& d, int64_t batch) {
  RequestArrayLayout layout;
  auto take = [&](int64_t bytes) {
    const int64_t at = layout.bytes;
    layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  const int64_t offsets = (d.batch + 1) * static_cast<int64_t>(sizeof(int64_t));
  const int64_t lens = d.batch * static_cast<int64_t>(sizeof(int32_t));
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
  layout.spans = take((3 * batch + 1) * static_cast<int64_t>(sizeof(RowSpan)));
  return layout;
}

RequestArrays FillRequestArrays(const AttentionProblem& p, const SdpaDescription& d,
                                std::span<std::byte> block) {
  RequestArrays result;
  const RequestArrayLayout layout = LayOutRequestArrays(d, p.batch);
  FillSpans(p, ArrayAt<RowSpan>(block, layout.spans), result);
  if (!d.has_lengths) return result;

  int32_t* q_lens = ArrayAt<int32_t>(block, layout.q_lens);
  int32_t* kv_lens = ArrayAt<int32_t>(block, layout.kv_lens);
  std::fill_n(q_lens, d.batch, 0);
  std::fill_n(kv_lens, d.batch, 0);
  auto each = [&](int64_t at, auto start_and_length) {
    int64_t* offsets = ArrayAt<int64_t>(block, at);
    int64_t end = 0;
    for (int64_t i = 0; i < p.batch; ++i) {
      const SequenceExtent& s = p.sequences[i];
      const auto [start, length] = start_and_length(i, s, SlotOf(p, d, s));
      offsets[i] = start;
      end = start + length;
    }
    std::fill(offsets + p.batch, offsets + d.batch + 1, end);
  };
  using Range = std::pair<int64_t, int64_t>;
  for (int64_t i = 0; i < p.batch; ++i) {
    const Slot slot = SlotOf(p, d, p.sequences[i]);
    q_lens[i] = static_cast<int32_t>(slot.q_len);
    kv_lens[i] = static_cast<int32_t>(slot.kv_len);
  }
  if (d.ragged_q) {
    auto q_like = [](const TensorView& view) {
      return [&view](int64_t i, const SequenceExtent& s, const Slot& slot) {
        return Range(StartOf(view, i, s.q_row) + slot.skipped * view.strides.seq,
                     slot.q_len * view.strides.seq);
      };
    };
    each(layout.q_offsets, q_like(p.q));
    each(layout.out_offsets, q_like(p.out));
    each(layout.lse_offsets, [&](int64_t i, const SequenceExtent& s, const Slot& slot) {
      const int64_t row = p.q_is_thd ? s.q_row : i * p.max_seqlen_q;
      return Range((row + slot.skipped) * d.lse.seq, slot.q_len * d.lse.seq);
    });
  }
  if (d.ragged_kv) {
    auto kv_like = [](const TensorView& view) {
      return [&view](int64_t i, const SequenceExtent& s, const Slot& slot) {
        return Range(StartOf(view, i, s.kv_row), slot.kv_len * view.strides.seq);
      };
    };
    each(layout.k_offsets, kv_like(p.k));
    each(layout.v_offsets, kv_like(p.v));
  }
  return result;
}

}  // namespace attnd
