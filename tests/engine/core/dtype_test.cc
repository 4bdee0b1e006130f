#include "engine/core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(DType, SizesAndNames) {
  EXPECT_EQ(SizeOf(DType::kFloat32), 4);
  EXPECT_EQ(SizeOf(DType::kFloat16), 2);
  EXPECT_EQ(SizeOf(DType::kBFloat16), 2);
  EXPECT_EQ(SizeOf(DType::kFloat8E4M3), 1);
  EXPECT_EQ(SizeOf(DType::kFloat8E5M2), 1);
  EXPECT_EQ(SizeOf(DType::kInt32), 4);
  EXPECT_EQ(SizeOf(DType::kUnspecified), 0);
  EXPECT_EQ(Name(DType::kBFloat16), "BFLOAT16");
  EXPECT_EQ(Name(DType::kFloat8E5M2), "FLOAT8_E5M2");
}

// Each finite half against the definition of the format, and back.
TEST(DType, EveryFloat16RoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    const float value = Float16ToFloat(half);
    if (exponent == 31 && mantissa != 0) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_TRUE(std::isnan(Float16ToFloat(FloatToFloat16(value))));
      continue;
    }
    double want =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) want = kInfinity;
    EXPECT_EQ(value, static_cast<float>(bits & 0x8000 ? -want : want)) << bits;
    EXPECT_EQ(FloatToFloat16(value), half);
  }
}

TEST(DType, EveryBFloat16RoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto brain = static_cast<uint16_t>(bits);
    const float value = BFloat16ToFloat(brain);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(value))));
    } else {
      EXPECT_EQ(FloatToBFloat16(value), brain);
    }
  }
}

TEST(DType, RoundsToNearestEven) {
  EXPECT_EQ(Float16ToFloat(FloatToFloat16(2049.0f)), 2048.0f);
  EXPECT_EQ(Float16ToFloat(FloatToFloat16(2051.0f)), 2052.0f);
  EXPECT_EQ(Float16ToFloat(FloatToFloat16(65519.0f)), 65504.0f);
  EXPECT_EQ(Float16ToFloat(FloatToFloat16(65520.0f)), kInfinity);
  EXPECT_EQ(Float16ToFloat(FloatToFloat16(0x1p-25f)), 0.0f);
  EXPECT_EQ(Float16ToFloat(FloatToFloat16(0x1.8p-24f)), 0x1p-23f);
  EXPECT_EQ(BFloat16ToFloat(FloatToBFloat16(257.0f)), 256.0f);
  EXPECT_EQ(BFloat16ToFloat(FloatToBFloat16(259.0f)), 260.0f);
  EXPECT_EQ(BFloat16ToFloat(FloatToBFloat16(std::numeric_limits<float>::max())), kInfinity);
}

TEST(DType, ElementsNeedNoAlignment) {
  unsigned char bytes[16] = {};
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    StoreElement(dtype, bytes + 1, 2, -1.5f);
    EXPECT_EQ(LoadElement(dtype, bytes + 1, 2), -1.5f) << Name(dtype);
  }
}

}  // namespace
}  // namespace attnd
