// Random numbers, and a tensor's elements as numbers and as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/core/dtype.h"

namespace attnd::testing {

// Normally distributed with unit variance; the same for the same seed.
std::vector<float> Random(int64_t count, uint64_t seed);

// Rounded to `dtype`, and widened again.
std::vector<std::byte> Narrow(DType dtype, const std::vector<float>& values);
std::vector<float> Widen(DType dtype, const std::vector<std::byte>& bytes);

}  // namespace attnd::testing
