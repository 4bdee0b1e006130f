// Reader of the golden file that generate.py writes; the format is documented there.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/conformance/pack.h"

namespace attnd::testing {

struct GoldenCase {
  std::string group;
  std::string name;
  DType dtype = DType::kUnspecified;
  Geometry geometry;
  Causal causal = Causal::kNone;
  Alignment alignment = Alignment::kUnspecified;
  std::optional<int64_t> window_left, window_right;
  std::optional<double> scale, softcap;
  BiasKind bias_kind = BiasKind::kNone;
  std::vector<int64_t> bias_shape;  // Empty: no bias.
  std::optional<AlibiShard> alibi;
  SoftmaxKind softmax_kind = SoftmaxKind::kVanilla;
  std::optional<Dropout> dropout;
  double largest_logit = 0;      // In absolute value.
  std::optional<Fp8Scales> fp8;  // With an FP8 dtype.
  // Spans go into the file's bytes, which live as long as the program.
  LogicalTensors tensors;
  std::span<const std::byte> bias, softmax_offset;

  // With an FP8 dtype: S and O, then dP, dQ, dK and dV.
  std::vector<float> amax;

  // Answers are real values. They are NaN where nothing contributes to them: there they must be
  // exactly 0.
  std::vector<double> out;  // [sum q_len, h, d_v]
  std::vector<double> lse;  // [sum q_len, h]

  bool has_gradients = false;
  std::span<const std::byte> d_out;         // As out, in dtype.
  std::array<std::vector<double>, 3> dqkv;  // As the tensors.
  std::vector<double> d_bias, d_softmax_offset;
};

// What float32's rounding of logits adds to relative bounds, where they are large. From 10^6 on
// nothing: there all logits of a row are the same number in float64 as well.
inline double LogitAllowance(const GoldenCase& c) {
  const bool matters = c.largest_logit > 200 && c.largest_logit < 1e6;
  return matters ? 8 * std::ldexp(c.largest_logit, -24) : 0;
}

// All cases, read once. Ends the program if the file is missing or malformed: that is our own bug.
const std::vector<GoldenCase>& GoldenCases();

}  // namespace attnd::testing
