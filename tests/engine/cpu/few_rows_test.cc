#include "engine/cpu/few_rows.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "engine/cpu/panel_product.h"
#include "tests/engine/cpu/simd_targets.h"

namespace attnd {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kKeys = 5;

std::vector<float> Normal(int64_t count) {
  static std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(random);
  return values;
}

// K or V with NaN after each row, and exactly to the end of its memory.
struct Keys {
  explicit Keys(int64_t size) : dim(size), data(Normal(kKeys * (size + 1) - 1)) {
    for (int64_t j = 0; j + 1 < kKeys; ++j) data[static_cast<size_t>(j * (dim + 1) + dim)] = kNan;
  }
  double At(int64_t j, int64_t c) const { return data[static_cast<size_t>(j * (dim + 1) + c)]; }
  FewRows Of(int64_t rows, std::vector<float>& logits) const {
    return {rows, kKeys, dim, data.data(), dim + 1, logits.data()};
  }
  int64_t dim;
  std::vector<float> data;
};

template <typename Check>
void ForEachShape(const Check& check) {
  testing::ForEachTarget([&] {
    for (int64_t rows = 1; rows <= kFewRows; ++rows) {
      for (const int64_t dim : {1, 3, 8, 16, 17, 63, 64, 65, 128, 200}) {
        SCOPED_TRACE(::testing::Message() << rows << " rows of " << dim);
        check(rows, dim);
      }
    }
  });
}

TEST(FewRows, MultipliesLikeAPlainLoop) {
  ForEachShape([](int64_t rows, int64_t dim) {
    const Keys k(dim);
    const std::vector<float> q = Normal(rows * dim);
    std::vector<float> logits(kKeys * kPanelRows, -7);
    MultiplyFewRows(k.Of(rows, logits), q.data());
    for (int64_t j = 0; j < kKeys; ++j) {
      for (int64_t r = 0; r < kPanelRows; ++r) {
        double sum = r < rows ? 0 : -7;  // Other columns are not written.
        for (int64_t c = 0; r < rows && c < dim; ++c) {
          sum += q[static_cast<size_t>(r * dim + c)] * k.At(j, c);
        }
        ASSERT_NEAR(logits[static_cast<size_t>(j * kPanelRows + r)], sum, 2e-5) << j << " " << r;
      }
    }
  });
}

TEST(FewRows, AddsValuesLikeAPlainLoop) {
  ForEachShape([](int64_t rows, int64_t dim) {
    const Keys v(dim);
    std::vector<float> logits = Normal(kKeys * kPanelRows);
    const std::vector<float> before = Normal(dim * kPanelRows);
    std::vector<float> acc = before;
    AddValuesOfFewRows(v.Of(rows, logits), acc.data());
    for (int64_t c = 0; c < dim; ++c) {
      for (int64_t r = 0; r < kPanelRows; ++r) {
        double sum = before[static_cast<size_t>(c * kPanelRows + r)];
        for (int64_t j = 0; r < rows && j < kKeys; ++j) {
          sum += logits[static_cast<size_t>(j * kPanelRows + r)] * v.At(j, c);
        }
        ASSERT_NEAR(acc[static_cast<size_t>(c * kPanelRows + r)], sum, 1e-5) << c << " " << r;
      }
    }
  });
}

}  // namespace
}  // namespace attnd
