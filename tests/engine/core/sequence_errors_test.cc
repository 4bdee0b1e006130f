// Lengths, positions and page tables that contradict the buffers or one another.

#include <gtest/gtest.h>

#include <limits>

#include "engine/core/status.h"
#include "tests/engine/core/requests.h"

namespace attnd::testing {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

BadRequest Bad(const char* name, std::string_view layout, std::function<void(Sequences&)> spoil,
               const char* field) {
  return {name, layout, [spoil](Request& r) { spoil(r.sequences); }, field};
}

// Valid requests have cu_seqlens_q {0, 3, 7} and cu_seqlens_kv {0, 5, 7}, both {0, 3, 7} where Q is
// packed; token buffers of 7 rows, dense axes of 4 and 5; pages of 4 rows in BSHD_BSHD_BSHD.
const BadRequest kBadSequences[] = {
    Bad(
        "QMissingInThd", "THD_THD_THD", [](auto& s) { s.cu_seqlens_q.clear(); },
        "sequences.cu_seqlens_q"),
    Bad(
        "BothMissingInThd", "T3HD", [](auto& s) { s = {}; }, "sequences.cu_seqlens_q"),
    Bad(
        "KvMissingInMixed", "THD_BSHD_BSHD", [](auto& s) { s.cu_seqlens_kv.clear(); },
        "sequences.cu_seqlens_kv"),
    Bad(
        "BothMissingInPaged", "PAGED_KV_BSHD_BSHD_BSHD",
        [](auto& s) { s.cu_seqlens_q.clear(), s.cu_seqlens_kv.clear(); }, "sequences.cu_seqlens_q"),
    Bad(
        "OnlyQInDense", "BSHD_BSHD_BSHD", [](auto& s) { s.cu_seqlens_kv.clear(); },
        "sequences.cu_seqlens_kv"),
    Bad(
        "OnlyKvInDense", "BS3HD", [](auto& s) { s.cu_seqlens_q.clear(); },
        "sequences.cu_seqlens_q"),
    Bad(
        "QStartsAboveZero", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_q = {1, 3, 7};
        },
        "sequences.cu_seqlens_q"),
    Bad(
        "KvStartsBelowZero", "BSHD_BSHD_BSHD",
        [](auto& s) {
          s.cu_seqlens_kv = {-1, 3, 7};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "QDecreases", "THD_T2HD",
        [](auto& s) {
          s.cu_seqlens_q = {0, 5, 4};
        },
        "sequences.cu_seqlens_q"),
    Bad(
        "KvDecreases", "SBHD_SBHD_SBHD",
        [](auto& s) {
          s.cu_seqlens_kv = {0, 3, 2};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "KvDecreasesFar", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_kv = {0, kMax, std::numeric_limits<int64_t>::min()};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "EntriesOfQ", "BSHD_BSHD_BSHD",
        [](auto& s) {
          s.cu_seqlens_q = {0, 1, 2, 3};
        },
        "sequences.cu_seqlens_q"),
    Bad(
        "EntriesOfKv", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_kv = {0, 7};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "EntriesOfMixed", "THD_SBHD_SBHD",
        [](auto& s) {
          s.cu_seqlens_q = {0, 1, 2, 3};
        },
        "sequences.cu_seqlens_q"),
    Bad(
        "BatchOfZero", "T3HD", [](auto& s) { s.cu_seqlens_q = s.cu_seqlens_kv = {0}; },
        "sequences.cu_seqlens_q"),
    // Against the buffers.
    Bad(
        "QLongerThanItsAxis", "BSHD_BSHD_BSHD",
        [](auto& s) {
          s.cu_seqlens_q = {0, 5, 6};
        },
        "sequences.cu_seqlens_q"),
    Bad(
        "KvLongerThanItsAxis", "THD_BSHD_BSHD",
        [](auto& s) {
          s.cu_seqlens_kv = {0, 1, 7};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "QBeyondTheBuffer", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_q = {0, 3, 8};
        },
        "sequences.cu_seqlens_q"),
    Bad(
        "KvBeyondTheBuffer", "THD_TH2D",
        [](auto& s) {
          s.cu_seqlens_kv = {0, 5, 8};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "QFarBeyondTheBuffer", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_q = {0, 0, kMax};
        },
        "sequences.cu_seqlens_q"),
    // 3-packed: one token axis.
    Bad(
        "LengthsOf3Packed", "BS3HD",
        [](auto& s) {
          s.cu_seqlens_kv = {0, 4, 7};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "LengthsOfT3hd", "T3HD",
        [](auto& s) {
          s.cu_seqlens_kv = {0, 2, 7};
        },
        "sequences.cu_seqlens_kv"),
    Bad(
        "PositionsOfT3hd", "TH3D",
        [](auto& s) {
          s.cu_seqlens_q = s.cu_seqlens_kv = {0, 2, 4};
          s.cu_seqlens_q_padded = {0, 3, 6};
          s.cu_seqlens_kv_padded = {0, 4, 6};
        },
        "sequences.cu_seqlens_kv_padded"),
    Bad(
        "OnlyQHasPositionsInT3hd", "T3HD",
        [](auto& s) {
          s.cu_seqlens_q_padded = {0, 3, 7};
        },
        "sequences.cu_seqlens_kv_padded"),
    // Positions.
    Bad(
        "PaddedOnADenseSide", "BSHD_BSHD_BSHD",
        [](auto& s) {
          s.cu_seqlens_q_padded = {0, 3, 7};
        },
        "sequences.cu_seqlens_q_padded"),
    Bad(
        "PaddedOnTheDenseSideOfMixed", "THD_BSHD_BSHD",
        [](auto& s) {
          s.cu_seqlens_kv_padded = {0, 5, 7};
        },
        "sequences.cu_seqlens_kv_padded"),
    Bad(
        "PaddedOnAPagedSide", "PAGED_KV_THD_BSHD_BSHD",
        [](auto& s) {
          s.cu_seqlens_kv_padded = {0, 5, 7};
        },
        "sequences.cu_seqlens_kv_padded"),
    {"PaddedWithoutLengths", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.sequences = {.cu_seqlens_kv_padded = {0, 5, 7}};
     },
     "sequences.cu_seqlens_kv_padded"},
    Bad(
        "PaddedEntries", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_q_padded = {0, 7};
        },
        "sequences.cu_seqlens_q_padded"),
    Bad(
        "PaddedNegative", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_kv_padded = {-1, 5, 7};
        },
        "sequences.cu_seqlens_kv_padded"),
    Bad(
        "PaddedDecreases", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_q = {0, 0, 0};
          s.cu_seqlens_q_padded = {0, 5, 4};
        },
        "sequences.cu_seqlens_q_padded"),
    Bad(
        "PaddedTooTight", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_q_padded = {0, 2, 7};
        },
        "sequences.cu_seqlens_q_padded"),
    Bad(
        "PaddedTooTightAtTheEnd", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_kv_padded = {0, 5, 6};
        },
        "sequences.cu_seqlens_kv_padded"),
    Bad(
        "PaddedBeyondTheBuffer", "THD_THD_THD",
        [](auto& s) {
          s.cu_seqlens_q_padded = {1, 4, 8};
        },
        "sequences.cu_seqlens_q_padded"),
    Bad(
        "PaddedFarBeyondTheBuffer", "THD_T2HD",
        [](auto& s) {
          s.cu_seqlens_kv_padded = {0, 5, kMax};
        },
        "sequences.cu_seqlens_kv_padded"),
    // Page tables.
    Bad(
        "TableKMissing", "PAGED_KV_BSHD_BSHD_BSHD", [](auto& s) { s.page_table_k.reset(); },
        "sequences.page_table_k"),
    Bad(
        "TableVMissing", "PAGED_KV_SBHD_SBHD_SBHD", [](auto& s) { s.page_table_v.reset(); },
        "sequences.page_table_v"),
    Bad(
        "TableOnADenseLayout", "BSHD_BSHD_BSHD",
        [](auto& s) {
          s.page_table_k = TensorDesc{DType::kInt32, {2, 1}};
        },
        "sequences.page_table_k"),
    Bad(
        "TableVOnAThdLayout", "THD_T2HD",
        [](auto& s) {
          s.page_table_v = TensorDesc{DType::kInt32, {2, 1}};
        },
        "sequences.page_table_v"),
    Bad(
        "TableDtype", "PAGED_KV_BSHD_BSHD_BSHD",
        [](auto& s) { s.page_table_k->dtype = DType::kFloat32; }, "sequences.page_table_k.dtype"),
    Bad(
        "TableRank", "PAGED_KV_BSHD_BSHD_BSHD", [](auto& s) { s.page_table_k->shape = {4}; },
        "sequences.page_table_k"),
    Bad(
        "TableBatch", "PAGED_KV_BSHD_BSHD_BSHD", [](auto& s) { s.page_table_v->shape[0] = 3; },
        "sequences.page_table_v"),
    Bad(
        "TablesDiffer", "PAGED_KV_BSHD_BSHD_BSHD", [](auto& s) { s.page_table_v->shape[1] += 1; },
        "sequences.page_table_v"),
    Bad(
        "TooFewPages", "PAGED_KV_BSHD_BSHD_BSHD",
        [](auto& s) { s.page_table_k->shape[1] = s.page_table_v->shape[1] = 1; },
        "sequences.page_table_k"),
    {"MaxSeqlenBeyondThePages", "PAGED_KV_BSHD_BSHD_BSHD",
     [](Request& r) { r.spec.max_seqlen_kv = 9; }, "sequences.page_table_k"},
    {"PagesPast63Bits", "PAGED_KV_BSHD_BSHD_BSHD",
     [](Request& r) {
       r.sequences.page_table_k->shape = {2, kMax / 2};
       r.sequences.page_table_v->shape = {2, kMax / 2};
     },
     "sequences.page_table_k.shape"},
};

