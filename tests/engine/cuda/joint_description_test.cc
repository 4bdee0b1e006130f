#include "engine/cuda/joint_description.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/cuda/request_arrays.h"
#include "tests/engine/cuda/problems.h"

namespace attnd::testing {
namespace {

std::string KeyOf(const AttentionProblem& p, bool is_backward = false) {
  const absl::StatusOr<SdpaDescription> d = DescribeJoint(p, is_backward);
  EXPECT_TRUE(d.ok()) << d.status();
  return d.ok() ? TermsOf(p, *d).key : "";
}

std::string Key(Layout layout, const Geometry& g) { return KeyOf(ProblemOf(layout, g)); }

template <typename Edit>
std::string Key(Layout layout, const Geometry& g, Edit edit) {
  return KeyOf(ProblemOf(layout, g, edit));
}

Geometry Short() { return LengthsOf({5, 7}, {6, 3}, 9, 8); }

TEST(JointDescription, BatchLengthsAndFormOfCallsDoNotKeepThemApart) {
  const std::string key = Key(Layout::kBshdBshdBshd, Short());
  EXPECT_EQ(Key(Layout::kBshdBshdBshd, LengthsOf({200}, {100}, 200, 100)), key);
  EXPECT_EQ(Key(Layout::kThdThdThd, LengthsOf({0, 3, 50}, {9, 0, 256}, 50, 256)), key);
  // A full batch is dense where it runs alone.
  EXPECT_EQ(Key(Layout::kBshdBshdBshd, LengthsOf({128}, {128}, 128, 128)), key);
}

TEST(JointDescription, WhatTheGraphBakesInKeepsCallsApart) {
  const std::string key = Key(Layout::kBshdBshdBshd, Short());
  EXPECT_NE(Key(Layout::kBshdBs2hd, Short()), key);     // Another stride from key to key.
  EXPECT_NE(Key(Layout::kSbhdSbhdSbhd, Short()), key);  // The batch lies inside a row.
  EXPECT_NE(Key(Layout::kBhsdBhsdBhsd, Short()), key);
  EXPECT_NE(Key(Layout::kBshdBshdBshd, LengthsOf({257}, {8}, 257, 8)), key);  // The next class.
  Geometry g = Short();
  g.d_v = 32;
  EXPECT_NE(Key(Layout::kBshdBshdBshd, g), key);
  g = Short();
  g.h = 8;
  EXPECT_NE(Key(Layout::kBshdBshdBshd, g), key);
  const std::vector<std::function<void(AttentionSpec&)>> edits = {
      [](AttentionSpec& s) { s.scale = 0.5; },
      [](AttentionSpec& s) { s.causal = Causal::kTopLeft; },
      [](AttentionSpec& s) { s.causal = Causal::kBottomRight; },
      [](AttentionSpec& s) { s.window_left = 3; },
  };
  std::vector<std::string> keys = {key};
  for (const auto& edit : edits) {
    keys.push_back(Key(Layout::kBshdBshdBshd, Short(), edit));
    for (size_t i = 0; i + 1 < keys.size(); ++i) EXPECT_NE(keys[i], keys.back());
  }
}

TEST(JointDescription, ThePassesHaveKeysOfTheirOwn) {
  const AttentionProblem p = ProblemOf(Layout::kBshdBshdBshd, Short());
  EXPECT_NE(KeyOf(p, false), KeyOf(p, true));
}

TEST(JointDescription, AHeadIsASlotWhereHeadsAreSequences) {
  const AttentionProblem p = ProblemOf(Layout::kBhsdBhsdBhsd, Short());
  const absl::StatusOr<SdpaDescription> d = DescribeJoint(p, false);
  ASSERT_TRUE(d.ok()) << d.status();
  EXPECT_EQ(TermsOf(p, *d).slots, 2 * 4);
  EXPECT_GE(TermsOf(p, *d).max_slots, 2 * TermsOf(p, *d).slots);
}

TEST(JointDescription, RefusesWhatRunsAlone) {
  const auto refused = [](const AttentionProblem& p, bool is_backward = false) {
    return absl::IsUnimplemented(DescribeJoint(p, is_backward).status());
  };
  const auto with = [](auto edit) { return ProblemOf(Layout::kBshdBshdBshd, Short(), edit); };
  EXPECT_TRUE(refused(with([](AttentionSpec& s) { s.softmax_kind = SoftmaxKind::kOffByOne; })));
  EXPECT_TRUE(refused(with([](AttentionSpec& s) { s.bias_kind = BiasKind::kAlibi; })));
  EXPECT_TRUE(refused(with([](AttentionSpec& s) { s.dropout = Dropout{0.5, 1, 2}; })));
  EXPECT_TRUE(refused(with([](AttentionSpec& s) { s.scale = -1; })));
  const AttentionProblem deterministic = with([](AttentionSpec& s) { s.deterministic = true; });
  EXPECT_FALSE(refused(deterministic));
  EXPECT_TRUE(refused(deterministic, /*is_backward=*/true));
  // These fill a GPU.
  EXPECT_TRUE(refused(ProblemOf(Layout::kBshdBshdBshd, LengthsOf({1025}, {8}, 1025, 8))));
  EXPECT_TRUE(
      refused(ProblemOf(Layout::kBshdBshdBshd, LengthsOf(std::vector<int64_t>(33, 4),
                                                         std::vector<int64_t>(33, 4), 4, 4))));
}

TEST(JointDescription, ArraysPlaceEachCallWhereItsTensorsBegin) {
  const AttentionProblem dense = ProblemOf(Layout::kBshdBshdBshd, LengthsOf({2}, {3}, 4, 3));
  const AttentionProblem ragged = ProblemOf(Layout::kThdThdThd, LengthsOf({1, 2}, {5, 4}, 2, 5));
  const absl::StatusOr<SdpaDescription> d = DescribeJoint(dense, true);
  ASSERT_TRUE(d.ok()) << d.status();
  ASSERT_EQ(*d, *DescribeJoint(ragged, true));
  const PlacedCall calls[] = {{.problem = &dense, .q = 10'000, .dk = 7, .lse = 0},
                              {.problem = &ragged, .k = 500, .out = 3'000, .lse = 16}};
  const RequestArrayLayout layout = LayOutRequestArrays(*d, calls);
  std::vector<std::byte> block(static_cast<size_t>(layout.bytes), std::byte{0xFF});
  const RequestArrays arrays = FillRequestArrays(calls, *d, block);
  const auto starts = [&](int64_t at) {
    const auto* first = reinterpret_cast<const int64_t*>(block.data() + at);
    EXPECT_EQ(first[d->batch], first[3]);  // Empty slots repeat the end.
    return std::vector<int64_t>(first, first + 4);
  };
  const auto lengths = [&](int64_t at) {
    const auto* first = reinterpret_cast<const int32_t*>(block.data() + at);
    return std::vector<int32_t>(first, first + 4);
  };
  constexpr int64_t kQRow = 4 * 16, kKvRow = 2 * 16;
  using Starts = std::vector<int64_t>;
  EXPECT_EQ(lengths(layout.q_lens), (std::vector<int32_t>{2, 1, 2, 0}));
  EXPECT_EQ(lengths(layout.kv_lens), (std::vector<int32_t>{3, 5, 4, 0}));
  EXPECT_EQ(starts(layout.q_offsets), (Starts{10'000, 0, kQRow, 3 * kQRow}));
  EXPECT_EQ(starts(layout.dq_offsets), (Starts{0, 0, kQRow, 3 * kQRow}));
  EXPECT_EQ(starts(layout.k_offsets), (Starts{0, 500, 500 + 5 * kKvRow, 500 + 9 * kKvRow}));
  EXPECT_EQ(starts(layout.dk_offsets), (Starts{7, 0, 5 * kKvRow, 9 * kKvRow}));
  EXPECT_EQ(starts(layout.out_offsets), (Starts{0, 3'000, 3'000 + kQRow, 3'000 + 3 * kQRow}));
  EXPECT_EQ(starts(layout.lse_offsets), (Starts{0, 16, 20, 28}));
  // The dense call's rows behind its length, and its LSE, which the graph has by row.
  EXPECT_EQ(arrays.num_spans, 1);
  ASSERT_EQ(arrays.num_segments, 1);
  const auto* segment = reinterpret_cast<const LseSegment*>(block.data() + layout.segments);
  EXPECT_EQ(*segment, (LseSegment{.by_row = 0, .lse = 0, .rows = 2, .lse_seq = 1, .lse_head = 4}));
}

}  // namespace
}  // namespace attnd::testing
