// Loops over one row of elements: conversions to and from float32, and a check for NaN and
// infinity. Vectorised (FP8 excepted) with Highway, which picks the instruction set when the
// program runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/core/dtype.h"

namespace attnd {

// Rows of contiguous floating point elements to become float32. src may have any alignment.
struct RowsToFloat {
  DType dtype = DType::kUnspecified;
  const std::byte* src = nullptr;
  int64_t src_stride = 0;  // Elements from one row to the next.
  int64_t rows = 0;
  int64_t cols = 0;
  float* dst = nullptr;
  int64_t dst_stride = 0;
};
void ToFloat(const RowsToFloat& rows);

// dst[k] = src[k] * factor, rounded as StoreElement does. `dst` may have any alignment.
void FromScaledFloat(const float* src, float factor, int64_t n, DType dtype, void* dst);

bool AllFinite(const float* src, int64_t n);

}  // namespace attnd
