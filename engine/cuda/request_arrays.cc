#include "engine/cuda/request_arrays.h"

#include <algorithm>
#include <utility>
#include <vector>

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
  SpanWriter(const PlacedCall& call, RowSpan* spans, RequestArrays& result)
      : call_(call), p_(*call.problem), spans_(spans), result_(result) {}

  // Rows first .. last - 1 of sequence i, or of the token buffer where Q is THD.
  void Add(int64_t i, int64_t first, int64_t last, bool in_sequence) {
    if (first >= last) return;
    RowSpan span;
    span.out_start = call_.out + i * p_.out.strides.batch + first * p_.out.strides.seq;
    span.lse_start = call_.lse_output + i * p_.lse.batch + first * p_.lse.seq;
    span.rows = last - first;
    span.in_sequence = in_sequence ? 1 : 0;
    span.out_seq = p_.out.strides.seq;
    span.out_head = p_.out.strides.head;
    if (call_.has_lse) {
      span.lse_seq = p_.lse.seq;
      span.lse_head = p_.lse.head;
    }
    spans_[result_.num_spans++] = span;
    result_.longest_span = std::max(result_.longest_span, last - first);
  }

 private:
  const PlacedCall& call_;
  const AttentionProblem& p_;
  RowSpan* spans_;
  RequestArrays& result_;
};