class BadSequences : public ::testing::TestWithParam<BadRequest> {};
TEST_P(BadSequences, AreRefused) { ExpectRefused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Layout, BadSequences, ::testing::ValuesIn(kBadSequences),
                         [](const auto& param) { return std::string(param.param.name); });

// ---------------------------------------------------------------------------- what is legal

TEST(Sequences, PositionsMayStartAboveZeroAndLeaveGapsAndATail) {
  Request r = SmallRequest(Layout::kThdThdThd);
  r.Shape(Buffer::kQ)[0] = 20;
  r.sequences.cu_seqlens_q_padded = {2, 8, 15};
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->sequences[0], (SequenceExtent{3, 5, 2, 0}));
  EXPECT_EQ(p->sequences[1], (SequenceExtent{4, 2, 8, 5}));
  EXPECT_TRUE(p->has_lengths);
}

TEST(Sequences, RowsOfDenseSidesAreZero) {
  const auto p = SmallRequest(Layout::kThdBshdBshd).Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->sequences[1], (SequenceExtent{4, 2, 3, 0}));
}

TEST(Sequences, TellWhetherSomeRowBelongsToNobody) {
  Request dense = SmallRequest(Layout::kBs3hd);
  EXPECT_TRUE(dense.Resolve()->has_lengths);
  dense.sequences.cu_seqlens_q = dense.sequences.cu_seqlens_kv = {0, 4, 8};
  EXPECT_FALSE(dense.Resolve()->has_lengths);
  dense.sequences = {};
  EXPECT_FALSE(dense.Resolve()->has_lengths);
  Request thd = SmallRequest(Layout::kT3hd);
  EXPECT_FALSE(thd.Resolve()->has_lengths);
  thd.Shape(Buffer::kQkv)[0] = 8;
  EXPECT_TRUE(thd.Resolve()->has_lengths);
}

