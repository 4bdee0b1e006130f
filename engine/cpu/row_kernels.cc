#include "engine/cpu/row_kernels.h"

#include <cstring>

// foreach_target.h comes first, and includes this file once per target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/row_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using BitsTag = hn::Rebind<uint32_t, FloatTag>;
using HalfTag = hn::Rebind<uint16_t, FloatTag>;
using FloatVec = hn::Vec<FloatTag>;
using BitsVec = hn::Vec<BitsTag>;

// The low 16 bits of each lane of `bits`, a bfloat16.
FloatVec FromBFloat16(BitsVec bits) { return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(bits)); }

// The low 16 bits of each lane of `bits`, a half. Exponent and mantissa are moved to where float
// has them; the product with 2^112 corrects the bias, and normalises subnormals.
FloatVec FromFloat16(BitsVec bits) {
  const FloatTag df;
  const BitsTag du;
  const BitsVec magnitude = hn::And(bits, hn::Set(du, 0x7fffu));
  const BitsVec sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  const BitsVec moved = hn::ShiftLeft<13>(magnitude);
  const FloatVec finite = hn::Mul(hn::BitCast(df, moved), hn::Set(df, 0x1p112f));
  const BitsVec special = hn::Or(moved, hn::Set(du, 0x7f800000u));
  const auto is_special = hn::Gt(magnitude, hn::Set(du, 0x7bffu));
  const BitsVec result = hn::IfThenElse(is_special, special, hn::BitCast(du, finite));
  return hn::BitCast(df, hn::Or(result, sign));
}

// Mirrors FloatToBFloat16 of engine/core/dtype.h.
BitsVec ToBFloat16(FloatVec value) {
  const BitsTag du;
  const BitsVec bits = hn::BitCast(du, value);
  const BitsVec high = hn::ShiftRight<16>(bits);
  const BitsVec odd = hn::And(high, hn::Set(du, 1u));
  const BitsVec rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
  const BitsVec quiet = hn::Or(high, hn::Set(du, 0x40u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), quiet, rounded);
}

// Mirrors FloatToFloat16 of engine/core/dtype.cc.
BitsVec ToFloat16(FloatVec value) {
  const FloatTag df;
  const BitsTag du;
  const BitsVec bits = hn::BitCast(du, value);
  const BitsVec magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const BitsVec sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  const BitsVec odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const BitsVec rounded = hn::Add(hn::Add(magnitude, odd), hn::Set(du, 0xfffu - (112u << 23)));
  BitsVec half = hn::ShiftRight<13>(rounded);
  const FloatVec sum = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
  const BitsVec subnormal = hn::Sub(hn::BitCast(du, sum), hn::Set(du, 0x3f000000u));
  half = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x38800000u)), subnormal, half);
  const auto overflows = hn::Gt(magnitude, hn::Set(du, 0x477fefffu));
  half = hn::IfThenElse(overflows, hn::Set(du, 0x7c00u), half);
  const auto is_nan = hn::Gt(magnitude, hn::Set(du, 0x7f800000u));
  half = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00u), half);
  return hn::Or(half, sign);
}

// Calls step(k) for whole vectors of `lanes` elements, and tail(k, count) for what is left.
template <typename Step, typename Tail>
HWY_INLINE void ForVectors(int64_t n, int64_t lanes, const Step& step, const Tail& tail) {
  int64_t k = 0;
  for (; k + lanes <= n; k += lanes) step(k);
  if (k < n) tail(k, static_cast<size_t>(n - k));
}

constexpr int64_t kPrefetchRows = 12;
constexpr int64_t kCacheLine = 64;
constexpr size_t kMaxLanes = HWY_MAX_BYTES / sizeof(float);

template <typename Convert>
HWY_INLINE void Widen(const uint16_t* src, int64_t n, float* dst, const Convert& convert) {
  const FloatTag df;
  const HalfTag dh;
  const BitsTag du;
  ForVectors(
      n, static_cast<int64_t>(hn::Lanes(df)),
      [&](int64_t k) {
        hn::StoreU(convert(hn::PromoteTo(du, hn::LoadU(dh, src + k))), df, dst + k);
      },
      [&](int64_t k, size_t count) {
        uint16_t in[kMaxLanes] = {};
        float out[kMaxLanes];
        std::memcpy(in, src + k, count * sizeof(uint16_t));
        hn::StoreU(convert(hn::PromoteTo(du, hn::LoadU(dh, in))), df, out);
        std::memcpy(dst + k, out, count * sizeof(float));
      });
}

