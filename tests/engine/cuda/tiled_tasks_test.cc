#include "engine/cuda/tiled_tasks.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "engine/core/dropout_mask.h"
#include "engine/cuda/tiled_dropout.h"

namespace attnd::testing {
namespace {

AttentionProblem ProblemOf(const std::vector<SequenceExtent>& sequences, int64_t heads,
                           int64_t kv_heads) {
  AttentionProblem p;
  p.batch = static_cast<int64_t>(sequences.size());
  p.num_heads = heads;
  p.num_kv_heads = kv_heads;
  p.sequences = sequences;
  return p;
}

const std::vector<SequenceExtent> kSequences = {
    {0, 5, 0, 0}, {1, 300, 0, 5}, {64, 64, 1, 305}, {63, 0, 65, 369}, {200, 129, 128, 369}, {0, 0}};

TEST(TiledTasks, RowTasksCoverEveryRowOfEveryHeadOnce) {
  for (const tiled::Heads heads : {tiled::Heads{6, 2}, tiled::Heads{3, 3}, tiled::Heads{40, 1}}) {
    const AttentionProblem p = ProblemOf(kSequences, heads.query, heads.kv);
    std::vector<tiled::Sequence> sequences(kSequences.size());
    const tiled::TaskCounts counts = tiled::FillSequences(p, sequences);
    std::map<std::tuple<int64_t, int64_t, int64_t>, int> seen;
    for (int64_t task = 0; task < counts.rows; ++task) {
      const int64_t i =
          tiled::SequenceOfTask<&tiled::Sequence::first_row_task>(sequences.data(), p.batch, task);
      const tiled::Sequence& s = sequences[static_cast<size_t>(i)];
      const tiled::RowTile tile = tiled::RowTileOf(s.q_len, heads, task - s.first_row_task);
      ASSERT_GT(tile.rows, 0);
      ASSERT_LE(tile.rows, tiled::kRows);
      for (int64_t n = tile.first; n < tile.first + tile.rows; ++n) {
        const int64_t head = tile.head + n / s.q_len;
        ++seen[{i, head, n % s.q_len}];
        ASSERT_EQ(head / heads.shared(), tile.head / heads.shared()) << "one KV head";
        // Where the key gradients look for the rows of a KV head.
        const int64_t tasks = tiled::RowTasks(s.q_len, heads) / heads.kv;
        ASSERT_EQ((task - s.first_row_task) / tasks, head / heads.shared());
      }
    }
    size_t rows = 0;
    for (const SequenceExtent& s : kSequences) rows += static_cast<size_t>(s.q_len * heads.query);
    EXPECT_EQ(seen.size(), rows);
    for (const auto& [place, times] : seen) EXPECT_EQ(times, 1);
  }
}

TEST(TiledTasks, KeyTasksCoverEveryKeyOfEveryKvHead) {
  const AttentionProblem p = ProblemOf(kSequences, 6, 2);
  std::vector<tiled::Sequence> sequences(kSequences.size());
  const tiled::TaskCounts counts = tiled::FillSequences(p, sequences);
  std::vector<int64_t> tasks(kSequences.size());
  for (int64_t task = 0; task < counts.keys; ++task) {
    ++tasks[static_cast<size_t>(
        tiled::SequenceOfTask<&tiled::Sequence::first_key_task>(sequences.data(), p.batch, task))];
  }
  EXPECT_EQ(tasks, (std::vector<int64_t>{2, 10, 2, 0, 6, 0}));
}

TEST(TiledTasks, TheBandIsTheProblems) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  const std::optional<int64_t> sides[] = {std::nullopt, 0, 1, 7, int64_t{1} << 62, most};
  for (const std::optional<int64_t>& left : sides) {
    for (const std::optional<int64_t>& right : sides) {
      for (const bool bottom_right : {false, true}) {
        const BandMask mask = {left, right, bottom_right};
        const tiled::Band band = tiled::BandOf(mask);
        for (const auto& [q_len, kv_len] :
             std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {5, 9}, {9, 5}, {4, 0}}) {
          for (int64_t i = 0; i < q_len; ++i) {
            const KeyRange want = mask.VisibleKeys(i, q_len, kv_len);
            const KeyRange have = tiled::VisibleKeys(band, {q_len, kv_len}, i, i);
            EXPECT_EQ(have.first, want.first);
            EXPECT_EQ(have.last, want.last);
          }
        }
      }
    }
  }
}

TEST(TiledTasks, ATileSeesWhatItsRowsSee) {
  const tiled::Heads heads = {4, 2};
  for (const BandMask& mask : {BandMask{}, BandMask{std::nullopt, 0, true}, BandMask{3, 2, false},
                               BandMask{0, 100, true}}) {
    const tiled::Band band = tiled::BandOf(mask);
    for (const tiled::Sequence& s :
         {tiled::Sequence{30, 400}, tiled::Sequence{200, 100}, tiled::Sequence{130, 131}}) {
      for (int64_t n = 0; n < tiled::RowTasks(s.q_len, heads); ++n) {
        const tiled::RowTile tile = tiled::RowTileOf(s.q_len, heads, n);
        const KeyRange keys = tiled::KeysOfTile(band, s, tile);
        for (int64_t r = tile.first; r < tile.first + tile.rows; ++r) {
          const KeyRange row = mask.VisibleKeys(r % s.q_len, s.q_len, s.kv_len);
          if (row.first == row.last) continue;
          EXPECT_LE(keys.first, row.first);
          EXPECT_GE(keys.last, row.last);
        }
      }
    }
  }
}

TEST(TiledDropout, KeepsWhatTheMaskKeeps) {
  for (const Dropout& dropout : {Dropout{0.1, 3, 4}, Dropout{0.5, -7, int64_t{1} << 40},
                                 Dropout{1 - 1e-12, 0, 0}, Dropout{0.9, int64_t{1} << 50, -1}}) {
    const tiled::DropoutCall call = tiled::DropoutCallOf(dropout);
    EXPECT_TRUE(call.on);
    EXPECT_FLOAT_EQ(call.keep_factor, static_cast<float>(KeepScale(dropout)));
    for (const auto& [sequence, head] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {3, 1}, {1 << 20, 77}}) {
      const DropoutMask mask(dropout, sequence, head);
      const tiled::DropoutKey key = tiled::DropoutKeyOf(call, sequence, head);
      for (const int64_t row : {int64_t{0}, int64_t{65}, int64_t{5} << 32}) {
        for (int64_t j = 0; j < 256; ++j) {
          const uint32_t keeps = tiled::KeepsFour(call, key, row, j / 4);
          ASSERT_EQ((keeps >> (j % 4) & 1) != 0, mask.Keeps(row, j)) << row << " " << j;
        }
      }
    }
  }
}

TEST(TiledDropout, IsOffWithoutAProbability) { EXPECT_FALSE(tiled::DropoutCallOf({}).on); }

}  // namespace
}  // namespace attnd::testing
