// The reference loop's gradients against central differences of its forward pass.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/gradient_case.h"

namespace attnd::testing {
namespace {

struct NamedOptions {
  std::string name;
  GradientOptions options;
};

GradientOptions Small() {
  GradientOptions o;
  o.shape.lengths = {{3, 4}, {2, 0}, {4, 5}};
  o.shape.extra_rows = 1;
  o.shape.heads = 4;
  o.shape.kv_heads = 2;
  o.shape.d_qk = 3;
  o.shape.d_v = 2;
  o.shape.q_format = Format::kThd;
  o.shape.out_dtype = DType::kFloat32;
  return o;
}

std::vector<NamedOptions> Problems() {
  std::vector<NamedOptions> all;
  const auto add = [&](const char* name, const std::function<void(GradientOptions&)>& change) {
    all.push_back({name, Small()});
    change(all.back().options);
  };
  add("Plain", [](GradientOptions&) {});
  add("CausalBottomRight", [](GradientOptions& o) { o.shape.mask = {{}, 0, true}; });
  add("WindowTopLeft", [](GradientOptions& o) { o.shape.mask = {1, 1, false}; });
  add("NegativeScale", [](GradientOptions& o) { o.shape.scale = -0.8; });
  add("SoftCap", [](GradientOptions& o) { o.shape.softcap = 0.9; });
  add("PreScaleOfEveryPair", [](GradientOptions& o) {
    o.bias_kind = BiasKind::kPreScale;
    o.bias_per_sequence = o.bias_per_head = true;
    o.shape.softcap = 1.5;
  });
  add("PostScalePerHead", [](GradientOptions& o) {
    o.bias_kind = BiasKind::kPostScale;
    o.bias_per_head = true;
    o.shape.softcap = 1.5;
  });
  add("PostScalePerSequence", [](GradientOptions& o) {
    o.bias_kind = BiasKind::kPostScale;
    o.bias_per_sequence = true;
  });
  add("PostScaleOfOneRow", [](GradientOptions& o) {
    o.bias_kind = BiasKind::kPostScale;
    o.bias_per_row = false;
  });
  add("Alibi", [](GradientOptions& o) {
    o.bias_kind = BiasKind::kAlibi;
    o.shape.mask.bottom_right = true;
  });
  add("OffByOne", [](GradientOptions& o) { o.softmax_kind = SoftmaxKind::kOffByOne; });
  add("Learnable", [](GradientOptions& o) { o.softmax_kind = SoftmaxKind::kLearnable; });
  add("Dropout", [](GradientOptions& o) { o.dropout = {0.4, 11, 5}; });
  add("Everything", [](GradientOptions& o) {
    o.bias_kind = BiasKind::kPreScale;
    o.bias_per_head = true;
    o.softmax_kind = SoftmaxKind::kLearnable;
    o.dropout = {0.25, 3, 1};
    o.shape.softcap = 2;
    o.shape.mask = {2, 0, true};
  });
  return all;
}

class ReferenceBackward : public ::testing::TestWithParam<NamedOptions> {
 protected:
  ReferenceBackward() : case_(GetParam().options), gradients_(case_.Backward(backend_)) {}

  // d loss / d value, where `set` changes a value.
  double Difference(double value, const std::function<void(float)>& set) {
    const auto above = static_cast<float>(value + 0.01), below = static_cast<float>(value - 0.01);
    set(above);
    const double high = case_.Loss(backend_);
    set(below);
    const double low = case_.Loss(backend_);
    set(static_cast<float>(value));
    return (high - low) / (static_cast<double>(above) - below);
  }

  void CheckView(const TensorView& view, const char* name) {
    const AttentionProblem& p = case_.problem();
    const bool is_q = view.buffer == Buffer::kQ;
    for (int64_t i = 0; i < p.batch; ++i) {
      const SequenceExtent& extent = p.sequences[static_cast<size_t>(i)];
      for (int64_t j = 0; j < (is_q ? extent.q_len : extent.kv_len); ++j) {
        for (int64_t n = 0; n < (is_q ? p.num_heads : p.num_kv_heads); ++n) {
          for (int64_t c = 0; c < (view.buffer == Buffer::kV ? p.head_dim_v : p.head_dim_qk); ++c) {
            const double want = Difference(case_.inputs().Get(view, i, j, n, c), [&](float x) {
              case_.inputs().Set(view, i, j, n, c, x);
            });
            EXPECT_NEAR(case_.GradientAt(gradients_, view, {i, j, n, c}), want, kTolerance)
                << name << " " << i << " " << j << " " << n << " " << c;
          }
        }
      }
    }
  }

  void CheckArray(std::vector<float>& values, const std::vector<float>& got, const char* name) {
    ASSERT_EQ(got.size(), values.size());
    for (size_t k = 0; k < values.size(); ++k) {
      const double want = Difference(values[k], [&](float x) { values[k] = x; });
      EXPECT_NEAR(got[k], want, kTolerance) << name << " " << k;
    }
  }

  static constexpr double kTolerance = 1e-3;
  ReferenceBackend backend_;
  GradientCase case_;
  Gradients gradients_;
};

TEST_P(ReferenceBackward, AgreesWithFiniteDifferences) {
  CheckView(case_.problem().q, "dQ");
  CheckView(case_.problem().k, "dK");
  CheckView(case_.problem().v, "dV");
  CheckArray(case_.bias(), gradients_.bias, "dBias");
  CheckArray(case_.softmax_offset(), gradients_.softmax_offset, "dSoftmaxOffset");
}

TEST_P(ReferenceBackward, WritesEveryElement) {
  for (const std::vector<float>& buffer : gradients_.inputs) {
    for (const float x : buffer) EXPECT_TRUE(std::isfinite(x));
  }
  for (const float x : gradients_.bias) EXPECT_TRUE(std::isfinite(x));
}

INSTANTIATE_TEST_SUITE_P(Cpu, ReferenceBackward, ::testing::ValuesIn(Problems()),
                         [](const auto& param) { return param.param.name; });

TEST(ReferenceBackwardPlan, RefusesPagesByTheLayout) {
  CaseOptions options;
  options.page_size = 4;
  const absl::Status status =
      ReferenceBackend().BuildBackwardPlan(AttentionCase(options).problem()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ErrorField(status), "spec.layout");
}

}  // namespace
}  // namespace attnd::testing
