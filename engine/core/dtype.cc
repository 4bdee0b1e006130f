#include "engine/core/dtype.h"

#include <algorithm>
#include <cstring>
#include <limits>

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

namespace {

// For a format of `kMantissa` bits under an exponent of bias `kBias`, in one byte.
template <int kMantissa, int kBias, uint32_t kLargest>
uint8_t FloatToFloat8(float value) {
  constexpr uint32_t kShift = 23 - kMantissa;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  uint32_t code;
  if (magnitude < (128u - kBias) << 23) {
    // Subnormal: a sum whose last bit is worth one unit has the code in its low bits, rounded to
    // nearest even by the addition itself.
    constexpr uint32_t kBase = static_cast<uint32_t>(127 + 24 - kBias - kMantissa) << 23;
    const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kBase);
    code = std::bit_cast<uint32_t>(sum) - kBase;
  } else {
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1u);
    code = (rounded - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
  }
  return static_cast<uint8_t>(sign | std::min(code, kLargest));
}

template <typename T>
T Load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

template <typename T>
void Store(void* base, int64_t index, T value) {
  std::memcpy(static_cast<char*>(base) + index * int64_t{sizeof(T)}, &value, sizeof(T));
}

}  // namespace

float Float8E4M3ToFloat(uint8_t bits) {
  if ((bits & 0x7fu) == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t exponent = (bits >> 3) & 0xfu;
  const uint32_t mantissa = bits & 0x7u;
  if (exponent == 0) {  // Zero or subnormal: mantissa * 2^-9.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + (127 - 7)) << 23) | (mantissa << 20));
}

float Float8E5M2ToFloat(uint8_t bits) { return Float16ToFloat(static_cast<uint16_t>(bits << 8)); }

uint8_t FloatToFloat8E4M3(float value) { return FloatToFloat8<3, 7, 0x7eu>(value); }

uint8_t FloatToFloat8E5M2(float value) { return FloatToFloat8<2, 15, 0x7bu>(value); }

float LoadElement(DType dtype, const void* base, int64_t index) {
  switch (dtype) {
    case DType::kFloat32: return Load<float>(base, index);
    case DType::kFloat16: return Float16ToFloat(Load<uint16_t>(base, index));
    case DType::kBFloat16: return BFloat16ToFloat(Load<uint16_t>(base, index));
    case DType::kFloat8E4M3: return Float8E4M3ToFloat(Load<uint8_t>(base, index));
    case DType::kFloat8E5M2: return Float8E5M2ToFloat(Load<uint8_t>(base, index));
    case DType::kUnspecified:
    case DType::kInt32: break;
  }
  return std::numeric_limits<float>::quiet_NaN();
}

void StoreElement(DType dtype, void* base, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat32: return Store(base, index, value);
    case DType::kFloat16: return Store(base, index, FloatToFloat16(value));
    case DType::kBFloat16: return Store(base, index, FloatToBFloat16(value));
    case DType::kFloat8E4M3: return Store(base, index, FloatToFloat8E4M3(value));
    case DType::kFloat8E5M2: return Store(base, index, FloatToFloat8E5M2(value));
    case DType::kUnspecified:
    case DType::kInt32: return;
  }
}

}  // namespace attnd
