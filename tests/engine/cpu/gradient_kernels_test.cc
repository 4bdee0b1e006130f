#include "engine/cpu/gradient_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "engine/cpu/panel_product.h"
#include "tests/engine/cpu/simd_targets.h"

namespace attnd {
namespace {

constexpr int64_t kKeys = 11;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A block whose lanes see from v % 3 on before kKeys - v % 5.
struct Block {
  Block() {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, size_t count) {
      values.resize(count);
      for (float& x : values) x = normal(random);
    };
    for (auto* matrix : {&logits, &d_logits, &terms}) fill(*matrix, kKeys * kPanelRows);
    for (auto* v : {&d, &shift, &inverse_sum}) fill(*v, kPanelRows);
    for (float& x : inverse_sum) x = std::abs(x) + 0.1f;
    keep.resize(kKeys * kPanelRows);
    for (float& x : keep) x = random() % 2 == 0 ? 0.0f : 2.0f;
    for (size_t v = 0; v < kPanelRows; ++v) {
      first.push_back(static_cast<float>(v % 3));
      last.push_back(static_cast<float>(static_cast<size_t>(kKeys) - v % 5));
    }
    block = {.keys = kKeys,
             .logits = logits.data(),
             .d_logits = d_logits.data(),
             .first = first.data(),
             .last = last.data(),
             .shift = shift.data(),
             .inverse_sum = inverse_sum.data(),
             .d = d.data(),
             .sum = sum.data(),
             .m = m.data(),
             .l = l.data(),
             .weighted = weighted.data()};
  }
  bool Sees(size_t at) const {
    const auto row = static_cast<float>(at / kPanelRows);
    return row >= first[at % kPanelRows] && row < last[at % kPanelRows];
  }

