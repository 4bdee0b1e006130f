// Loops over one row of elements: conversions to and from float32, and a check for NaN and
// infinity. Vectorised with Highway, which picks the instruction set when the program runs.
#pragma once

#include <cstdint>

#include "engine/core/dtype.h"

namespace attnd {

// dst[k] = src[k] as float32, for n contiguous elements of FLOAT32, FLOAT16 or BFLOAT16. `src` may
// have any alignment.
void ToFloat(DType dtype, const void* src, int64_t n, float* dst);

// dst[k] = src[k] * factor, rounded to nearest even. `dst` may have any alignment.
void FromScaledFloat(const float* src, float factor, int64_t n, DType dtype, void* dst);

bool AllFinite(const float* src, int64_t n);

}  // namespace attnd
