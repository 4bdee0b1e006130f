#include "engine/cuda/request_arrays.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/engine/cuda/problems.h"

namespace attnd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The block of a problem, read back.
struct Filled {
  explicit Filled(const AttentionProblem& problem) : Filled(problem, *DescribeSdpa(problem)) {}
  Filled(const AttentionProblem& problem, const SdpaDescription& d) : description(d) {
    slots = d.batch * PartsOf(d, problem).batch;
    layout = LayOutRequestArrays(description, problem);
    block.assign(static_cast<size_t>(layout.bytes), std::byte{0xFF});
    arrays = FillRequestArrays(problem, description, block);
  }
  std::vector<int64_t> Offsets(int64_t at) const {
    const auto* first = reinterpret_cast<const int64_t*>(block.data() + at);
    return {first, first + slots + 1};
  }
  std::vector<int32_t> Lens(int64_t at) const {
    const auto* first = reinterpret_cast<const int32_t*>(block.data() + at);
    return {first, first + slots};
  }
  std::vector<RowSpan> Spans() const {
    const auto* first = reinterpret_cast<const RowSpan*>(block.data() + layout.spans);
    return {first, first + arrays.num_spans};
  }

  SdpaDescription description;
  int64_t slots = 0;
  RequestArrayLayout layout;
  std::vector<std::byte> block;
  RequestArrays arrays;
};

constexpr int64_t kQRow = 4 * 16, kKvRow = 2 * 16;

TEST(RequestArrays, DenseSidesStartAtMultiplesOfTheBatchStride) {
  const Geometry g = LengthsOf({2, 0, 5}, {3, 4, 1}, 5, 4);
  const Filled f(ProblemOf(Layout::kBshdBshdBshd, g));
  // Sequence 1 has no queries, so its keys are left out too.
  EXPECT_THAT(f.Lens(f.layout.q_lens), ElementsAre(2, 0, 5, 0));
  EXPECT_THAT(f.Lens(f.layout.kv_lens), ElementsAre(3, 0, 1, 0));
  EXPECT_THAT(f.Offsets(f.layout.q_offsets),
              ElementsAre(0, 5 * kQRow, 10 * kQRow, 15 * kQRow, 15 * kQRow));
  EXPECT_THAT(f.Offsets(f.layout.k_offsets),
              ElementsAre(0, 4 * kKvRow, 8 * kKvRow, 9 * kKvRow, 9 * kKvRow));
  EXPECT_THAT(f.Offsets(f.layout.lse_offsets), ElementsAre(0, 5 * 4, 10 * 4, 15 * 4, 15 * 4));
  EXPECT_TRUE(f.arrays.any_pair);
  EXPECT_THAT(f.Spans(), ElementsAre(RowSpan{2 * kQRow, 2, 3}, RowSpan{5 * kQRow, 4 * 5, 5}));
  EXPECT_EQ(f.arrays.longest_span, 5);
}

TEST(RequestArrays, TokenBuffersStartWhereTheirSequencesDoAndGapsAreEmptyRows) {
  Geometry g = LengthsOf({2, 3}, {4, 1}, 3, 4);
  g.has_gaps = true;
  g.q_row = {1, 5, 8};
  g.t_q = 10;
  g.kv_row = {0, 6, 7};
  g.t_kv = 9;
  const Filled f(ProblemOf(Layout::kThdThdThd, g));
  EXPECT_THAT(f.Offsets(f.layout.q_offsets), ElementsAre(kQRow, 5 * kQRow, 8 * kQRow));
  EXPECT_THAT(f.Offsets(f.layout.v_offsets), ElementsAre(0, 6 * kKvRow, 7 * kKvRow));
  EXPECT_THAT(f.Offsets(f.layout.lse_offsets), ElementsAre(4, 20, 32));
  EXPECT_THAT(f.Spans(),
              ElementsAre(RowSpan{0, 0, 1}, RowSpan{3 * kQRow, 12, 2}, RowSpan{8 * kQRow, 32, 2}));
}

