// The tiled path where numbers are extreme: NaN, infinity, huge logits, scales that float lacks.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/attention_case.h"

namespace attnd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class TiledEdges : public ::testing::Test {
 protected:
  CpuBackend backend_{2};
  ReferenceBackend reference_;
};

// Every row of head `n` sees the same query; every key is (value, 0, 0, ...).
void SetLogits(AttentionCase& test, float query, float key) {
  const AttentionProblem& p = test.problem();
  for (int64_t i = 0; i < p.batch; ++i) {
    const SequenceExtent& extent = p.sequences[static_cast<size_t>(i)];
    for (int64_t c = 0; c < p.head_dim_qk; ++c) {
      for (int64_t j = 0; j < extent.q_len; ++j) test.Set(p.q, i, j, 0, c, c == 0 ? query : 0);
      for (int64_t j = 0; j < extent.kv_len; ++j) test.Set(p.k, i, j, 0, c, c == 0 ? key : 0);
    }
  }
}

TEST_F(TiledEdges, StaysRightForLogitsFarFromZero) {
  for (const float logit : {-120.0f, -10000.0f, 10000.0f, 120.0f}) {
    for (const int64_t s : {1, 64, 65, 128, 192, 600}) {
      CaseOptions options;
      options.lengths = {{s, s}};
      options.d_qk = options.d_v = 64;
      options.scale = 1;
      AttentionCase test(options);
      SetLogits(test, 1, logit);
      const Output expected = test.Run(reference_);
      const Output actual = test.Run(backend_);
      EXPECT_LT(RelativeRms(actual.out, expected.out), 8e-6) << logit << " " << s;
      EXPECT_LT(MaxDifference(actual.lse, expected.lse), std::abs(logit) * 2e-7 + 1e-6);
    }
  }
}

// One key: O is V whatever the logit, and LSE is the logit.
TEST_F(TiledEdges, OneKeyTakesAllAtAnyScale) {
  for (const double scale : {1e3, 5e8, 3e9, -1e11, 1e20, 1e29, 1e30, -1e38, 1e40, 1e200}) {
    for (const uint64_t seed : {1, 2, 3, 4, 5}) {
      CaseOptions options;
      options.lengths = {{3, 1}};
      options.d_qk = 33;
      options.scale = scale;
      options.seed = seed;
      AttentionCase test(options);
      const Output expected = test.Run(reference_);
      const Output actual = test.Run(backend_);
      EXPECT_EQ(actual.out, expected.out) << scale << " " << seed;
      for (size_t k = 0; k < actual.lse.size(); ++k) {
        if (std::isinf(expected.lse[k])) {  // Past float32 itself.
          EXPECT_EQ(actual.lse[k], expected.lse[k]);
        } else {
          EXPECT_NEAR(actual.lse[k] / expected.lse[k], 1, 1e-4) << scale;
        }
      }
    }
  }
}

TEST_F(TiledEdges, ProductsPastFloatAreComputedInDouble) {
  for (const int64_t keys : {7, 3000}) {  // In one chunk, and in several.
    CaseOptions options;
    options.lengths = {{2, keys}};
    options.scale = 1e-36;
    AttentionCase test(options);
    SetLogits(test, 1e20f, -2e19f);  // -2e39 is past float32; the logit is -2000.
    test.Set(test.problem().k, 0, 5, 0, 0, -1.99e19f);
    const Output expected = test.Run(reference_);
    const Output actual = test.Run(backend_);
    EXPECT_EQ(actual.out, expected.out) << keys;
    EXPECT_EQ(actual.lse, expected.lse) << keys;
  }
}

TEST_F(TiledEdges, EndsEarlyWhenCancelled) {
  CaseOptions options;
  options.lengths = {{600, 600}};
  const AttentionCase test(options);
  auto plan = backend_.BuildPlan(test.problem());
  ASSERT_TRUE(plan.ok());
  std::vector<std::byte> out(static_cast<size_t>(*NumBytes(test.problem().out_desc)));
  std::vector<std::byte> workspace(static_cast<size_t>((*plan)->workspace_bytes()));
  CancellationToken token;
  token.Cancel(CancellationToken::Cause::kClient);
  ForwardBuffers buffers = test.Inputs();
  buffers.out = out.data();
  buffers.workspace = workspace;
  buffers.cancellation = &token;
  EXPECT_EQ((*plan)->Forward(test.problem(), buffers).code(), absl::StatusCode::kCancelled);
}

