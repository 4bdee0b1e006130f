// The gradients of the tiled path against the plain loop's.
#include "engine/cpu/tiled_backward.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/core/status.h"
#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/random_gradient_case.h"

namespace attnd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kRandomProblems = 40;  // Sanitizers make them many times slower.
#else
constexpr uint64_t kRandomProblems = 300;
#endif

double Tolerance(DType dtype) {
  if (dtype == DType::kBFloat16) return 3e-2;
  return dtype == DType::kFloat16 ? 8e-3 : 3e-5;
}

// RMS of the difference over the RMS of what is expected, or over 0.1 where that is more; NaN must
// match NaN.
double RmsError(const std::vector<float>& actual, const std::vector<float>& expected) {
  if (actual.size() != expected.size()) return kInf;
  double error = 0, norm = 0;
  for (size_t k = 0; k < actual.size(); ++k) {
    if (std::isnan(actual[k]) && std::isnan(expected[k])) continue;
    const double difference = static_cast<double>(actual[k]) - static_cast<double>(expected[k]);
    error += difference * difference;
    norm += static_cast<double>(expected[k]) * static_cast<double>(expected[k]);
  }
  if (actual.empty() || error == 0) return 0;
  const auto count = static_cast<double>(actual.size());
  return std::sqrt(error / count) / std::max(std::sqrt(norm / count), 0.1);
}

void ExpectGradientsNear(const Gradients& actual, const Gradients& expected, double tolerance) {
  for (size_t k = 0; k < expected.inputs.size(); ++k) {
    EXPECT_LT(RmsError(actual.inputs[k], expected.inputs[k]), tolerance) << "buffer " << k;
    for (size_t e = 0; e < expected.inputs[k].size(); ++e) {
      if (expected.inputs[k][e] != 0) continue;  // Gaps, and what nobody sees, are exact.
      ASSERT_NEAR(actual.inputs[k][e], 0, tolerance) << k << " " << e;
    }
  }
  EXPECT_LT(RmsError(actual.bias, expected.bias), tolerance);
  EXPECT_LT(RmsError(actual.softmax_offset, expected.softmax_offset), tolerance);
}

void ExpectAgreement(const GradientCase& test, AttentionBackend& backend) {
  ReferenceBackend reference;
  ExpectGradientsNear(test.Backward(backend), test.Backward(reference),
                      Tolerance(test.problem().dtype));
}

class TiledBackwardTest : public ::testing::Test {
 protected:
  CpuBackend backend_{3};
};

TEST_F(TiledBackwardTest, AgreesOnRandomProblems) {
  for (uint64_t seed = 1; seed <= kRandomProblems; ++seed) {
    const GradientOptions options = RandomGradientOptions(seed, /*paged=*/false);
    SCOPED_TRACE(Describe(options));
    GradientCase test(options);
    PoisonUnusedBias(test);
    ExpectAgreement(test, backend_);
    if (HasFailure()) return;
  }
}

TEST_F(TiledBackwardTest, AgreesAcrossManyTiles) {
  for (const BandMask& mask : {BandMask{}, BandMask{std::nullopt, 0, false},
                               BandMask{200, 30, true}, BandMask{0, 0, true}}) {
    for (const auto& [q_len, kv_len] :
         std::vector<std::pair<int64_t, int64_t>>{{600, 900}, {900, 257}, {1, 1500}, {1500, 1}}) {
      GradientOptions options;
      options.shape.lengths = {{q_len, kv_len}, {3, 5}};
      options.shape.heads = 4;
      options.shape.kv_heads = 2;
      options.shape.d_qk = 20;
      options.shape.d_v = 12;
      options.shape.mask = mask;
      options.bias_kind = BiasKind::kPostScale;
      options.softmax_kind = SoftmaxKind::kLearnable;
      SCOPED_TRACE(Describe(options));
      ExpectAgreement(GradientCase(options), backend_);
    }
  }
}

TEST_F(TiledBackwardTest, AgreesOnWideHeads) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const auto& [d_qk, d_v] :
         std::vector<std::pair<int64_t, int64_t>>{{128, 128}, {192, 128}, {256, 256}, {1000, 1}}) {
      GradientOptions options;
      options.shape.dtype = dtype;
      options.shape.lengths = {{40, 140}};
      options.shape.d_qk = d_qk;
      options.shape.d_v = d_v;
      SCOPED_TRACE(Describe(options));
      ExpectAgreement(GradientCase(options), backend_);
    }
  }
}

TEST_F(TiledBackwardTest, GivesTheSameBitsOnAnyTeam) {
  for (const bool bias_per_row : {false, true}) {
    GradientOptions options;
    options.shape.lengths = {{500, 900}, {0, 3}, {70, 0}, {33, 290}};
    options.shape.heads = 4;
    options.shape.kv_heads = 2;
    options.shape.mask = {std::nullopt, 0, true};
    options.bias_kind = BiasKind::kPreScale;
    options.bias_per_row = bias_per_row;
    options.softmax_kind = SoftmaxKind::kLearnable;
    options.dropout = {0.2, 3, 4};
    const GradientCase test(options);
    CpuBackend one(1);
    const Gradients expected = test.Backward(one);
    for (const int threads : {2, 3, 5}) {
      CpuBackend team(threads);
      for (int repeat = 0; repeat < 2; ++repeat) EXPECT_EQ(test.Backward(team), expected);
    }
  }
}