// h = 4 query heads over g = 2 heads of K and V, rows of 16.
TEST(RequestArrays, HeadMajorBuffersMakeEachHeadASequence) {
  const Filled f(ProblemOf(Layout::kBhsdBhsdBhsd, LengthsOf({2, 3}, {4, 1}, 3, 4)));
  EXPECT_THAT(f.Lens(f.layout.q_lens), ElementsAre(2, 2, 2, 2, 3, 3, 3, 3));
  EXPECT_THAT(f.Lens(f.layout.kv_lens), ElementsAre(4, 4, 4, 4, 1, 1, 1, 1));
  EXPECT_THAT(f.Offsets(f.layout.q_offsets),
              ElementsAre(0, 48, 96, 144, 192, 240, 288, 336, 336 + 48));
  EXPECT_THAT(f.Offsets(f.layout.k_offsets),
              ElementsAre(0, 0, 64, 64, 128, 128, 192, 192, 192 + 16));
  EXPECT_EQ(f.Offsets(f.layout.v_offsets), f.Offsets(f.layout.k_offsets));
  EXPECT_THAT(f.Offsets(f.layout.lse_offsets), ElementsAre(0, 3, 6, 9, 12, 15, 18, 21, 24));
  EXPECT_THAT(f.Spans(), ElementsAre(RowSpan{2 * 16, 2, 1}));
}

TEST(RequestArrays, AFullBatchHasNoEmptyRows) {
  EXPECT_THAT(Filled(ProblemOf(Layout::kThdThdThd, LengthsOf({2, 3}, {4, 1}, 3, 4))).Spans(),
              IsEmpty());
  EXPECT_THAT(Filled(ProblemOf(Layout::kBshdBshdBshd, LengthsOf({128}, {128}, 128, 128))).Spans(),
              IsEmpty());
}

TEST(RequestArrays, SkipsTheRowsInFrontThatABottomRightMaskLeavesWithoutKeys) {
  const auto causal = [](AttentionSpec& spec) { spec.causal = Causal::kBottomRight; };
  const Filled f(ProblemOf(Layout::kThdThdThd, LengthsOf({5, 2}, {2, 0}, 5, 2), causal));
  EXPECT_THAT(f.Lens(f.layout.q_lens), ElementsAre(2, 0));
  EXPECT_THAT(f.Lens(f.layout.kv_lens), ElementsAre(2, 0));
  EXPECT_THAT(f.Offsets(f.layout.q_offsets), ElementsAre(3 * kQRow, 5 * kQRow, 5 * kQRow));
  EXPECT_THAT(f.Spans(), ElementsAre(RowSpan{0, 0, 3, 1}, RowSpan{5 * kQRow, 20, 2, 1}));
}

TEST(RequestArrays, RowsWithoutKeysAreThoseOfTheBand) {
  for (Alignment alignment : {Alignment::kTopLeft, Alignment::kBottomRight}) {
    for (int64_t q = 0; q <= 6; ++q) {
      for (int64_t kv = 0; kv <= 6; ++kv) {
        for (int64_t left = 0; left <= 3; ++left) {
          for (int64_t right = 0; right <= 3; ++right) {
            const Geometry g = LengthsOf({q, 7}, {kv, 7}, 7, 7);
            const AttentionProblem p =
                ProblemOf(Layout::kBshdBshdBshd, g, [&](AttentionSpec& spec) {
                  spec.window_left = left;
                  spec.window_right = right;
                  spec.window_alignment = alignment;
                });
            std::vector<bool> empty(14), want(14);
            for (const RowSpan& span : Filled(p).Spans()) {
              for (int64_t r = 0; r < span.rows; ++r) empty[span.out_start / kQRow + r] = true;
            }
            for (int64_t i = 0; i < 2; ++i) {
              for (int64_t j = 0; j < 7; ++j) {
                const SequenceExtent& s = p.sequences[i];
                const KeyRange keys = p.mask.VisibleKeys(j, s.q_len, s.kv_len);
                want[i * 7 + j] = j >= s.q_len || keys.first == keys.last;
              }
            }
            ASSERT_EQ(empty, want) << q << " " << kv << " " << left << " " << right;
          }
        }
      }
    }
  }
}

TEST(RequestArrays, NothingToDoWhereNoQuerySeesAKey) {
  EXPECT_FALSE(
      Filled(ProblemOf(Layout::kThdThdThd, LengthsOf({2, 3}, {0, 0}, 3, 1))).arrays.any_pair);
}

