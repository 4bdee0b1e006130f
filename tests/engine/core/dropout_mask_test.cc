#include "engine/core/dropout_mask.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace attnd {
namespace {

constexpr int64_t kRows = 64, kKeys = 64;

std::vector<bool> Cells(const Dropout& dropout, int64_t sequence = 0, int64_t head = 0) {
  const DropoutMask mask(dropout, sequence, head);
  std::vector<bool> cells;
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kKeys; ++j) cells.push_back(mask.Keeps(i, j));
  }
  return cells;
}

// Of the cells, how many are kept in both.
double Overlap(const std::vector<bool>& a, const std::vector<bool>& b) {
  double both = 0;
  for (size_t k = 0; k < a.size(); ++k) both += a[k] && b[k];
  return both / static_cast<double>(a.size());
}

// The generator's published answers.
TEST(Philox, GivesTheKnownAnswers) {
  using Numbers = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox({0, 0, 0, 0}, {0, 0}),
            (Numbers{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Numbers{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Numbers{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Five standard deviations of 4,096 draws.
TEST(DropoutMask, KeepsTheFractionThatIsAskedFor) {
  for (const double p : {0.0, 0.1, 0.5, 0.9, 0.999}) {
    const Dropout dropout{p, 42, 7};
    const std::vector<bool> cells = Cells(dropout);
    EXPECT_NEAR(Overlap(cells, cells), 1 - p, 5 * std::sqrt(p * (1 - p) / (kRows * kKeys))) << p;
    EXPECT_EQ(KeepScale(dropout), 1 / (1 - p));
  }
}

// Independent masks share the product of what each keeps.
TEST(DropoutMask, DiffersBySeedOffsetSequenceAndHead) {
  const Dropout dropout{0.5, 42, 7};
  const std::vector<bool> cells = Cells(dropout);
  const std::vector<std::vector<bool>> others = {
      Cells({0.5, 43, 7}),  Cells({0.5, 42, 8}),
      Cells({0.5, 7, 42}),  Cells({0.5, -42, 7}),
      Cells({0.5, 42, -7}), Cells({0.5, 42 + (int64_t{1} << 32), 7}),
      Cells(dropout, 1, 0), Cells(dropout, 0, 1),
      Cells(dropout, 1, 1), Cells({0.5, 42, 7 + (int64_t{1} << 32)})};
  for (size_t k = 0; k < others.size(); ++k) {
    EXPECT_NEAR(Overlap(cells, others[k]), 0.25, 5 * std::sqrt(0.25 * 0.75 / (kRows * kKeys))) << k;
    for (size_t m = 0; m < k; ++m) EXPECT_NE(others[k], others[m]) << k << " " << m;
  }
}

TEST(DropoutMask, GivesTheSameCellsFourAtATime) {
  const DropoutMask mask({0.3, 1, 2}, 3, 4);
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t j = 0; j < 16; ++j) {
      EXPECT_EQ(mask.Keeps(i, j), mask.KeepsFour(i, j / 4)[static_cast<size_t>(j % 4)]);
    }
  }
}

// Neighbours in a row and in a column keep independently of each other.
TEST(DropoutMask, HasNoStripes) {
  const std::vector<bool> cells = Cells({0.5, 9, 9});
  for (const size_t distance : {size_t{1}, size_t{4}, size_t{kKeys}}) {
    const std::vector<bool> shifted(cells.begin() + static_cast<std::ptrdiff_t>(distance),
                                    cells.end());
    const std::vector<bool> rest(cells.begin(),
                                 cells.end() - static_cast<std::ptrdiff_t>(distance));
    EXPECT_NEAR(Overlap(rest, shifted), 0.25, 0.04) << distance;
  }
}

}  // namespace
}  // namespace attnd
