// All 65536 values of both 16-bit types, and what lies between them, by the scalar conversions of
// engine/core and by the vector ones of engine/cpu.
#include "engine/cpu/row_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "engine/core/dtype.h"
#include "tests/engine/cpu/simd_targets.h"

namespace attnd {
namespace {

struct HalfFormat {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
};
constexpr HalfFormat kFloat16 = {DType::kFloat16, 5, 10};
constexpr HalfFormat kBFloat16 = {DType::kBFloat16, 8, 7};

// The value of `bits` from IEEE 754's definition; exact in double.
double ValueOf(const HalfFormat& f, uint32_t bits) {
  const int exponent = static_cast<int>(bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << f.mantissa_bits) - 1);
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const double sign = (bits >> 15) != 0 ? -1 : 1;
  if (exponent == (1 << f.exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  const int significand = exponent == 0 ? mantissa : mantissa + (1 << f.mantissa_bits);
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias - f.mantissa_bits);
}

uint32_t InfinityOf(const HalfFormat& f) {
  return ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
}

float ToFloat32(const HalfFormat& f, uint16_t bits) { return LoadElement(f.dtype, &bits, 0); }

uint16_t FromFloat32(const HalfFormat& f, float value) {
  uint16_t bits = 0;
  StoreElement(f.dtype, &bits, 0, value);
  return bits;
}

bool IsNanOf(const HalfFormat& f, uint32_t bits) { return (bits & 0x7fffu) > InfinityOf(f); }

class HalfTypes : public ::testing::TestWithParam<HalfFormat> {};

TEST_P(HalfTypes, AllValuesSurviveTheRoundTrip) {
  const HalfFormat f = GetParam();
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const double value = ValueOf(f, bits);
    const float wide = ToFloat32(f, half);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_TRUE(IsNanOf(f, FromFloat32(f, wide))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), value) << bits;
    ASSERT_EQ(std::signbit(wide), (bits >> 15) != 0) << bits;
    ASSERT_EQ(FromFloat32(f, wide), half) << bits;
  }
}

TEST_P(HalfTypes, RoundsToNearestEvenBetweenAllNeighbours) {
  const HalfFormat f = GetParam();
  for (uint32_t bits = 0; bits < InfinityOf(f); ++bits) {
    // The neighbour above the largest value is where infinity would continue the scale.
    const double low = ValueOf(f, bits);
    const double high =
        bits + 1 == InfinityOf(f) ? 2 * low - ValueOf(f, bits - 1) : ValueOf(f, bits + 1);
    const auto middle = static_cast<float>(low + (high - low) / 2);
    ASSERT_EQ(static_cast<double>(middle), low + (high - low) / 2);
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float s = sign != 0 ? -1 : 1;
      ASSERT_EQ(FromFloat32(f, s * middle), even | sign) << bits;
      ASSERT_EQ(FromFloat32(f, s * std::nextafter(middle, 0.0f)), bits | sign) << bits;
      ASSERT_EQ(FromFloat32(f, s * std::nextafter(middle, HUGE_VALF)), (bits + 1) | sign) << bits;
    }
  }
  EXPECT_EQ(FromFloat32(f, HUGE_VALF), InfinityOf(f));
  EXPECT_EQ(FromFloat32(f, -HUGE_VALF), InfinityOf(f) | 0x8000u);
}

TEST_P(HalfTypes, VectorsWidenLikeScalars) {
  const HalfFormat f = GetParam();
  std::vector<uint16_t> halves(0x10000 + 3);  // Not a multiple of any vector.
  for (size_t k = 0; k < halves.size(); ++k) halves[k] = static_cast<uint16_t>(k);
  testing::ForEachTarget([&] {
    std::vector<float> floats(halves.size());
    const auto size = static_cast<int64_t>(halves.size());
    ToFloat(
        {f.dtype, reinterpret_cast<const std::byte*>(halves.data()), 0, 1, size, floats.data(), 0});
    for (size_t k = 0; k < halves.size(); ++k) {
      const float expected = ToFloat32(f, halves[k]);
      ASSERT_EQ(std::isnan(floats[k]), std::isnan(expected)) << k;
      if (std::isnan(expected)) continue;
      ASSERT_EQ(std::memcmp(&floats[k], &expected, 4), 0) << k;
    }
  });
}