  std::vector<float> logits, d_logits, terms, keep, d, shift, inverse_sum, first, last;
  std::vector<float> sum = std::vector<float>(kPanelRows, 0.5f);
  std::vector<float> m = std::vector<float>(kPanelRows, -kInf);
  std::vector<float> l = std::vector<float>(kPanelRows), weighted = l;
  GradientBlock block;
};

// What must come out at one cell.
struct Cell {
  double kept = 0, gradient = 0, p = 0, logit = 0, dp = 0;
};

Cell PlainCell(const Block& b, size_t at) {
  if (!b.Sees(at)) return {};
  const GradientBlock& g = b.block;
  const size_t lane = at % kPanelRows;
  const double term = g.terms == nullptr ? 0 : static_cast<double>(b.terms[at]);
  double x = b.logits[at], slope = 1;
  if (g.terms_before_scale) x += term;
  x *= static_cast<double>(g.scale);
  if (g.softcap > 0) {
    const double cap = g.softcap, t = std::tanh(x / cap);
    x = cap * t;
    if (g.through_cap) slope = 1 - t * t;
  }
  if (!g.terms_before_scale) x += term;
  const double keep = g.keep == nullptr ? 1 : static_cast<double>(b.keep[at]);
  const double p =
      std::exp(x - static_cast<double>(b.shift[lane])) * static_cast<double>(b.inverse_sum[lane]);
  const double dp = keep * static_cast<double>(b.d_logits[at]);
  return {p * keep, p * (dp - static_cast<double>(b.d[lane])) * slope, p, x, dp};
}

TEST(SoftmaxGradient, AgreesWithAPlainLoop) {
  testing::ForEachTarget([] {
    for (int variant = 0; variant < 32; ++variant) {
      Block b;
      b.block.scale = -0.7f;
      if (variant & 1) b.block.terms = b.terms.data();
      b.block.terms_before_scale = variant & 2;
      if (variant & 4) b.block.keep = b.keep.data();
      if (variant & 8) b.block.softcap = 1.5f;
      b.block.through_cap = variant & 16;
      const Block before = b;
      std::vector<double> sum(kPanelRows, 0.5);
      SoftmaxGradient(b.block);
      for (size_t at = 0; at < b.logits.size(); ++at) {
        const Cell cell = PlainCell(before, at);
        ASSERT_NEAR(b.logits[at], cell.kept, 2e-5 * (1 + std::abs(cell.kept))) << variant;
        ASSERT_NEAR(b.d_logits[at], cell.gradient, 2e-5 * (1 + std::abs(cell.gradient))) << variant;
        sum[at % kPanelRows] += cell.p;
      }
      for (size_t v = 0; v < kPanelRows; ++v) ASSERT_NEAR(b.sum[v], sum[v], 1e-4 * sum[v]);
    }
  });
}

TEST(SoftmaxGradient, IsZeroWhereNothingIsSeenOrKeptWhateverIsThere) {
  testing::ForEachTarget([] {
    Block b;
    b.block.keep = b.keep.data();
    b.block.terms = b.terms.data();
    for (size_t at = 0; at < b.logits.size(); ++at) {
      if (!b.Sees(at)) b.logits[at] = b.d_logits[at] = b.terms[at] = b.keep[at] = kNan;
      if (b.keep[at] == 0) b.d_logits[at] = kNan;  // dO . V of a dropped V.
    }
    const Block before = b;
    SoftmaxGradient(b.block);
    for (size_t at = 0; at < b.logits.size(); ++at) {
      ASSERT_TRUE(std::isfinite(b.d_logits[at])) << at;
      if (before.Sees(at) && before.keep[at] != 0) continue;
      ASSERT_EQ(b.logits[at], 0) << at;
      ASSERT_TRUE(before.Sees(at) || b.d_logits[at] == 0) << at;
    }
    for (const float sum : b.sum) ASSERT_TRUE(std::isfinite(sum));
  });
}

TEST(SoftmaxGradient, IsZeroWhereATermHides) {
  testing::ForEachTarget([&] {
    for (const bool before_scale : {false, true}) {
      Block b;
      b.block.terms = b.terms.data();
      b.block.terms_before_scale = before_scale;
      b.block.scale = -1;
      for (size_t at = 0; at < b.terms.size(); at += 3) {
        b.terms[at] = -kInf;
        b.logits[at] = b.d_logits[at] = at % 2 == 0 ? kNan : kInf;
      }
      SoftmaxGradient(b.block);
      for (size_t at = 0; at < b.terms.size(); ++at) {
        if (b.terms[at] != -kInf) continue;
        ASSERT_EQ(b.logits[at], 0) << at;
        ASSERT_EQ(b.d_logits[at], 0) << at;
      }
      for (const float sum : b.sum) ASSERT_TRUE(std::isfinite(sum));
    }
  });
}

TEST(SoftmaxGradient, IsFiniteForAnLseThatIsFarTooLow) {
  Block b;
  b.shift.assign(kPanelRows, -1e30f);
  SoftmaxGradient(b.block);
  for (const float sum : b.sum) EXPECT_TRUE(std::isfinite(sum) && sum > 1e30f);
}

TEST(AddSoftmaxStatistics, AgreesWithAPlainLoop) {
  testing::ForEachTarget([] {
    for (int variant = 0; variant < 16; ++variant) {
      Block b;
      b.block.scale = -30;
      if (variant & 1) b.block.terms = b.terms.data();
      b.block.terms_before_scale = variant & 2;
      if (variant & 4) b.block.keep = b.keep.data();
      if (variant & 8) b.block.softcap = 1.5f;
      for (size_t at = 0; at < b.terms.size(); at += 3) b.terms[at] = -kInf;
      const Block before = b;
      // All keys but the last four, and these.
      GradientBlock part = b.block;
      part.keys = kKeys - 4;
      AddSoftmaxStatistics(part);
      const auto skipped = static_cast<ptrdiff_t>(part.keys * kPanelRows);
      part.keys = 4;
      part.logits += skipped;
      part.d_logits += skipped;
      if (part.terms != nullptr) part.terms += skipped;
      if (part.keep != nullptr) part.keep += skipped;
      for (float& x : b.first) x = std::max(0.0f, x - (kKeys - 4));
      for (float& x : b.last) x = std::max(0.0f, x - (kKeys - 4));
      AddSoftmaxStatistics(part);
      for (size_t v = 0; v < kPanelRows; ++v) {
        double m = -kInf, l = 0, weighted = 0;
        for (const bool sums : {false, true}) {
          for (size_t at = v; at < before.logits.size(); at += kPanelRows) {
            const bool is_hidden = (variant & 1) && before.terms[at] == -kInf;
            if (is_hidden || !before.Sees(at)) continue;
            const Cell cell = PlainCell(before, at);
            m = std::max(m, cell.logit);
            if (!sums) continue;
            l += std::exp(cell.logit - m);
            weighted += std::exp(cell.logit - m) * cell.dp;
          }
        }
        ASSERT_NEAR(b.m[v], m, 1e-4) << variant;
        ASSERT_NEAR(b.l[v], l, 1e-3 * l) << variant;
        ASSERT_NEAR(b.weighted[v], weighted, 1e-3 * (l + std::abs(weighted))) << variant;
      }
    }
  });
}

TEST(AddFloats, AddsEveryLength) {
  for (int64_t n = 0; n < 40; ++n) {
    std::vector<float> from(static_cast<size_t>(n), 2), to(static_cast<size_t>(n) + 1, 1);
    AddFloats(from.data(), n, to.data());
    for (size_t k = 0; k < from.size(); ++k) EXPECT_EQ(to[k], 3);
    EXPECT_EQ(to.back(), 1);
  }
}

TEST(Dot, HasTheBitsOfAPanelProduct) {
  testing::ForEachTarget([] {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (const int64_t n : {1, 7, 64, 100}) {
      const auto count = static_cast<size_t>(n);
      std::vector<float> a(count * kProductStep), b(count * kPanelRows);
      for (float& x : a) x = normal(random);
      for (float& x : b) x = normal(random);
      std::vector<float> c(kProductStep * kPanelRows), lane(count);
      PanelProduct product;
      product.rows = 1;
      product.depth = n;
      product.a = a.data();
      product.a_row_stride = n;
      product.a_depth_stride = 1;
      product.b = b.data();
      product.c = c.data();
      Multiply(product);
      for (size_t k = 0; k < count; ++k) lane[k] = b[k * kPanelRows + 5];
      EXPECT_EQ(Dot(a.data(), lane.data(), n), c[5]);
    }
  });
}

}  // namespace
}  // namespace attnd