void FillSpans(const PlacedCall& call, RowSpan* spans, RequestArrays& result) {
  const AttentionProblem& p = *call.problem;
  SpanWriter writer(call, spans, result);
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

void FillSegments(const PlacedCall& call, LseSegment* segments, RequestArrays& result) {
  const AttentionProblem& p = *call.problem;
  for (int64_t i = 0; i < p.batch; ++i) {
    const int64_t rows = p.sequences[i].q_len;
    if (rows == 0) continue;
    segments[result.num_segments++] = {.by_row = call.lse + i * p.max_seqlen_q * p.num_heads,
                                       .lse = call.lse_output + i * p.lse.batch,
                                       .rows = rows,
                                       .lse_seq = p.lse.seq,
                                       .lse_head = p.lse.head};
    result.longest_segment = std::max(result.longest_segment, rows);
  }
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

// One of the description's sequences: sequence i of a call, or query head `head` of it where the
// description splits heads.
struct Place {
  const PlacedCall& call;
  int64_t i;
  int64_t head;
  Slot slot;

  const AttentionProblem& problem() const { return *call.problem; }
  const SequenceExtent& extent() const { return problem().sequences[static_cast<size_t>(i)]; }
};

// Writes the arrays of lengths and offsets.
class ArrayWriter {
 public:
  ArrayWriter(std::span<const PlacedCall> calls, const SdpaDescription& d, int64_t slots,
              std::span<std::byte> block)
      : block_(block), slots_(slots) {
    places_.reserve(static_cast<size_t>(slots));
    for (const PlacedCall& call : calls) {
      const AttentionProblem& p = *call.problem;
      const int64_t heads = d.splits_heads ? p.num_heads : 1;
      for (int64_t i = 0; i < p.batch; ++i) {
        const Slot slot = SlotOf(p, d, p.sequences[static_cast<size_t>(i)]);
        for (int64_t head = 0; head < heads; ++head) places_.push_back({call, i, head, slot});
      }
    }
  }

  // `length_of` gives a Place's.
  template <typename LengthOf>
  void Lengths(int64_t at, LengthOf length_of) {
    int32_t* lengths = ArrayAt<int32_t>(block_, at);
    for (const Place& place : places_) *lengths++ = static_cast<int32_t>(length_of(place));
    std::fill_n(lengths, slots_ - static_cast<int64_t>(places_.size()), 0);
  }

  // `range_of` gives a Place's first element and elements.
  template <typename RangeOf>
  void Offsets(int64_t at, RangeOf range_of) {
    int64_t* offsets = ArrayAt<int64_t>(block_, at);
    int64_t end = 0;
    for (const Place& place : places_) {
      const auto [start, length] = range_of(place);
      *offsets++ = start;
      end = start + length;
    }
    std::fill_n(offsets, slots_ + 1 - static_cast<int64_t>(places_.size()), end);
  }

 private:
  const std::span<std::byte> block_;
  const int64_t slots_;
  std::vector<Place> places_;
};

using Range = std::pair<int64_t, int64_t>;
using ViewOf = TensorView AttentionProblem::*;
using ShiftOf = int64_t PlacedCall::*;

// Of tensors with rows of Q, and of K or V.
auto RowsOfQ(ViewOf view_of, ShiftOf shift_of) {
  return [=](const Place& x) {
    const TensorView& view = x.problem().*view_of;
    return Range(x.call.*shift_of + StartOf(view, x.i, x.extent().q_row) +
                     x.head * view.strides.head + x.slot.skipped * view.strides.seq,
                 x.slot.q_len * view.strides.seq);
  };
}
auto RowsOfKv(ViewOf view_of, ShiftOf shift_of) {
  return [=](const Place& x) {
    const TensorView& view = x.problem().*view_of;
    const int64_t group = x.problem().num_heads / x.problem().num_kv_heads;
    return Range(x.call.*shift_of + StartOf(view, x.i, x.extent().kv_row) +
                     x.head / group * view.strides.head,
                 x.slot.kv_len * view.strides.seq);
  };
}

RequestArrayLayout LayOut(const SdpaDescription& d, int64_t slots, int64_t sequences,
                          int64_t calls) {
  RequestArrayLayout layout;
  auto take = [&](int64_t bytes) {
    const int64_t at = layout.bytes;
    layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
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
  if (HasGradientOffsets(d)) {
    layout.d_out_offsets = take(offsets);
    layout.dq_offsets = take(offsets);
    layout.dk_offsets = take(offsets);
    layout.dv_offsets = take(offsets);
  }
  if (d.has_lengths) {
    layout.q_lens = take(lens);
    layout.kv_lens = take(lens);
  }
  if (IsFloat8(d.dtype)) {
    layout.fp8_scales = take(static_cast<int64_t>(kFp8ScaleFields.size()) * kFp8Slot *
                             static_cast<int64_t>(sizeof(float)));
  }
  layout.spans = take((3 * sequences + calls) * static_cast<int64_t>(sizeof(RowSpan)));
  if (d.ragged_q && !d.splits_heads) {
    layout.segments = take(sequences * static_cast<int64_t>(sizeof(LseSegment)));
  }
  return layout;
}

int64_t NumSlots(const SdpaDescription& d, const AttentionProblem& p) {
  return d.batch * PartsOf(d, p).batch;
}

RequestArrays Fill(std::span<const PlacedCall> calls, const SdpaDescription& d, int64_t slots,
                   const RequestArrayLayout& layout, std::span<std::byte> block) {
  RequestArrays result;
  for (const PlacedCall& call : calls) {
    FillSpans(call, ArrayAt<RowSpan>(block, layout.spans), result);
    if (call.has_lse && LseInScratch(*call.problem, d)) {
      FillSegments(call, ArrayAt<LseSegment>(block, layout.segments), result);
    }
  }
  if (!d.has_lengths) return result;

  ArrayWriter writer(calls, d, slots, block);
  writer.Lengths(layout.q_lens, [](const Place& place) { return place.slot.q_len; });
  writer.Lengths(layout.kv_lens, [](const Place& place) { return place.slot.kv_len; });
  using Problem = AttentionProblem;
  using Call = PlacedCall;
  if (d.ragged_q) {
    writer.Offsets(layout.q_offsets, RowsOfQ(&Problem::q, &Call::q));
    writer.Offsets(layout.out_offsets, RowsOfQ(&Problem::out, &Call::out));
    writer.Offsets(layout.lse_offsets, [&](const Place& x) {
      const Problem& p = x.problem();
      const int64_t row =
          p.q_is_thd ? x.extent().q_row
                     : (x.i * (d.splits_heads ? p.num_heads : 1) + x.head) * p.max_seqlen_q;
      return Range(x.call.lse + (row + x.slot.skipped) * d.lse.seq, x.slot.q_len * d.lse.seq);
    });
  }
  if (d.ragged_kv) {
    writer.Offsets(layout.k_offsets, RowsOfKv(&Problem::k, &Call::k));
    writer.Offsets(layout.v_offsets, RowsOfKv(&Problem::v, &Call::v));
  }
  if (HasGradientOffsets(d)) {
    writer.Offsets(layout.d_out_offsets, RowsOfQ(&Problem::out, &Call::d_out));
    writer.Offsets(layout.dq_offsets, RowsOfQ(&Problem::q, &Call::dq));
    writer.Offsets(layout.dk_offsets, RowsOfKv(&Problem::k, &Call::dk));
    writer.Offsets(layout.dv_offsets, RowsOfKv(&Problem::v, &Call::dv));
  }
  return result;
}

}  // namespace

bool LseInScratch(const AttentionProblem& p, const SdpaDescription& d) {
  return d.ragged_q && !d.splits_heads && !p.q_is_thd && p.max_seqlen_q != 1;
}

RequestArrayLayout LayOutRequestArrays(const SdpaDescription& d, const AttentionProblem& p) {
  return LayOut(d, NumSlots(d, p), p.batch, 1);
}

RequestArrayLayout LayOutRequestArrays(const SdpaDescription& d,
                                       std::span<const PlacedCall> calls) {
  int64_t sequences = 0;
  for (const PlacedCall& call : calls) sequences += call.problem->batch;
  return LayOut(d, d.batch, sequences, static_cast<int64_t>(calls.size()));
}

RequestArrays FillRequestArrays(const AttentionProblem& p, const SdpaDescription& d,
                                std::span<std::byte> block) {
  const RequestArrayLayout layout = LayOutRequestArrays(d, p);
  if (IsFloat8(d.dtype)) {
    float* scales = ArrayAt<float>(block, layout.fp8_scales);
    for (size_t i = 0; i < kFp8ScaleFields.size(); ++i) {
      scales[i * kFp8Slot] = p.fp8.*kFp8ScaleFields[i].member;
    }
  }
  const PlacedCall call{.problem = &p};
  return Fill({&call, 1}, d, NumSlots(d, p), layout, block);
}

RequestArrays FillRequestArrays(std::span<const PlacedCall> calls, const SdpaDescription& d,
                                std::span<std::byte> block) {
  return Fill(calls, d, d.batch, LayOutRequestArrays(d, calls), block);
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
