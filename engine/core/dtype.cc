#include "engine/core/dtype.h"

#include <cstring>

namespace attnd {

int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kUnspecified: return 0;
    case DType::kFloat32: return 4;
    case DType::kFloat16: return 2;
    case DType::kBFloat16: return 2;
    case DType::kFloat8E4M3: return 1;
    case DType::kFloat8E5M2: return 1;
    case DType::kInt32: return 4;
  }
  return 0;
}

std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kUnspecified: return "UNSPECIFIED";
    case DType::kFloat32: return "FLOAT32";
    case DType::kFloat16: return "FLOAT16";
    case DType::kBFloat16: return "BFLOAT16";
    case DType::kFloat8E4M3: return "FLOAT8_E4M3";
    case DType::kFloat8E5M2: return "FLOAT8_E5M2";
    case DType::kInt32: return "INT32";
  }
  return "UNSPECIFIED";
}

float Float16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // Zero or subnormal: mantissa * 2^-24, exact in float.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

uint16_t FloatToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520
  if (magnitude < 0x38800000u) {
    // Below the smallest normal half, 2^-14. Adding 0.5 leaves the half's subnormal mantissa,
    // rounded to nearest even by the float addition itself, in the low bits of the sum.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

float LoadElement(DType dtype, const void* base, int64_t index) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(base) + index * 4, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(base) + index * 2, sizeof(bits));
  return dtype == DType::kBFloat16 ? BFloat16ToFloat(bits) : Float16ToFloat(bits);
}

void StoreElement(DType dtype, void* base, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<char*>(base) + index * 4, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? FloatToBFloat16(value) : FloatToFloat16(value);
  std::memcpy(static_cast<char*>(base) + index * 2, &bits, sizeof(bits));
}

}  // namespace attnd
