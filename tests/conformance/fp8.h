// What FP8 can hold of a result.
#pragma once

#include <algorithm>
#include <cmath>

#include "engine/core/dtype.h"

namespace attnd::testing {

// A result that is stored in `dtype` times `scale`.
struct StoredAs {
  DType dtype = DType::kUnspecified;
  double scale = 1;

  bool IsE4M3() const { return dtype == DType::kFloat8E4M3; }

  // The real value itself, or the end of the range that it is beyond.
  double InRange(double real) const {
    if (!IsFloat8(dtype)) return real;
    const double largest = (IsE4M3() ? 448 : 57344) / scale;
    return std::clamp(real, -largest, largest);
  }

  // Half a unit in the last place: what rounding the real value may cost. 0 for other types.
  double RoundingError(double real) const {
    if (!IsFloat8(dtype)) return 0;
    const double subnormal = (IsE4M3() ? 0x1p-10 : 0x1p-17) / scale;
    return std::max(std::abs(real) * (IsE4M3() ? 0x1p-4 : 0x1p-3), subnormal);
  }
};

}  // namespace attnd::testing
