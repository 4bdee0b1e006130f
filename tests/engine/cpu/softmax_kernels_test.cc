#include "engine/cpu/softmax_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "engine/cpu/panel_product.h"
#include "tests/engine/cpu/simd_targets.h"

namespace attnd {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// What every lane of a group has in common with the others, but for `visible`; looked at in a lane
// that each test picks.
struct Row {
  explicit Row(const std::vector<float>& s, size_t lane_to_look_at = 5)
      : keys(static_cast<int64_t>(s.size())), lane(lane_to_look_at) {
    SetLogits(s);
    visible.fill({0, keys});
    seen_by_all = {0, keys};
  }
  // One more row follows, which is not a key's.
  void SetLogits(const std::vector<float>& s) {
    logits.assign((s.size() + 1) * kPanelRows, kNan);
    for (size_t j = 0; j < s.size(); ++j) {
      std::fill_n(logits.begin() + static_cast<int64_t>(j) * kPanelRows, kLaneGroup, s[j]);
    }
  }
  // The others still see everything.
  void Hide(KeyRange visible_keys) {
    visible[lane] = visible_keys;
    seen_by_all = visible_keys;
  }
  void Step(float scale = 1, float softcap = 0) {
    SoftmaxBlock block;
    block.keys = keys;
    block.visible = visible.data();
    block.seen_by_all = seen_by_all;
    block.scale = scale;
    block.softcap = softcap;
    block.logits = logits.data();
    block.m = m.data();
    block.l = l.data();
    block.acc = acc.data();
    block.d_v = 1;
    OnlineSoftmax(block);
  }
  float P(int64_t j) const { return logits[static_cast<size_t>(j * kPanelRows) + lane]; }

  int64_t keys;
  size_t lane;
  std::vector<float> logits;
  std::array<KeyRange, kLaneGroup> visible;
  KeyRange seen_by_all;
  std::vector<float> m = std::vector<float>(kLaneGroup, -kInf);
  std::vector<float> l = std::vector<float>(kLaneGroup, 0);
  std::vector<float> acc = std::vector<float>(kLaneGroup, 0);
};

TEST(OnlineSoftmax, AgreesWithDoublesForAllWidthsAndRanges) {
  testing::ForEachTarget([] {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 5);
    for (int64_t keys = 1; keys <= 70; ++keys) {
      for (const int64_t first : {int64_t{0}, keys / 3}) {
        std::vector<float> s(static_cast<size_t>(keys));
        for (float& x : s) x = normal(random);
        Row row(s, static_cast<size_t>(keys) % kLaneGroup);
        const KeyRange visible = {first, keys - keys / 4};
        row.Hide(visible);
        row.Step(-0.7f);
        double m = -HUGE_VAL;
        double l = 0;
        for (int64_t j = first; j < visible.last; ++j) {
          m = std::max(m, -0.7 * s[static_cast<size_t>(j)]);
        }
        for (int64_t j = 0; j < keys; ++j) {
          const bool is_visible = first <= j && j < visible.last;
          const double p = is_visible ? std::exp(-0.7 * s[static_cast<size_t>(j)] - m) : 0;
          ASSERT_NEAR(row.P(j), p, 3e-6 * p) << keys << " " << j;
          l += p;
        }
        ASSERT_NEAR(row.l[row.lane], l, 1e-6 * l);
        ASSERT_TRUE(std::isnan(row.P(keys)));  // Not written.
      }
    }
  });
}

TEST(OnlineSoftmax, IsExactToTwoUlpsOfExp) {
  testing::ForEachTarget([] {
    std::vector<float> s;
    for (int k = 0; k < 100000; ++k) s.push_back(-87.0f * static_cast<float>(k) / 100000.0f);
    Row row(s);
    row.Step();
    double worst = 0;
    for (size_t j = 0; j < s.size(); ++j) {
      const double e = std::exp(static_cast<double>(s[j]));
      worst =
          std::max(worst, std::abs(static_cast<double>(row.P(static_cast<int64_t>(j))) / e - 1));
    }
    EXPECT_LT(worst, 2.4e-7);
  });
}

TEST(OnlineSoftmax, RescalesWhenTheMaximumGrows) {
  Row row({1, 2});
  row.Step();
  row.acc[row.lane] = 10;
  const float l = row.l[row.lane];
  row.SetLogits({5, 2});
  row.Step();
  EXPECT_EQ(row.m[row.lane], 5);
  EXPECT_NEAR(row.acc[row.lane], 10 * std::exp(-3.0f), 1e-6);
  EXPECT_NEAR(row.l[row.lane], l * std::exp(-3.0f) + 1 + std::exp(-3.0f), 1e-6);
}

TEST(OnlineSoftmax, CapsWithTanh) {
  testing::ForEachTarget([] {
    Row row({-100, -1, 0.01f, 3, 1000, kInf, -kInf});
    row.Step(0.5f, 4);
    EXPECT_NEAR(row.m[row.lane], 4, 1e-6);
    const float s[] = {-100, -1, 0.01f, 3, 1000, kInf, -kInf};
    for (int64_t j = 0; j < row.keys; ++j) {
      EXPECT_NEAR(row.P(j), std::exp(4 * std::tanh(0.5f * s[j] / 4) - 4), 1e-6) << j;
    }
  });
}

TEST(OnlineSoftmax, LeavesRowsWithoutKeysAlone) {
  testing::ForEachTarget([] {
    Row unseen({1, 2, 3});
    unseen.Hide({});
    unseen.Step();
    Row all_minus_infinity(std::vector<float>(20, -kInf));
    all_minus_infinity.Step();
    for (const Row* row : {&unseen, &all_minus_infinity}) {
      EXPECT_EQ(row->m[row->lane], -kInf);
      EXPECT_EQ(row->l[row->lane], 0);
      for (int64_t j = 0; j < row->keys; ++j) EXPECT_EQ(row->P(j), 0);
    }
  });
}

TEST(OnlineSoftmax, KeepsNanOfAnyVisibleLogit) {
  testing::ForEachTarget([] {
    for (const float cap : {0.0f, 2.0f}) {
      for (const float other : {1.0f, -kInf}) {
        for (size_t position = 0; position < 40; ++position) {
          std::vector<float> s(40, other);
          s[position] = kNan;
          Row row(s);
          row.Step(1, cap);
          ASSERT_TRUE(std::isnan(row.l[row.lane])) << position;
          row.SetLogits(std::vector<float>(40, 1));
          row.Step(1, cap);
          ASSERT_TRUE(std::isnan(row.l[row.lane])) << position;
          Row hidden(s);
          hidden.Hide({static_cast<int64_t>(position) + 1, 40});
          hidden.Step(1, cap);
          ASSERT_FALSE(std::isnan(hidden.l[hidden.lane])) << position;
        }
      }
    }
  });
}

}  // namespace
}  // namespace attnd
