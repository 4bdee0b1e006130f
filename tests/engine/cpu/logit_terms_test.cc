#include "engine/cpu/logit_terms.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "engine/core/dropout_mask.h"
#include "tests/engine/cpu/simd_targets.h"

namespace attnd {
namespace {

std::vector<float> RandomBlock(int64_t keys, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> block(static_cast<size_t>(keys * kPanelRows));
  for (float& x : block) x = normal(random);
  return block;
}

// One group of lanes changes, the other stays as it was.
TEST(AddTerms, AgreesWithAPlainLoop) {
  testing::ForEachTarget([] {
    for (const bool before_scale : {false, true}) {
      for (const double cap : {0.0, 2.0}) {
        for (const size_t lane : {size_t{0}, static_cast<size_t>(kLaneGroup)}) {
          const std::vector<float> logits = RandomBlock(7, 1), terms = RandomBlock(7, 2);
          std::vector<float> actual = logits;
          AddTerms({7, terms.data() + lane, actual.data() + lane, before_scale, -0.5f,
                    static_cast<float>(cap)});
          for (size_t at = 0; at < actual.size(); ++at) {
            double x = logits[at];
            if (at % kPanelRows / kLaneGroup == lane / kLaneGroup) {
              const double term = terms[at];
              if (before_scale) x += term;
              x = cap > 0 ? cap * std::tanh(-0.5 * x / cap) : -0.5 * x;
              if (!before_scale) x += term;
            }
            ASSERT_NEAR(actual[at], x, 2e-6) << at;
          }
        }
      }
    }
  });
}

TEST(AddTerms, KeepsNanAndInfinity) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float cap : {0.0f, 2.0f}) {
    std::vector<float> logits(kPanelRows, 1), terms(kPanelRows, 0);
    logits[3] = std::numeric_limits<float>::quiet_NaN();
    terms[4] = -inf;
    AddTerms({1, terms.data(), logits.data(), false, 1, cap});
    EXPECT_TRUE(std::isnan(logits[3]));
    EXPECT_EQ(logits[4], -inf);
    EXPECT_TRUE(std::isfinite(logits[5]));
  }
}

TEST(AddTerms, HidesCellsOfMinusInfinity) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  testing::ForEachTarget([&] {
    for (const bool before_scale : {false, true}) {
      for (const float cap : {0.0f, 2.0f}) {
        for (const float scale : {-2.0f, 0.0f, 1.0f}) {
          std::vector<float> logits = {1, nan, inf, -inf}, terms(kPanelRows, -inf);
          logits.resize(kPanelRows, 1);
          terms[5] = 0;
          AddTerms({1, terms.data(), logits.data(), before_scale, scale, cap});
          for (const size_t lane : {0, 1, 2, 3}) ASSERT_EQ(logits[lane], -inf) << lane;
          ASSERT_TRUE(std::isfinite(logits[5]));
        }
      }
    }
  });
}

TEST(ScaleLogits, MultipliesOneGroup) {
  const std::vector<float> logits = RandomBlock(5, 3), factors = RandomBlock(5, 4);
  std::vector<float> actual = logits;
  ScaleLogits(5, factors.data(), actual.data());
  for (size_t at = 0; at < actual.size(); ++at) {
    const bool is_in_group = at % kPanelRows < kLaneGroup;
    EXPECT_EQ(actual[at], is_in_group ? logits[at] * factors[at] : logits[at]);
  }
}

TEST(FillAlibi, CountsFromEachLanesDiagonal) {
  testing::ForEachTarget([] {
    AlibiLanes lanes;
    for (size_t v = 0; v < kPanelRows; ++v) {
      lanes.slope[v] = 0.25f * static_cast<float>(v);
      lanes.distance[v] = 3 - static_cast<float>(v);
    }
    std::vector<float> terms(9 * kPanelRows);
    FillAlibi(lanes, 9, terms.data());
    for (int j = 0; j < 9; ++j) {
      for (int v = 0; v < kPanelRows; ++v) {
        EXPECT_EQ(terms[static_cast<size_t>(j * kPanelRows + v)],
                  -0.25f * static_cast<float>(v * std::abs(3 - v + j)));
      }
    }
  });
}

TEST(FillKeepFactors, DropsWhatTheMaskDrops) {
  testing::ForEachTarget([] {
    for (const double probability : {1e-12, 0.3, 0.999, 1 - 1e-12}) {
      for (const int64_t first_key : {int64_t{0}, int64_t{5}, int64_t{1} << 34}) {
        const Dropout dropout = {probability, 77, -3};
        DropoutLanes lanes;
        lanes.keep_factor = 1.5f;
        std::vector<DropoutMask> masks;
        for (int64_t v = 0; v < kPanelRows; ++v) {
          const auto lane = static_cast<size_t>(v);
          masks.emplace_back(dropout, 2, v / 5);
          lanes.key0[lane] = masks.back().key()[0];
          lanes.key1[lane] = masks.back().key()[1];
          lanes.row_low[lane] = static_cast<uint32_t>(v * 1000);
          lanes.row_high[lane] = v % 2 == 0 ? 0 : 9;
          lanes.threshold = masks.back().threshold();
        }
        for (const int64_t keys : {1, 4, 11}) {
          std::vector<float> factors(static_cast<size_t>((keys + 1) * kPanelRows), -1);
          FillKeepFactors(lanes, first_key, keys, factors.data());
          for (int64_t j = 0; j < keys; ++j) {
            for (int64_t v = 0; v < kPanelRows; ++v) {
              const int64_t row = v * 1000 + (v % 2 == 0 ? 0 : int64_t{9} << 32);
              const bool keeps = masks[static_cast<size_t>(v)].Keeps(row, first_key + j);
              ASSERT_EQ(factors[static_cast<size_t>(j * kPanelRows + v)], keeps ? 1.5f : 0.0f);
            }
          }
          EXPECT_EQ(factors[static_cast<size_t>(keys * kPanelRows)], -1);  // Not written.
        }
      }
    }
  });
}

}  // namespace
}  // namespace attnd