template <typename Convert>
HWY_INLINE void Narrow(const float* src, float factor, int64_t n, uint16_t* dst,
                       const Convert& convert) {
  const FloatTag df;
  const HalfTag dh;
  const hn::Rebind<int32_t, FloatTag> di;
  const FloatVec scale = hn::Set(df, factor);
  const auto half = [&](const float* from) {
    const BitsVec bits = convert(hn::Mul(hn::LoadU(df, from), scale));
    return hn::DemoteTo(dh, hn::BitCast(di, bits));  // All bits are below 2^16.
  };
  ForVectors(
      n, static_cast<int64_t>(hn::Lanes(df)),
      [&](int64_t k) { hn::StoreU(half(src + k), dh, dst + k); },
      [&](int64_t k, size_t count) {
        float in[kMaxLanes] = {};
        uint16_t out[kMaxLanes];
        std::memcpy(in, src + k, count * sizeof(float));
        hn::StoreU(half(in), dh, out);
        std::memcpy(dst + k, out, count * sizeof(uint16_t));
      });
}

void WidenRow(DType dtype, const void* src, int64_t n, float* dst) {
  if (dtype == DType::kFloat32) {
    const FloatTag df;
    const auto* floats = static_cast<const float*>(src);
    ForVectors(
        n, static_cast<int64_t>(hn::Lanes(df)),
        [&](int64_t k) HWY_ATTR { hn::StoreU(hn::LoadU(df, floats + k), df, dst + k); },
        [&](int64_t k, size_t count)
            HWY_ATTR { std::memcpy(dst + k, floats + k, count * sizeof(float)); });
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(src);
  if (dtype == DType::kBFloat16) {
    Widen(halves, n, dst, [](BitsVec bits) HWY_ATTR { return FromBFloat16(bits); });
  } else if (IsFloat8(dtype)) {
    for (int64_t k = 0; k < n; ++k) dst[k] = LoadElement(dtype, src, k);
  } else {
    Widen(halves, n, dst, [](BitsVec bits) HWY_ATTR { return FromFloat16(bits); });
  }
}

// Rows of one head are often far apart, where the processor does not see them coming.
void WidenRows(const RowsToFloat& r) {
  const int64_t size = SizeOf(r.dtype);
  for (int64_t j = 0; j < r.rows; ++j) {
    const std::byte* row = r.src + j * r.src_stride * size;
    if (j + kPrefetchRows < r.rows) {
      const std::byte* later = row + kPrefetchRows * r.src_stride * size;
      for (int64_t k = 0; k < r.cols * size; k += kCacheLine) __builtin_prefetch(later + k);
    }
    WidenRow(r.dtype, row, r.cols, r.dst + j * r.dst_stride);
  }
}

void FromScaledFloat(const float* src, float factor, int64_t n, DType dtype, void* dst) {
  if (dtype == DType::kFloat32) {
    auto* floats = static_cast<float*>(dst);
    const FloatTag df;
    const FloatVec scale = hn::Set(df, factor);
    ForVectors(
        n, static_cast<int64_t>(hn::Lanes(df)),
        [&](int64_t k)
            HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(df, src + k), scale), df, floats + k); },
        [&](int64_t k, size_t count) HWY_ATTR {
          for (size_t c = 0; c < count; ++c) {
            floats[static_cast<size_t>(k) + c] = src[static_cast<size_t>(k) + c] * factor;
          }
        });
    return;
  }
  auto* halves = static_cast<uint16_t*>(dst);
  if (dtype == DType::kBFloat16) {
    Narrow(src, factor, n, halves, [](FloatVec value) HWY_ATTR { return ToBFloat16(value); });
  } else if (IsFloat8(dtype)) {
    for (int64_t k = 0; k < n; ++k) StoreElement(dtype, dst, k, src[k] * factor);
  } else {
    Narrow(src, factor, n, halves, [](FloatVec value) HWY_ATTR { return ToFloat16(value); });
  }
}

// x * 0 is 0 for finite x alone, and a sum with a NaN in it is NaN.
bool AllFinite(const float* src, int64_t n) {
  const FloatTag df;
  const FloatVec zero = hn::Zero(df);
  FloatVec sum = zero;
  float rest = 0;
  ForVectors(
      n, static_cast<int64_t>(hn::Lanes(df)),
      [&](int64_t k) HWY_ATTR { sum = hn::MulAdd(hn::LoadU(df, src + k), zero, sum); },
      [&](int64_t k, size_t count) HWY_ATTR {
        for (size_t c = 0; c < count; ++c) rest += src[static_cast<size_t>(k) + c] * 0.0f;
      });
  return hn::GetLane(hn::SumOfLanes(df, sum)) + rest == 0.0f;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(WidenRows);
HWY_EXPORT(FromScaledFloat);
HWY_EXPORT(AllFinite);

void ToFloat(const RowsToFloat& rows) { HWY_DYNAMIC_DISPATCH(WidenRows)(rows); }

void FromScaledFloat(const float* src, float factor, int64_t n, DType dtype, void* dst) {
  HWY_DYNAMIC_DISPATCH(FromScaledFloat)(src, factor, n, dtype, dst);
}

bool AllFinite(const float* src, int64_t n) { return HWY_DYNAMIC_DISPATCH(AllFinite)(src, n); }

}  // namespace attnd
#endif  // HWY_ONCE