// The longer batch is cut into larger tiles.
TEST_F(TiledBackwardTest, GivesASequenceTheSameBitsInAnyBatch) {
  GradientOptions options;
  options.shape.lengths = {{300, 400}, {900, 1300}};
  options.shape.heads = options.shape.kv_heads = 8;
  options.shape.d_qk = options.shape.d_v = 4;
  options.shape.mask = {std::nullopt, 0, true};
  GradientCase test(options);
  const Gradients batched = test.Backward(backend_);
  test.problem().sequences[1] = {};
  const Gradients alone = test.Backward(backend_);
  const AttentionProblem& p = test.problem();
  for (const TensorView* view : {&p.q, &p.k, &p.v}) {
    for (int64_t j = 0; j < (view == &p.q ? 300 : 400); ++j) {
      for (int64_t n = 0; n < 8; ++n) {
        for (int64_t c = 0; c < 4; ++c) {
          ASSERT_EQ(test.GradientAt(alone, *view, {0, j, n, c}),
                    test.GradientAt(batched, *view, {0, j, n, c}));
        }
      }
    }
  }
}

// One bad element, at every place relative to the tiles: gradients that the plain loop keeps finite
// stay finite.
TEST_F(TiledBackwardTest, KeepsBadValuesFromPairsThatDoNotSeeThem) {
  for (const BandMask& mask : {BandMask{std::nullopt, 0, false}, BandMask{3, 2, true}}) {
    for (const double dropout : {0.0, 0.5}) {
      for (const int64_t row : {0, 1, 127, 128, 299}) {
        for (int what = 0; what < 4; ++what) {
          // dO meets O in its row's sum, dropped or not.
          if (what == 3 && dropout > 0) continue;
          GradientOptions options;
          options.shape.lengths = {{300, 300}};
          options.shape.mask = mask;
          options.dropout.probability = dropout;
          SCOPED_TRACE(Describe(options));
          GradientCase test(options);
          const AttentionProblem& p = test.problem();
          const float bad = row % 2 == 0 ? kInf : std::numeric_limits<float>::quiet_NaN();
          const TensorView* views[] = {&p.q, &p.k, &p.v};
          if (what < 3) test.inputs().Set(*views[what], 0, row, 0, 1, bad);
          if (what == 3)
            test.d_out()[static_cast<size_t>(test.inputs().OutIndex(0, row, 0, 1))] = bad;
          ReferenceBackend reference;
          const Gradients expected = test.Backward(reference);
          const Gradients actual = test.Backward(backend_);
          for (size_t k = 0; k < expected.inputs.size(); ++k) {
            for (size_t e = 0; e < expected.inputs[k].size(); ++e) {
              if (!std::isfinite(expected.inputs[k][e])) continue;
              ASSERT_NEAR(actual.inputs[k][e], expected.inputs[k][e], 1e-4)
                  << what << " row " << row << " buffer " << k << " element " << e;
            }
          }
        }
      }
    }
  }
}

// exp(0 - LSE) would overflow for the first. At 1e4 an LSE in float32 is 5e-4 off, and so is P; dQ
// is a sum of keys of 1e4 that cancel.
TEST_F(TiledBackwardTest, StaysFiniteForLogitsFarFromZero) {
  for (const float logit : {-120.0f, -10000.0f, 10000.0f}) {
    for (const int64_t s : {1, 65, 300}) {
      GradientOptions options;
      options.shape.lengths = {{s, s}};
      options.shape.extra_rows = 3;
      options.shape.scale = 1;
      GradientCase test(options);
      for (int64_t j = 0; j < s; ++j) {
        test.inputs().Set(test.problem().q, 0, j, 0, 0, 1);
        test.inputs().Set(test.problem().k, 0, j, 0, 0, logit);
      }
      ReferenceBackend reference;
      const Gradients expected = test.Backward(reference), actual = test.Backward(backend_);
      const double error = std::abs(static_cast<double>(logit)) * 1e-7;
      for (const Buffer buffer : {Buffer::kK, Buffer::kV}) {
        const auto k = static_cast<size_t>(buffer);
        EXPECT_LT(RmsError(actual.inputs[k], expected.inputs[k]), 3e-5 + error) << logit;
      }
      const auto q = static_cast<size_t>(Buffer::kQ);
      EXPECT_LT(RmsError(actual.inputs[q], expected.inputs[q]),
                1e-4 + error * std::abs(static_cast<double>(logit)))
          << logit;
    }
  }
}

