// The plain loop against answers worked out by hand: everything else is compared with it.
#include "engine/cpu/reference_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/attention_case.h"

namespace attnd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// With K = 0 every visible key has the same weight, so with v_j = 2^j a row's output names exactly
// the keys that it saw: O * (number of keys) = sum of 2^j.
class VisibleSet {
 public:
  explicit VisibleSet(const CaseOptions& options) : case_(options) {
    const AttentionProblem& p = case_.problem();
    for (int64_t i = 0; i < p.batch; ++i) {
      const SequenceExtent& extent = p.sequences[static_cast<size_t>(i)];
      for (int64_t n = 0; n < p.num_kv_heads; ++n) {
        for (int64_t j = 0; j < extent.kv_len; ++j) {
          for (int64_t c = 0; c < p.head_dim_qk; ++c) case_.Set(p.k, i, j, n, c, 0);
          for (int64_t c = 0; c < p.head_dim_v; ++c) {
            case_.Set(p.v, i, j, n, c, static_cast<float>(1 << j));
          }
        }
      }
    }
    ReferenceBackend backend;
    output_ = case_.Run(backend);
  }

  // Bit j: row `row` of sequence i saw key j. -1 where O and LSE are not those of any set.
  int Of(int64_t i, int64_t row) const {
    const float lse = output_.lse[static_cast<size_t>(case_.LseIndex(i, row, 0))];
    const float o = output_.out[static_cast<size_t>(case_.OutIndex(i, row, 0, 0))];
    if (lse == -kInf) return o == 0 ? 0 : -1;
    const double count = std::round(std::exp(lse));
    const double bits = std::round(o * count);
    if (std::abs(bits / count - o) > 1e-6 || std::abs(std::log(count) - lse) > 1e-6) return -1;
    return static_cast<int>(bits);
  }

 private:
  AttentionCase case_;
  Output output_;
};

TEST(ReferenceAttention, ComputesTwoKeysByHand) {
  CaseOptions options;
  options.lengths = {{1, 2}};
  options.d_qk = options.d_v = 2;
  options.scale = 0.5;
  AttentionCase test(options);
  const AttentionProblem& p = test.problem();
  const float q[2] = {1, 2};
  const float k[2][2] = {{1, 0}, {0, 2}};
  const float v[2][2] = {{10, -1}, {20, 1}};
  for (int c = 0; c < 2; ++c) {
    test.Set(p.q, 0, 0, 0, c, q[c]);
    for (int j = 0; j < 2; ++j) {
      test.Set(p.k, 0, j, 0, c, k[j][c]);
      test.Set(p.v, 0, j, 0, c, v[j][c]);
    }
  }
  // Logits 0.5 and 2: weights 1 / (1 + e^1.5) and the rest.
  const double w = 1 / (1 + std::exp(1.5));
  ReferenceBackend backend;
  const Output output = test.Run(backend);
  EXPECT_NEAR(output.out[0], 10 * w + 20 * (1 - w), 1e-5);
  EXPECT_NEAR(output.out[1], -w + (1 - w), 1e-6);
  EXPECT_NEAR(output.lse[0], std::log(std::exp(0.5) + std::exp(2.0)), 1e-6);
}

TEST(ReferenceAttention, CapsLogitsSoftly) {
  CaseOptions options;
  options.lengths = {{1, 1}};
  options.d_qk = 1;
  options.scale = 3;
  options.softcap = 2;
  AttentionCase test(options);
  test.Set(test.problem().q, 0, 0, 0, 0, 1);
  test.Set(test.problem().k, 0, 0, 0, 0, -1);
  ReferenceBackend backend;
  EXPECT_NEAR(test.Run(backend).lse[0], -2 * std::tanh(1.5), 1e-6);
}

TEST(ReferenceAttention, AlignsCausalMasksTopLeftAndBottomRight) {
  CaseOptions options;
  options.mask.right = 0;
  options.lengths = {{2, 5}};
  EXPECT_EQ(VisibleSet(options).Of(0, 0), 0b00001);
  EXPECT_EQ(VisibleSet(options).Of(0, 1), 0b00011);
  options.mask.bottom_right = true;
  EXPECT_EQ(VisibleSet(options).Of(0, 0), 0b01111);
  EXPECT_EQ(VisibleSet(options).Of(0, 1), 0b11111);
  options.lengths = {{5, 2}};
  const VisibleSet tall(options);
  EXPECT_EQ(tall.Of(0, 0), 0);
  EXPECT_EQ(tall.Of(0, 1), 0);
  EXPECT_EQ(tall.Of(0, 2), 0);
  EXPECT_EQ(tall.Of(0, 3), 0b01);
  EXPECT_EQ(tall.Of(0, 4), 0b11);
}