TEST_F(TiledEdges, FindsTheMaximumAfterTilesOfVeryLowLogits) {
  CaseOptions options;
  options.lengths = {{3, 1300}};
  options.scale = 1;
  AttentionCase test(options);
  SetLogits(test, 1, -10000);
  test.Set(test.problem().k, 0, 1299, 0, 0, 10000);
  const Output actual = test.Run(backend_);
  for (int64_t c = 0; c < options.d_v; ++c) {
    EXPECT_EQ(actual.out[static_cast<size_t>(test.OutIndex(0, 2, 0, c))],
              test.Get(test.problem().v, 0, 1299, 0, c));
  }
  EXPECT_EQ(actual.lse[0], 10000);
}

// One bad element of V, at every place relative to the tiles: rows that see it match the plain
// loop (NaN where it is NaN), and rows that do not stay finite.
TEST_F(TiledEdges, KeepsBadValuesFromRowsThatDoNotSeeThem) {
  for (const BandMask& mask : {BandMask{std::nullopt, 0, false}, BandMask{3, 2, true},
                               BandMask{200, std::nullopt, true}, BandMask{}}) {
    for (const float bad : {kNan, kInf, -kInf}) {
      for (const int64_t key : {0, 1, 127, 128, 300, 511, 512, 599}) {
        CaseOptions options;
        options.lengths = {{600, 600}};
        options.mask = mask;
        AttentionCase test(options);
        test.Set(test.problem().v, 0, key, 0, 3, bad);
        const Output expected = test.Run(reference_);
        const Output actual = test.Run(backend_);
        for (int64_t i = 0; i < 600; ++i) {
          for (int64_t c = 0; c < options.d_v; ++c) {
            const auto index = static_cast<size_t>(test.OutIndex(0, i, 0, c));
            ASSERT_EQ(std::isfinite(actual.out[index]), std::isfinite(expected.out[index]))
                << "key " << key << " row " << i << " component " << c;
            if (!std::isfinite(expected.out[index])) continue;
            ASSERT_NEAR(actual.out[index], expected.out[index], 1e-5);
          }
        }
      }
    }
  }
}

TEST_F(TiledEdges, PassesNanOfVisibleKeysAndQueriesOn) {
  for (const int64_t key : {0, 511, 512, 599}) {
    CaseOptions options;
    options.lengths = {{600, 600}};
    options.mask.right = 0;
    AttentionCase test(options);
    test.Set(test.problem().k, 0, key, 0, 2, kNan);
    test.Set(test.problem().q, 0, 7, 0, 0, kNan);
    const Output expected = test.Run(reference_);
    const Output actual = test.Run(backend_);
    EXPECT_LT(RelativeRms(actual.out, expected.out), 1e-5);  // NaN exactly where expected.
    EXPECT_LT(MaxDifference(actual.lse, expected.lse), 1e-5);
    EXPECT_TRUE(std::isnan(actual.lse[7]));
  }
}

TEST_F(TiledEdges, TreatsLogitsOfMinusInfinityAsMasked) {
  CaseOptions options;
  options.lengths = {{4, 1100}};
  AttentionCase test(options);
  SetLogits(test, 1, -kInf);
  for (int64_t c = 1; c < options.d_qk; ++c) {
    for (int64_t i = 0; i < 4; ++i) test.Set(test.problem().q, 0, i, 0, c, 1);
  }
  const Output actual = test.Run(backend_);
  EXPECT_EQ(actual.out, std::vector<float>(actual.out.size(), 0));
  EXPECT_EQ(actual.lse, std::vector<float>(actual.lse.size(), -kInf));
}

TEST_F(TiledEdges, TakesScalesAndCapsThatFloatDoesNotHold) {
  for (const double scale : {1e300, -1e35, 1e-300, 0.0}) {
    for (const double cap : {0.0, 1e-300, 1e300, 5.0}) {
      CaseOptions options;
      options.lengths = {{5, 7}};
      options.scale = scale;
      if (cap > 0) options.softcap = cap;
      const AttentionCase test(options);
      EXPECT_LT(RelativeRms(test.Run(backend_).out, test.Run(reference_).out), 1e-5)
          << scale << " " << cap;
    }
  }
}

TEST_F(TiledEdges, WritesOnlyZerosWhereNoSequenceHasTokens) {
  for (const Format format : {Format::kBshd, Format::kThd}) {
    CaseOptions options;
    options.q_format = options.kv_format = format;
    options.lengths = {{0, 0}, {0, 5}, {0, 0}};
    options.extra_rows = 3;
    const AttentionCase test(options);
    const Output actual = test.Run(backend_);
    EXPECT_EQ(actual.out, std::vector<float>(9 * 8, 0));
    EXPECT_EQ(actual.lse, std::vector<float>(9, -kInf));
  }
}

}  // namespace
}  // namespace attnd::testing