// Where the softmax has nothing to choose from, its gradient is 0, and not what rounding leaves.
TEST_F(TiledBackwardTest, IsExactlyZeroForRowsOfOneKey) {
  GradientOptions options;
  options.shape.lengths = {{100, 100}};
  options.shape.d_qk = options.shape.d_v = 64;
  options.shape.scale = 6;
  options.shape.mask = {0, 0, false};
  const GradientCase test(options);
  const Gradients actual = test.Backward(backend_);
  const auto k = static_cast<size_t>(Buffer::kK), q = static_cast<size_t>(Buffer::kQ);
  for (const size_t buffer : {q, k}) {
    for (const float gradient : actual.inputs[buffer]) ASSERT_EQ(gradient, 0);
  }
}

TEST_F(TiledBackwardTest, BiasOfMinusInfinityIsAMask) {
  GradientOptions options;
  options.shape.lengths = {{40, 300}};
  options.bias_kind = BiasKind::kPostScale;
  GradientCase test(options);
  for (size_t cell = 0; cell < test.bias().size(); ++cell) {
    if (cell / 300 % 3 == 0 || cell % 300 < 150) test.bias()[cell] = -kInf;
  }
  ExpectAgreement(test, backend_);
}

// Calls made by hand, on the case's own tensors.
class TiledBackwardCalls : public TiledBackwardTest {
 protected:
  TiledBackwardCalls() {
    GradientOptions options;
    options.shape.lengths = {{70, 200}, {5, 0}};
    options.shape.heads = 2;
    test_.emplace(options);
    out_ = test_->Forward(backend_);
    auto plan = backend_.BuildBackwardPlan(problem());
    EXPECT_TRUE(plan.ok()) << plan.status();
    plan_ = *std::move(plan);
    workspace_.resize(static_cast<size_t>(plan_->workspace_bytes()));
    buffers_.inputs = test_->inputs().Inputs().inputs;
    buffers_.out = reinterpret_cast<const std::byte*>(out_.out.data());
    buffers_.lse = out_.lse.data();
    buffers_.d_out = reinterpret_cast<const std::byte*>(test_->d_out().data());
    for (size_t k = 0; k < grads_.size(); ++k) {
      if (!problem().inputs[k]) continue;
      grads_[k].resize(static_cast<size_t>(*NumBytes(*problem().inputs[k])));
      buffers_.grads[k] = grads_[k].data();
    }
    buffers_.workspace = workspace_;
  }

  const AttentionProblem& problem() const { return test_->problem(); }
  absl::Status Run() { return plan_->Backward(problem(), buffers_); }

  std::optional<GradientCase> test_;
  Output out_;
  std::unique_ptr<BackwardPlan> plan_;
  std::vector<std::byte> workspace_;
  std::array<std::vector<std::byte>, kNumInputBuffers> grads_;
  BackwardBuffers buffers_;
};

TEST_F(TiledBackwardCalls, SaysWhoComputed) {
  EXPECT_EQ(plan_->engine(), "tiled");
  EXPECT_TRUE(Run().ok());
}

TEST_F(TiledBackwardCalls, RefusesAnLseOfOtherInputs) {
  const auto at = static_cast<size_t>(test_->inputs().LseIndex(0, 40, 1));
  const float right = out_.lse[at];
  for (const float wrong : {right + 0.1f, right - 0.1f, 1e30f, -1e30f, kInf, -kInf, kNan, 0.0f}) {
    out_.lse[at] = wrong;
    const absl::Status status = Run();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << wrong;
    EXPECT_EQ(ErrorField(status), "lse");
  }
  out_.lse[at] = right + 0.001f;
  EXPECT_TRUE(Run().ok());
}

// What forward wrote where nothing is computed is the caller's, whatever it has become.
TEST_F(TiledBackwardCalls, ReadsNoLseOfRowsWithoutKeys) {
  out_.lse[static_cast<size_t>(test_->inputs().LseIndex(1, 2, 0))] = 7;
  EXPECT_TRUE(Run().ok());
}

TEST_F(TiledBackwardCalls, RefusesAWorkspaceThatIsTooSmall) {
  buffers_.workspace = buffers_.workspace.first(buffers_.workspace.size() - 1);
  EXPECT_EQ(Run().code(), absl::StatusCode::kInternal);
}

TEST_F(TiledBackwardCalls, EndsEarlyWhenCancelled) {
  CancellationToken token;
  token.Cancel(CancellationToken::Cause::kClient);
  buffers_.cancellation = &token;
  EXPECT_EQ(Run().code(), absl::StatusCode::kCancelled);
}

TEST_F(TiledBackwardCalls, NeedsAWorkspaceOfTheGeometryAlone) {
  AttentionProblem other = problem();
  other.sequences[0] = {1, 1, 0, 0};
  auto plan = backend_.BuildBackwardPlan(other);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ((*plan)->workspace_bytes(), plan_->workspace_bytes());
}

TEST_F(TiledBackwardCalls, RefusesPagesByName) {
  CaseOptions options;
  options.page_size = 4;
  const AttentionCase paged(options);
  const absl::Status status = backend_.BuildBackwardPlan(paged.problem()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ErrorField(status), "spec.layout");
}

}  // namespace
}  // namespace attnd::testing
