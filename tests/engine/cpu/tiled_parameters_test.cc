// The tiled path with every parameter against the plain loop, forward.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/random_gradient_case.h"

namespace attnd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

double Tolerance(const CaseOptions& options) {
  if (options.dtype == DType::kBFloat16) return 1.5e-2;
  return options.dtype == DType::kFloat16 ? 2e-3 : 1e-5;
}

void ExpectForwardAgrees(const GradientCase& test, double tolerance, AttentionBackend& backend) {
  ReferenceBackend reference;
  const Output expected = test.Forward(reference);
  const Output actual = test.Forward(backend);
  EXPECT_LT(RelativeRms(actual.out, expected.out), tolerance);
  EXPECT_LT(MaxDifference(actual.lse, expected.lse), 1e-4);
  for (size_t k = 0; k < expected.out.size(); ++k) {
    if (expected.out[k] != 0) continue;
    EXPECT_EQ(actual.out[k], 0) << k;
  }
}

class TiledParameters : public ::testing::Test {
 protected:
  CpuBackend backend_{3};
};

TEST_F(TiledParameters, AgreeOnRandomProblems) {
  for (uint64_t seed = 1; seed <= 250; ++seed) {
    const GradientOptions options = RandomGradientOptions(seed, /*paged=*/seed % 5 == 0);
    SCOPED_TRACE(Describe(options));
    GradientCase test(options);
    PoisonUnusedBias(test);
    ExpectForwardAgrees(test, Tolerance(options.shape), backend_);
  }
}

TEST_F(TiledParameters, AgreeOnDecodeWithManyKeys) {
  for (const SoftmaxKind softmax_kind : {SoftmaxKind::kOffByOne, SoftmaxKind::kLearnable}) {
    for (const BiasKind bias_kind : {BiasKind::kPostScale, BiasKind::kAlibi}) {
      for (const int64_t q_len : {1, 2, 17}) {
        GradientOptions options;
        options.shape.lengths = {{q_len, 5000}, {q_len, 700}, {q_len, 0}};
        options.shape.heads = 4;
        options.shape.kv_heads = 2;
        options.shape.mask = {std::nullopt, 0, true};
        options.bias_kind = bias_kind;
        options.bias_per_head = true;
        options.softmax_kind = softmax_kind;
        options.dropout = {0.3, 5, 6};
        SCOPED_TRACE(Describe(options));
        GradientCase test(options);
        for (float& offset : test.softmax_offset()) offset += 9;  // A sink that is not lost.
        ExpectForwardAgrees(test, 1e-5, backend_);
      }
    }
  }
}

TEST_F(TiledParameters, BiasOfMinusInfinityIsAMask) {
  for (const SoftmaxKind softmax_kind : {SoftmaxKind::kVanilla, SoftmaxKind::kLearnable}) {
    GradientOptions options;
    options.shape.lengths = {{40, 700}};
    options.bias_kind = BiasKind::kPostScale;
    options.softmax_kind = softmax_kind;
    GradientCase test(options);
    for (size_t cell = 0; cell < test.bias().size(); ++cell) {
      const size_t row = cell / 700, key = cell % 700;
      if (row % 3 == 0 || key < 300) test.bias()[cell] = -kInf;
    }
    ExpectForwardAgrees(test, 1e-5, backend_);
    const Output output = test.Forward(backend_);
    const float sink = softmax_kind == SoftmaxKind::kVanilla ? -kInf : test.softmax_offset()[0];
    for (int64_t row = 0; row < 40; row += 3) {
      EXPECT_EQ(output.lse[static_cast<size_t>(test.inputs().LseIndex(0, row, 0))], sink);
    }
  }
}

// Where a row sees nothing, LSE is the sink's alone.
TEST_F(TiledParameters, ASinkIsTheLseOfRowsWithoutKeys) {
  GradientOptions options;
  options.shape.lengths = {{3, 0}, {5, 2}};
  options.shape.heads = options.shape.kv_heads = 2;
  options.shape.mask = {std::nullopt, 0, true};
  for (const SoftmaxKind softmax_kind : {SoftmaxKind::kOffByOne, SoftmaxKind::kLearnable}) {
    options.softmax_kind = softmax_kind;
    GradientCase test(options);
    ExpectForwardAgrees(test, 1e-5, backend_);
    const Output output = test.Forward(backend_);
    for (int64_t n = 0; n < 2; ++n) {
      const float sink = softmax_kind == SoftmaxKind::kOffByOne
                             ? 0
                             : test.softmax_offset()[static_cast<size_t>(n)];
      EXPECT_EQ(output.lse[static_cast<size_t>(test.inputs().LseIndex(0, 1, n))], sink);
      EXPECT_EQ(output.lse[static_cast<size_t>(test.inputs().LseIndex(1, 2, n))], sink);
    }
  }
}

// exp(sink - maximum) is past float32, or exp(maximum - sink) below it.
TEST_F(TiledParameters, ASinkMayLieFarFromTheLogits) {
  for (const float far : {-150.0f, 150.0f, -kInf}) {
    for (const int64_t keys : {60, 3000}) {
      GradientOptions options;
      options.shape.lengths = {{3, keys}};
      options.softmax_kind = SoftmaxKind::kLearnable;
      GradientCase test(options);
      test.softmax_offset()[0] = far;
      ExpectForwardAgrees(test, 1e-5, backend_);
    }
  }
}

TEST_F(TiledParameters, DropsTheSameCellsOnAnyTeam) {
  GradientOptions options;
  options.shape.lengths = {{300, 900}, {0, 5}, {70, 1}};
  options.shape.heads = 6;
  options.shape.kv_heads = 2;
  options.bias_kind = BiasKind::kAlibi;
  options.softmax_kind = SoftmaxKind::kOffByOne;
  options.dropout = {0.4, -7, int64_t{1} << 40};
  const GradientCase test(options);
  CpuBackend one(1);
  const Output expected = test.Forward(one);
  for (const int threads : {2, 3, 5}) {
    CpuBackend team(threads);
    const Output actual = test.Forward(team);
    EXPECT_EQ(actual.out, expected.out);
    EXPECT_EQ(actual.lse, expected.lse);
  }
}

// A dropped cell's value does not reach the result, whatever it is.
TEST_F(TiledParameters, ReadsNoValueThatIsDropped) {
  GradientOptions options;
  options.shape.lengths = {{100, 200}};
  options.dropout = {0.5, 1, 2};
  GradientCase test(options);
  test.inputs().Set(test.problem().v, 0, 77, 0, 2, kInf);
  ReferenceBackend reference;
  const Output expected = test.Forward(reference);
  const Output actual = test.Forward(backend_);
  std::set<bool> seen;
  for (size_t k = 0; k < expected.out.size(); ++k) {
    ASSERT_EQ(std::isfinite(actual.out[k]), std::isfinite(expected.out[k])) << k;
    seen.insert(std::isfinite(expected.out[k]));
  }
  EXPECT_EQ(seen.size(), 2u);
}

}  // namespace
}  // namespace attnd::testing
