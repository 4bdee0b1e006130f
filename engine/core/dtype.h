// Element types: sizes, names, and the scalar conversions of the 16-bit ones.
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

// Element `index` of an array of kFloat32, kFloat16 or kBFloat16 elements. Stores round to nearest
// even.
float LoadElement(DType dtype, const void* base, int64_t index);
void StoreElement(DType dtype, void* base, int64_t index, float value);

}  // namespace attnd
