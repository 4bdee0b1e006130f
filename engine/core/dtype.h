// Element types: sizes, names, and the scalar conversions of the 16-bit and 8-bit ones.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace attnd {

// Values equal attnd.v1.DataType.
enum class DType : uint8_t {
  kUnspecified = 0,
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat8E4M3 = 4,
  kFloat8E5M2 = 5,
  kInt32 = 6,
};

// Bytes of one element; 0 for kUnspecified.
int64_t SizeOf(DType dtype);

inline bool IsFloatingPoint(DType dtype) {
  return dtype != DType::kUnspecified && dtype != DType::kInt32;
}
inline bool IsFloat8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// "FLOAT32", "BFLOAT16", ... as the contract spells them.
std::string_view Name(DType dtype);

inline float BFloat16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest even; NaN stays NaN (quiet).
inline uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float Float16ToFloat(uint16_t bits);

// Rounds to nearest even; overflows to infinity; NaN stays NaN (quiet).
uint16_t FloatToFloat16(float value);

// E4M3 has no infinity: its largest number is 448, and only 0x7f and 0xff are NaN. E5M2 is the high
// byte of a half; its largest number is 57344.
float Float8E4M3ToFloat(uint8_t bits);
float Float8E5M2ToFloat(uint8_t bits);

// Round to nearest even. What is beyond the largest number becomes it, infinity too; NaN stays NaN.
uint8_t FloatToFloat8E4M3(float value);
uint8_t FloatToFloat8E5M2(float value);

// Element `index` of an array of floating point elements. Stores round as the conversions above.
float LoadElement(DType dtype, const void* base, int64_t index);
void StoreElement(DType dtype, void* base, int64_t index, float value);

}  // namespace attnd