// [s, b, g, h/g + 2, d] with h = 4 and g = 2: each head is a sequence of its own.
TEST(RequestArrays, HeadsInGroupsStartWhereTheirGroupPutsThem) {
  AttentionProblem p = ProblemOf(Layout::kSbhdSbhdSbhd, LengthsOf({3, 3}, {3, 3}, 3, 3));
  const int64_t d = 16, group = 4 * d, row = 2 * group;
  p.q.strides = {row, 2 * row, d, 1};
  p.q.group_heads = 2;
  p.q.group_stride = group;
  p.k.strides = p.v.strides = {row, 2 * row, group, 1};
  const Filled f(p);
  EXPECT_TRUE(f.description.splits_heads);
  const std::vector<int64_t> q = f.Offsets(f.layout.q_offsets);
  EXPECT_THAT(std::vector<int64_t>(q.begin(), q.begin() + 5),
              ElementsAre(0, d, group, group + d, row));
  const std::vector<int64_t> k = f.Offsets(f.layout.k_offsets);
  EXPECT_THAT(std::vector<int64_t>(k.begin(), k.begin() + 5), ElementsAre(0, 0, group, group, row));
}

TEST(RequestArrays, OffsetsAreNotCutTo32Bits) {
  AttentionProblem p = ProblemOf(Layout::kThdThdThd, LengthsOf({1, 1}, {1, 1}, 1, 1));
  p.sequences[1].kv_row = 43'691;
  p.k.strides.seq = p.k.start_multiplier = 3 * 128 * 128;
  EXPECT_EQ(Filled(p).Offsets(Filled(p).layout.k_offsets)[1], int64_t{43'691} * 3 * 128 * 128);
}

TEST(RequestArrays, PartsOfABatchHaveSlotsForAllOfIt) {
  const AttentionProblem p =
      ProblemOf(Layout::kThdThdThd, LengthsOf({1, 2, 3, 4, 5}, {5, 4, 3, 2, 1}, 5, 5));
  SdpaDescription d = *DescribeSdpaBackward(p);
  EXPECT_EQ(d.batch, 8);
  d.batch = 2;
  const Filled f(p, d);
  EXPECT_THAT(f.Lens(f.layout.q_lens), ElementsAre(1, 2, 3, 4, 5, 0));
  EXPECT_THAT(f.Offsets(f.layout.q_offsets),
              ElementsAre(0, kQRow, 3 * kQRow, 6 * kQRow, 10 * kQRow, 15 * kQRow, 15 * kQRow));
}

TEST(RequestArrays, GradientsOfRowsOutsideTheGraphAreNotWritten) {
  const auto writes_all = [](Layout layout, const Geometry& g, Causal causal = Causal::kNone) {
    return WritesAllGradients(
        ProblemOf(layout, g, [&](AttentionSpec& spec) { spec.causal = causal; }));
  };
  EXPECT_TRUE(writes_all(Layout::kBshdBs2hd, LengthsOf({5, 5}, {4, 4}, 5, 4)));
  EXPECT_TRUE(writes_all(Layout::kThdThdThd, LengthsOf({2, 3}, {4, 1}, 3, 4)));
  EXPECT_FALSE(writes_all(Layout::kThdThdThd, LengthsOf({2, 0}, {4, 1}, 3, 4)));
  EXPECT_FALSE(writes_all(Layout::kThdThdThd, LengthsOf({2, 3}, {0, 1}, 3, 4)));
  EXPECT_FALSE(writes_all(Layout::kBshdBs2hd, LengthsOf({5, 3}, {4, 4}, 5, 4)));
  EXPECT_FALSE(writes_all(Layout::kBshdBs2hd, LengthsOf({5}, {4}, 5, 4), Causal::kBottomRight));
  EXPECT_TRUE(writes_all(Layout::kBshdBs2hd, LengthsOf({5}, {4}, 5, 4), Causal::kTopLeft));
  const AttentionProblem behind =
      ProblemOf(Layout::kBshdBs2hd, LengthsOf({3}, {9}, 3, 9), [](AttentionSpec& spec) {
        spec.causal = Causal::kBottomRight;
        spec.window_left = 2;
      });
  EXPECT_FALSE(WritesAllGradients(behind));
  Geometry gap = LengthsOf({2, 3}, {4, 1}, 3, 4);
  gap.has_gaps = true;
  gap.kv_row = {0, 5, 6};
  gap.t_kv = 6;
  EXPECT_FALSE(writes_all(Layout::kThdThdThd, gap));
}

}  // namespace
}  // namespace attnd::testing
