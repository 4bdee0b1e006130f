#include "engine/core/attention_problem.h"

#include <gtest/gtest.h>

#include <limits>

namespace attnd {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

void ExpectKeys(const BandMask& mask, int64_t i, std::pair<int64_t, int64_t> lens,
                std::pair<int64_t, int64_t> keys) {
  const KeyRange seen = mask.VisibleKeys(i, lens.first, lens.second);
  if (keys.first == keys.second) {
    EXPECT_EQ(seen.first, seen.last) << i;
    return;
  }
  EXPECT_EQ(seen.first, keys.first) << i;
  EXPECT_EQ(seen.last, keys.second) << i;
}

TEST(BandMask, ShowsEverythingWithoutBounds) {
  ExpectKeys({}, 0, {3, 5}, {0, 5});
  ExpectKeys({}, 2, {3, 5}, {0, 5});
  ExpectKeys({}, 2, {3, 0}, {0, 0});
}

TEST(BandMask, CausalTopLeftIgnoresTheLengths) {
  const BandMask causal{.right = 0};
  ExpectKeys(causal, 0, {3, 5}, {0, 1});
  ExpectKeys(causal, 2, {3, 5}, {0, 3});
  ExpectKeys(causal, 9, {10, 5}, {0, 5});
}

TEST(BandMask, CausalBottomRightEndsAtTheLastKey) {
  const BandMask causal{.right = 0, .bottom_right = true};
  ExpectKeys(causal, 0, {1, 7}, {0, 7});  // Decode.
  ExpectKeys(causal, 2, {3, 5}, {0, 5});
  ExpectKeys(causal, 0, {3, 5}, {0, 3});
  ExpectKeys(causal, 0, {5, 3}, {0, 0});  // Sees no key.
  ExpectKeys(causal, 1, {5, 3}, {0, 0});
  ExpectKeys(causal, 2, {5, 3}, {0, 1});
}

TEST(BandMask, WindowsAreInclusive) {
  const BandMask window{.left = 2, .right = 1};
  ExpectKeys(window, 5, {10, 10}, {3, 7});
  ExpectKeys(window, 0, {10, 10}, {0, 2});
  ExpectKeys(window, 9, {10, 10}, {7, 10});
  ExpectKeys({.left = 0, .right = 0}, 4, {10, 10}, {4, 5});
  ExpectKeys({.left = 0, .right = 0, .bottom_right = true}, 4, {10, 12}, {6, 7});
}

TEST(BandMask, ATopLeftWindowCanLeaveTheKeysBehind) {
  const BandMask window{.left = 1};
  ExpectKeys(window, 3, {8, 3}, {2, 3});
  ExpectKeys(window, 4, {8, 3}, {0, 0});
}

TEST(BandMask, BoundsMayBeAsLargeAsTheType) {
  ExpectKeys({.left = kHuge, .right = kHuge}, 5, {10, 10}, {0, 10});
  ExpectKeys({.left = kHuge, .right = kHuge, .bottom_right = true}, 5, {10, 2}, {0, 2});
  ExpectKeys({.right = kHuge - 1, .bottom_right = true}, 5, {6, 20}, {0, 20});
}

}  // namespace
}  // namespace attnd
