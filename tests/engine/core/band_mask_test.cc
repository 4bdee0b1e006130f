#include <gtest/gtest.h>

#include <limits>

#include "engine/core/attention_problem.h"

namespace attnd {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// The definition, one key at a time, where nothing can overflow.
bool IsVisible(const BandMask& mask, int64_t i, int64_t j, int64_t q_len, int64_t kv_len) {
  const int64_t diagonal = i + (mask.bottom_right ? kv_len - q_len : 0);
  return (!mask.left || j >= diagonal - *mask.left) && (!mask.right || j <= diagonal + *mask.right);
}

TEST(BandMask, ShowsExactlyTheKeysOfItsDefinition) {
  const std::optional<int64_t> bounds[] = {std::nullopt, 0, 1, 2, 7};
  int ranges = 0;
  for (int64_t q_len = 1; q_len <= 5; ++q_len) {
    for (int64_t kv_len = 0; kv_len <= 5; ++kv_len) {
      for (const auto& left : bounds) {
        for (const auto& right : bounds) {
          for (const bool bottom_right : {false, true}) {
            const BandMask mask = {left, right, bottom_right};
            for (int64_t i = 0; i < q_len; ++i) {
              const KeyRange keys = mask.VisibleKeys(i, q_len, kv_len);
              ASSERT_LE(0, keys.first);
              ASSERT_LE(keys.first, keys.last);
              ASSERT_LE(keys.last, kv_len);
              for (int64_t j = 0; j < kv_len; ++j) {
                ASSERT_EQ(keys.first <= j && j < keys.last, IsVisible(mask, i, j, q_len, kv_len))
                    << "i=" << i << " j=" << j << " q_len=" << q_len << " kv_len=" << kv_len;
              }
              ++ranges;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(ranges, 15 * 6 * 25 * 2);
}

TEST(BandMask, DoesNotOverflowWithHugeWindows) {
  for (const bool bottom_right : {false, true}) {
    const BandMask mask = {kMax, kMax, bottom_right};
    for (const int64_t i : {int64_t{0}, int64_t{9}}) {
      const KeyRange keys = mask.VisibleKeys(i, 10, 20);
      EXPECT_EQ(keys.first, 0);
      EXPECT_EQ(keys.last, 20);
    }
    // Diagonals below zero.
    EXPECT_EQ(mask.VisibleKeys(0, 10, 3).last, 3);
  }
  const KeyRange keys = BandMask{kMax, 0, true}.VisibleKeys(1, 1000, kMax);
  EXPECT_EQ(keys.last, kMax - 998);
}

TEST(BandMask, NamesEmptyRangesByEqualEnds) {
  const BandMask mask = {0, 0, false};
  const KeyRange keys = mask.VisibleKeys(5, 6, 3);
  EXPECT_EQ(keys.first, keys.last);
}

}  // namespace
}  // namespace attnd