TEST(Sequences, ZeroLengthsAreLegalAnywhere) {
  Request r = SmallRequest(Layout::kThdThdThd);
  for (const std::vector<int64_t>& cu : {std::vector<int64_t>{0, 0, 4}, {0, 4, 4}, {0, 0, 0}}) {
    r.sequences.cu_seqlens_kv = cu;
    EXPECT_TRUE(r.Resolve().ok()) << r.Resolve().status();
  }
}

TEST(Sequences, TheLongestOfAThdSideMayBeOverstated) {
  Request r = SmallRequest(Layout::kThdThdThd);
  r.spec.max_seqlen_q = 100;
  ASSERT_TRUE(r.Resolve().ok()) << r.Resolve().status();
  EXPECT_EQ(r.Resolve()->max_seqlen_q, 100);
  EXPECT_EQ(r.Resolve()->max_seqlen_kv, 5);
}

TEST(PageTable, OnlyEntriesThatAreReadMatter) {
  Request r = SmallRequest(Layout::kPagedKvBshdBshdBshd);  // Lengths 5 and 2, pages of 4 rows.
  r.sequences.page_table_k->shape = r.sequences.page_table_v->shape = {2, 3};
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  const auto check = [&](std::vector<int32_t> table, int64_t pages) {
    return CheckPageTable(*p, table, pages, "sequences.page_table_v");
  };
  EXPECT_TRUE(check({3, 0, -1, 2, 99, -7}, 4).ok());
  const absl::Status beyond = check({3, 4, -1, 2, 99, -7}, 4);
  EXPECT_EQ(beyond.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorField(beyond), "sequences.page_table_v");
  EXPECT_EQ(check({3, 0, 0, -1, 0, 0}, 4).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(check({std::numeric_limits<int32_t>::max(), 0, 0, 0, 0, 0}, 4).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace attnd::testing