TEST(ReferenceAttention, CountsBothEndsOfAWindow) {
  CaseOptions options;
  options.lengths = {{4, 4}};
  options.mask = {1, 0, false};
  EXPECT_EQ(VisibleSet(options).Of(0, 3), 0b1100);
  EXPECT_EQ(VisibleSet(options).Of(0, 0), 0b0001);
  options.lengths = {{3, 6}};
  options.mask = {2, 1, false};
  EXPECT_EQ(VisibleSet(options).Of(0, 2), 0b001111);
  options.mask.bottom_right = true;
  EXPECT_EQ(VisibleSet(options).Of(0, 0), 0b011110);
}

TEST(ReferenceAttention, GivesZerosWhereNoKeyIs) {
  CaseOptions options;
  options.lengths = {{2, 2}, {2, 0}};
  options.extra_rows = 1;
  options.mask.right = 0;
  const VisibleSet sets(options);
  EXPECT_EQ(sets.Of(0, 0), 0b01);
  EXPECT_EQ(sets.Of(0, 1), 0b11);
  EXPECT_EQ(sets.Of(0, 2), 0);
  for (int64_t row = 0; row < 3; ++row) EXPECT_EQ(sets.Of(1, row), 0);
}

TEST(ReferenceAttention, TakesPositionsOfThdSequencesNotSumsOfLengths) {
  CaseOptions options;
  options.q_format = options.kv_format = Format::kThd;
  options.lengths = {{1, 1}, {1, 2}, {3, 3}};
  options.extra_rows = 1;  // A gap after each, and so a tail.
  const VisibleSet sets(options);
  EXPECT_EQ(sets.Of(0, 0), 0b1);
  EXPECT_EQ(sets.Of(0, 1), 0);
  EXPECT_EQ(sets.Of(1, 0), 0b11);
  EXPECT_EQ(sets.Of(1, 1), 0);
  EXPECT_EQ(sets.Of(2, 2), 0b111);
  EXPECT_EQ(sets.Of(2, 3), 0);
}

TEST(ReferenceAttention, FollowsThePageTables) {
  CaseOptions options;
  options.lengths = {{1, 5}, {1, 3}};
  options.page_size = 2;
  const VisibleSet sets(options);
  EXPECT_EQ(sets.Of(0, 0), 0b11111);
  EXPECT_EQ(sets.Of(1, 0), 0b111);
}

TEST(ReferenceAttention, SharesEachKvHeadByConsecutiveQueryHeads) {
  CaseOptions options;
  options.heads = 4;
  options.kv_heads = 2;
  options.d_v = 1;
  AttentionCase test(options);
  test.Set(test.problem().v, 0, 0, 0, 0, 10);
  test.Set(test.problem().v, 0, 0, 1, 0, 20);
  ReferenceBackend backend;
  EXPECT_EQ(test.Run(backend).out, std::vector<float>({10, 10, 20, 20}));
}

TEST(ReferenceAttention, LetsNanThroughFromVisibleKeysAlone) {
  CaseOptions options;
  options.lengths = {{2, 2}};
  options.mask.right = 0;
  options.d_qk = 1;
  options.d_v = 2;
  AttentionCase test(options);
  ReferenceBackend backend;
  test.Set(test.problem().v, 0, 1, 0, 0, kNan);
  Output output = test.Run(backend);
  EXPECT_TRUE(std::isfinite(output.out[0]) && std::isfinite(output.out[1]));
  EXPECT_TRUE(std::isnan(output.out[2]) && std::isfinite(output.out[3]));
  test.Set(test.problem().k, 0, 1, 0, 0, kNan);
  output = test.Run(backend);
  EXPECT_TRUE(std::isfinite(output.lse[0]));
  EXPECT_TRUE(std::isnan(output.lse[1]) && std::isnan(output.out[3]));
}

TEST(ReferenceAttention, TreatsLogitsOfMinusInfinityAsMasked) {
  CaseOptions options;
  options.d_qk = 1;
  AttentionCase test(options);
  test.Set(test.problem().q, 0, 0, 0, 0, 1);
  test.Set(test.problem().k, 0, 0, 0, 0, -kInf);
  ReferenceBackend backend;
  const Output output = test.Run(backend);
  EXPECT_EQ(output.out[0], 0);
  EXPECT_EQ(output.lse[0], -kInf);
}

TEST(ReferenceAttention, RefusesWhatItDoesNotCompute) {
  AttentionProblem problem;
  problem.dtype = DType::kInt32;
  EXPECT_EQ(ReferenceForward(problem, {}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ReferenceBackward(problem, {}).code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace attnd::testing
