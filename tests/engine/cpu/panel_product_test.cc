#include "engine/cpu/panel_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/engine/cpu/simd_targets.h"

namespace attnd {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Normal(int64_t count) {
  static std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(random);
  return values;
}

struct Lanes {
  int64_t first;
  int64_t last;
};

class MultiplyTest : public ::testing::TestWithParam<Lanes> {
 protected:
  // a is [rows, depth], or stored as its transpose [depth, rows]; both are what attention needs.
  void Check(int64_t rows, int64_t depth, bool transposed, bool accumulate) {
    const auto [first, last] = GetParam();
    const int64_t padded = RoundUp(rows, kProductStep);
    const std::vector<float> a = Normal(padded * depth);
    const std::vector<float> b = Normal(depth * kPanelRows);
    const std::vector<float> before = Normal((padded + 1) * kPanelRows);
    std::vector<float> c = before;
    PanelProduct product;
    product.rows = rows;
    product.depth = depth;
    product.a = a.data();
    product.a_row_stride = transposed ? 1 : depth;
    product.a_depth_stride = transposed ? padded : 1;
    product.b = b.data();
    product.c = c.data();
    product.first_lane = first;
    product.last_lane = last;
    product.accumulate = accumulate;
    Multiply(product);
    for (int64_t i = 0; i <= padded; ++i) {
      for (int64_t lane = 0; lane < kPanelRows; ++lane) {
        const auto index = static_cast<size_t>(i * kPanelRows + lane);
        if (i == padded || lane < first || lane >= last) {
          ASSERT_EQ(c[index], before[index]) << i << " " << lane;  // Not written.
          continue;
        }
        if (i >= rows) continue;
        double sum = accumulate ? before[index] : 0;
        for (int64_t k = 0; k < depth; ++k) {
          sum +=
              static_cast<double>(
                  a[static_cast<size_t>(i * product.a_row_stride + k * product.a_depth_stride)]) *
              b[static_cast<size_t>(k * kPanelRows + lane)];
        }
        ASSERT_NEAR(c[index], sum, 2e-6 * (1 + static_cast<double>(depth))) << i << " " << lane;
      }
    }
  }
};

TEST_P(MultiplyTest, AgreesWithAPlainLoop) {
  testing::ForEachTarget([this] {
    for (const int64_t rows : {1, 7, 8, 9, 24, 65}) {
      for (const int64_t depth : {0, 1, 2, 33}) {
        for (const bool transposed : {false, true}) {
          for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(::testing::Message() << rows << " x " << depth << ", transposed "
                                              << transposed << ", accumulate " << accumulate);
            Check(rows, depth, transposed, accumulate);
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, MultiplyTest,
                         ::testing::Values(Lanes{0, 32}, Lanes{0, 16}, Lanes{16, 32}));

// As for matrices that do not belong to a panel: 48 lanes, in rows that lie further apart.
TEST(Multiply, TakesRowsOfAnyLength) {
  testing::ForEachTarget([] {
    const int64_t rows = 16, depth = 5, lanes = 48, b_stride = 50, c_stride = 49;
    const std::vector<float> a = Normal(rows * depth), b = Normal(depth * b_stride);
    const std::vector<float> before = Normal(rows * c_stride);
    std::vector<float> c = before;
    PanelProduct product;
    product.rows = rows;
    product.depth = depth;
    product.a = a.data();
    product.a_row_stride = depth;
    product.a_depth_stride = 1;
    product.b = b.data();
    product.b_stride = b_stride;
    product.c = c.data();
    product.c_stride = c_stride;
    product.last_lane = lanes;
    product.accumulate = true;
    Multiply(product);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t lane = 0; lane < c_stride; ++lane) {
        const auto index = static_cast<size_t>(i * c_stride + lane);
        double sum = before[index];
        for (int64_t k = 0; lane < lanes && k < depth; ++k) {
          sum += static_cast<double>(a[static_cast<size_t>(i * depth + k)]) *
                 b[static_cast<size_t>(k * b_stride + lane)];
        }
        ASSERT_NEAR(c[index], sum, 1e-5) << i << " " << lane;
      }
    }
  });
}

TEST(Multiply, KeepsNanToItsLane) {
  testing::ForEachTarget([] {
    const std::vector<float> a(8, 1);
    std::vector<float> b(kPanelRows, 2);
    b[3] = kNan;
    std::vector<float> c(8 * kPanelRows);
    PanelProduct product;
    product.rows = 8;
    product.depth = 1;
    product.a = a.data();
    product.a_row_stride = product.a_depth_stride = 1;
    product.b = b.data();
    product.c = c.data();
    Multiply(product);
    for (size_t k = 0; k < c.size(); ++k) {
      if (k % kPanelRows == 3) {
        ASSERT_TRUE(std::isnan(c[k]));
      } else {
        ASSERT_EQ(c[k], 2);
      }
    }
  });
}

TEST(ToPanel, TransposesAndFillsWithZeros) {
  testing::ForEachTarget([] {
    for (int64_t rows = 1; rows <= kPanelRows; ++rows) {
      for (const int64_t cols : {1, 3, 4, 5, 18}) {
        const int64_t stride = cols + 2;
        const std::vector<float> src = Normal(rows * stride);
        std::vector<float> dst(static_cast<size_t>((cols + 1) * kPanelRows), kNan);
        ToPanel(src.data(), stride, rows, cols, dst.data());
        for (int64_t c = 0; c < cols; ++c) {
          for (int64_t r = 0; r < kPanelRows; ++r) {
            const float expected = r < rows ? src[static_cast<size_t>(r * stride + c)] : 0;
            ASSERT_EQ(dst[static_cast<size_t>(c * kPanelRows + r)], expected) << r << " " << c;
          }
        }
        for (int64_t r = 0; r < kPanelRows; ++r) {
          ASSERT_TRUE(std::isnan(dst[static_cast<size_t>(cols * kPanelRows + r)]));
        }
      }
    }
  });
}

TEST(FromPanel, TransposesBack) {
  testing::ForEachTarget([] {
    for (int64_t rows = 1; rows <= kPanelRows; ++rows) {
      for (const int64_t cols : {1, 3, 4, 18}) {
        const int64_t stride = RoundUp(cols, 4) + 3;
        const std::vector<float> src = Normal(RoundUp(cols, 4) * kPanelRows);
        std::vector<float> dst(static_cast<size_t>(RoundUp(rows, 4) * stride), kNan);
        FromPanel(src.data(), rows, cols, dst.data(), stride);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            ASSERT_EQ(dst[static_cast<size_t>(r * stride + c)],
                      src[static_cast<size_t>(c * kPanelRows + r)]);
          }
          ASSERT_TRUE(std::isnan(dst[static_cast<size_t>(r * stride + stride - 1)]));
        }
      }
    }
  });
}

}  // namespace
}  // namespace attnd