TEST_P(HalfTypes, VectorsNarrowLikeScalars) {
  const HalfFormat f = GetParam();
  std::vector<float> floats;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
      floats.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  floats.push_back(1);
  testing::ForEachTarget([&] {
    std::vector<uint16_t> halves(floats.size());
    FromScaledFloat(floats.data(), 1, static_cast<int64_t>(floats.size()), f.dtype, halves.data());
    for (size_t k = 0; k < floats.size(); ++k) {
      const uint16_t expected = FromFloat32(f, floats[k]);
      if (std::isnan(floats[k])) {
        ASSERT_TRUE(IsNanOf(f, halves[k])) << k;
      } else {
        ASSERT_EQ(halves[k], expected) << floats[k];
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, HalfTypes, ::testing::Values(kFloat16, kBFloat16),
                         [](const auto& test) { return std::string(Name(test.param.dtype)); });

TEST(RowKernels, ScaleFloatsAndStoreHalves) {
  testing::ForEachTarget([&] {
    for (int64_t n = 1; n < 70; ++n) {
      std::vector<float> source(static_cast<size_t>(n));
      for (int64_t k = 0; k < n; ++k) source[static_cast<size_t>(k)] = static_cast<float>(k) - 3;
      std::vector<float> floats(static_cast<size_t>(n) + 1, 77);
      std::vector<uint16_t> halves(static_cast<size_t>(n) + 1, 77);
      FromScaledFloat(source.data(), 0.5f, n, DType::kFloat32, floats.data());
      FromScaledFloat(source.data(), 0.5f, n, DType::kFloat16, halves.data());
      for (int64_t k = 0; k < n; ++k) {
        const float expected = (static_cast<float>(k) - 3) / 2;
        ASSERT_EQ(floats[static_cast<size_t>(k)], expected);
        ASSERT_EQ(Float16ToFloat(halves[static_cast<size_t>(k)]), expected);
      }
      ASSERT_EQ(floats.back(), 77);
      ASSERT_EQ(halves.back(), 77);
    }
  });
}

TEST(RowKernels, ConvertFloat8LikeElements) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    std::vector<uint8_t> codes(256);
    for (size_t k = 0; k < codes.size(); ++k) codes[k] = static_cast<uint8_t>(k);
    std::vector<float> floats(codes.size());
    ToFloat({dtype, reinterpret_cast<const std::byte*>(codes.data()), 0, 1, 256, floats.data(), 0});
    std::vector<uint8_t> halved(codes.size());
    FromScaledFloat(floats.data(), 0.5f, 256, dtype, halved.data());
    for (int64_t k = 0; k < 256; ++k) {
      const float value = LoadElement(dtype, codes.data(), k);
      uint8_t expected = 0;
      StoreElement(dtype, &expected, 0, value * 0.5f);
      EXPECT_EQ(halved[static_cast<size_t>(k)], expected) << k;
      if (std::isnan(value)) continue;
      EXPECT_EQ(floats[static_cast<size_t>(k)], value) << k;
    }
  }
}

TEST(RowKernels, FindEveryNonFiniteElement) {
  testing::ForEachTarget([&] {
    for (int64_t n = 1; n < 70; ++n) {
      std::vector<float> row(static_cast<size_t>(n), -3e38f);
      ASSERT_TRUE(AllFinite(row.data(), n));
      for (int64_t k = 0; k < n; ++k) {
        for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
          row[static_cast<size_t>(k)] = bad;
          ASSERT_FALSE(AllFinite(row.data(), n)) << n << " " << k;
        }
        row[static_cast<size_t>(k)] = 1;
      }
    }
  });
}

TEST(ToFloat, CopiesRowsAtTheirStridesAndNothingBetween) {
  testing::ForEachTarget([] {
    for (const int64_t cols : {1, 15, 16, 33}) {
      for (const int64_t rows : {1, 2, 30}) {
        const int64_t src_stride = cols + 3;
        const int64_t dst_stride = cols + 1;
        std::vector<float> src(static_cast<size_t>(rows * src_stride));
        for (size_t k = 0; k < src.size(); ++k) src[k] = static_cast<float>(k);
        std::vector<float> dst(static_cast<size_t>(rows * dst_stride), -1);
        ToFloat({DType::kFloat32, reinterpret_cast<const std::byte*>(src.data()), src_stride, rows,
                 cols, dst.data(), dst_stride});
        for (int64_t j = 0; j < rows; ++j) {
          for (int64_t c = 0; c < dst_stride; ++c) {
            const float expected = c < cols ? static_cast<float>(j * src_stride + c) : -1;
            ASSERT_EQ(dst[static_cast<size_t>(j * dst_stride + c)], expected) << j << " " << c;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace attnd
