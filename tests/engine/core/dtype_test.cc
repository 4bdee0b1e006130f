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

// A format of one byte, by its definition.
struct Float8 {
  int mantissa_bits, bias;
  int largest;  // Code of the largest number.
  float (*decode)(uint8_t);
  uint8_t (*encode)(float);

  double Number(int code) const {
    const int one = 1 << mantissa_bits;
    const int exponent = code >> mantissa_bits, mantissa = code % one;
    return exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                         : std::ldexp(one + mantissa, exponent - bias - mantissa_bits);
  }
};

constexpr Float8 kFloat8s[] = {{3, 7, 0x7e, Float8E4M3ToFloat, FloatToFloat8E4M3},
                               {2, 15, 0x7b, Float8E5M2ToFloat, FloatToFloat8E5M2}};

TEST(DType, EveryFloat8RoundTrips) {
  for (const Float8& format : kFloat8s) {
    for (int code = 0; code < 0x100; ++code) {
      const float value = format.decode(static_cast<uint8_t>(code));
      const int magnitude = code & 0x7f;
      const float sign = code < 0x80 ? 1.0f : -1.0f;
      if (magnitude > format.largest) continue;
      EXPECT_EQ(value, sign * static_cast<float>(format.Number(magnitude))) << code;
      EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
      EXPECT_EQ(format.encode(value), code);
    }
  }
  EXPECT_EQ(kFloat8s[0].Number(0x7e), 448);
  EXPECT_EQ(kFloat8s[1].Number(0x7b), 57344);
}

TEST(DType, Float8sHaveTheirOwnSpecialValues) {
  for (const int sign : {0, 0x80}) {
    const auto code = [&](int magnitude) { return static_cast<uint8_t>(sign | magnitude); };
    EXPECT_TRUE(std::isnan(Float8E4M3ToFloat(code(0x7f))));
    EXPECT_EQ(Float8E5M2ToFloat(code(0x7c)), sign == 0 ? kInfinity : -kInfinity);
    for (const int nan : {0x7d, 0x7e, 0x7f}) EXPECT_TRUE(std::isnan(Float8E5M2ToFloat(code(nan))));
    const float nan = std::copysign(std::nanf(""), sign == 0 ? 1.0f : -1.0f);
    EXPECT_EQ(FloatToFloat8E4M3(nan), code(0x7f));
    EXPECT_EQ(FloatToFloat8E5M2(nan), code(0x7f));
  }
}

// Between each two neighbours: the middle goes to the even one, and what is off it to the nearer.
TEST(DType, Float8sRoundToNearestEven) {
  for (const Float8& format : kFloat8s) {
    for (int code = 0; code < format.largest; ++code) {
      const auto middle = static_cast<float>((format.Number(code) + format.Number(code + 1)) / 2);
      EXPECT_EQ(format.encode(middle), code + code % 2) << middle;
      EXPECT_EQ(format.encode(std::nextafter(middle, 0.0f)), code) << middle;
      EXPECT_EQ(format.encode(std::nextafter(middle, kInfinity)), code + 1) << middle;
      EXPECT_EQ(format.encode(-middle), 0x80 + code + code % 2) << middle;
    }
  }
}

TEST(DType, Float8sSaturate) {
  for (const Float8& format : kFloat8s) {
    const auto largest = static_cast<float>(format.Number(format.largest));
    for (const float value : {largest, std::nextafter(largest, kInfinity), 1.07f * largest,
                              2 * largest, std::numeric_limits<float>::max(), kInfinity}) {
      EXPECT_EQ(format.encode(value), format.largest) << value;
      EXPECT_EQ(format.encode(-value), 0x80 + format.largest) << value;
    }
    EXPECT_EQ(format.encode(std::numeric_limits<float>::denorm_min()), 0);
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
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                      DType::kFloat8E5M2}) {
    StoreElement(dtype, bytes + 1, 2, -1.5f);
    EXPECT_EQ(LoadElement(dtype, bytes + 1, 2), -1.5f) << Name(dtype);
  }
}

}  // namespace
}  // namespace attnd
