// Reader of the golden file that generate.py writes; the format is documented there.
#pragma once

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
  LogicalTensors tensors;   // Into the file's bytes, which live as long as the program.
  std::vector<double> out;  // [sum q_len, h, d_v]
  std::vector<double> lse;  // [sum q_len, h]
};

// All cases, read once. Ends the program if the file is missing or malformed: that is our own bug.
const std::vector<GoldenCase>& GoldenCases();

}  // namespace attnd::testing
