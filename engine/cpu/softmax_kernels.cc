#include "engine/cpu/softmax_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

// foreach_target.h comes first, and includes this file once per target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/softmax_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::ScalableTag<float>;
using Vec = hn::Vec<Tag>;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// e^x for x <= 0, within 8e-8; 0 below -87.3, NaN for NaN
// (which is why it is not Highway's Exp: that one makes it 0). x = k ln 2 + r, |r| <= ln 2 / 2; the
// coefficients are a minimax fit of e^r.
HWY_INLINE Vec ExpOfNonPositive(Vec x) {
  const Tag d;
  const hn::Rebind<int32_t, Tag> di;
  const Vec k = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  Vec r = hn::NegMulAdd(k, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(k, hn::Set(d, 1.428606765330187e-6f), r);
  Vec p = hn::MulAdd(r, hn::Set(d, 0.0013814467f), hn::Set(d, 0.0083687808f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416683927f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.1666651964f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.4999999404f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, k), hn::Set(di, 127)));
  const Vec e = hn::Mul(p, hn::BitCast(d, exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)), e);
}

// The first `count` floats at p; `fill` in the other lanes.
HWY_INLINE Vec LoadFirst(const float* p, size_t count, Vec fill) {
  const Tag d;
  return hn::IfThenElse(hn::FirstN(d, count), hn::LoadU(d, p), fill);
}

// Applies the soft cap to n logits in place. tanh is Highway's; it does not keep NaN.
void CapRow(float* s, int64_t n, float scale, float cap) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Vec to_cap = hn::Set(d, scale / cap);
  const Vec cap_vec = hn::Set(d, cap);
  for (int64_t j = 0; j < n; j += lanes) {
    const auto count = static_cast<size_t>(std::min(lanes, n - j));
    const Vec x = hn::Mul(LoadFirst(s + j, count, hn::Zero(d)), to_cap);
    const Vec capped = hn::Mul(cap_vec, hn::Tanh(d, x));
    hn::BlendedStore(hn::IfThenElse(hn::IsNaN(x), x, capped), hn::FirstN(d, count), d, s + j);
  }
}

// max(scale * s_j); a NaN may be left out.
float MaxOfRow(const float* s, int64_t n, float scale) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Vec scale_vec = hn::Set(d, scale);
  const Vec lowest = hn::Set(d, kMinusInfinity);
  Vec max0 = lowest, max1 = lowest, max2 = lowest, max3 = lowest;
  int64_t j = 0;
  for (; j + 4 * lanes <= n; j += 4 * lanes) {
    max0 = hn::Max(max0, hn::Mul(hn::LoadU(d, s + j), scale_vec));
    max1 = hn::Max(max1, hn::Mul(hn::LoadU(d, s + j + lanes), scale_vec));
    max2 = hn::Max(max2, hn::Mul(hn::LoadU(d, s + j + 2 * lanes), scale_vec));
    max3 = hn::Max(max3, hn::Mul(hn::LoadU(d, s + j + 3 * lanes), scale_vec));
  }
  for (; j < n; j += lanes) {
    const auto count = static_cast<size_t>(std::min(lanes, n - j));
    const Vec x = hn::Mul(hn::LoadU(d, s + j), scale_vec);
    max0 = hn::Max(max0, hn::IfThenElse(hn::FirstN(d, count), x, lowest));
  }
  const Vec max = hn::Max(hn::Max(max0, max1), hn::Max(max2, max3));
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

// s_j = exp(scale * s_j - m); returns their sum. The product is rounded before the difference, as
// it was for m: fused, the largest logit's exponent would be the rounding error of m, not 0.
float ExpOfRow(float* s, int64_t n, float scale, float m) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Vec scale_vec = hn::Set(d, scale);
  const Vec m_vec = hn::Set(d, m);
  Vec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) {
    const Vec e0 = ExpOfNonPositive(hn::Sub(hn::Mul(hn::LoadU(d, s + j), scale_vec), m_vec));
    const Vec e1 =
        ExpOfNonPositive(hn::Sub(hn::Mul(hn::LoadU(d, s + j + lanes), scale_vec), m_vec));
    hn::StoreU(e0, d, s + j);
    hn::StoreU(e1, d, s + j + lanes);
    sum0 = hn::Add(sum0, e0);
    sum1 = hn::Add(sum1, e1);
  }
  for (; j < n; j += lanes) {
    const auto count = static_cast<size_t>(std::min(lanes, n - j));
    const auto mask = hn::FirstN(d, count);
    const Vec x = hn::Sub(hn::Mul(hn::LoadU(d, s + j), scale_vec), m_vec);
    const Vec e = hn::IfThenElseZero(mask, ExpOfNonPositive(x));
    hn::BlendedStore(e, mask, d, s + j);
    sum0 = hn::Add(sum0, e);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}

void ScaleRow(float* x, int64_t n, float factor) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Vec factor_vec = hn::Set(d, factor);
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + j), factor_vec), d, x + j);
  }
  for (; j < n; ++j) x[j] *= factor;
}

void SoftmaxRow(const SoftmaxBlock& b, int64_t row) {
  float* s = b.logits + row * b.ld;
  // Visible columns.
  const int64_t first = std::clamp<int64_t>(b.visible[row].first - b.first_key, 0, b.keys);
  const int64_t last = std::clamp<int64_t>(b.visible[row].last - b.first_key, first, b.keys);
  const int64_t n = last - first;
  float scale = b.scale;
  if (b.softcap != 0) {
    CapRow(s + first, n, scale, b.softcap);
    scale = 1;
  }
  float m = std::max(MaxOfRow(s + first, n, scale), b.m[row]);
  if (m == kMinusInfinity) {
    // No key seen, or only logits of -inf; but a NaN among them must come out.
    const auto is_nan = [scale](float x) { return std::isnan(x * scale); };
    if (std::none_of(s + first, s + last, is_nan)) {
      std::fill(s, s + b.keys, 0.0f);
      return;
    }
    m = std::numeric_limits<float>::quiet_NaN();
  }
  std::fill(s, s + first, 0.0f);
  std::fill(s + last, s + b.keys, 0.0f);
  const float sum = ExpOfRow(s + first, n, scale, m);
  if (b.m[row] != kMinusInfinity && b.m[row] != m) {
    const float factor = std::exp(b.m[row] - m);
    ScaleRow(b.acc + row * b.d_v, b.d_v, factor);
    b.l[row] *= factor;
  }
  b.l[row] += sum;
  b.m[row] = m;
}

void OnlineSoftmax(const SoftmaxBlock& block) {
  for (int64_t row = 0; row < block.rows; ++row) SoftmaxRow(block, row);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(OnlineSoftmax);

void OnlineSoftmax(const SoftmaxBlock& block) { HWY_DYNAMIC_DISPATCH(OnlineSoftmax)(block); }

}  // namespace attnd
#endif  // HWY_ONCE
