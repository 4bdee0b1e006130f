// e^x in vectors, for files that Highway compiles once per target (hence the unusual guard).

#if defined(ATTND_ENGINE_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_ENGINE_CPU_EXP_INL_H_
#undef ATTND_ENGINE_CPU_EXP_INL_H_
#else
#define ATTND_ENGINE_CPU_EXP_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

// e^x for x <= 80, for x <= 0 within 8e-8; 0 below -87.3, NaN for NaN
// (which is why it is not Highway's Exp: that one makes it 0). x = k ln 2 + r, |r| <= ln 2 / 2; the
// coefficients are a minimax fit of e^r.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V ExpUpTo80(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Rebind<int32_t, D> di;
  // Past 2^23 floats are integers: the sum is rounded to one, and its low bits are k + 127.
  const V to_integer = hn::Set(d, 12582912.0f + 127.0f);
  const V biased = hn::MulAdd(x, hn::Set(d, 1.44269504f), to_integer);
  const V k = hn::Sub(biased, to_integer);
  V r = hn::NegMulAdd(k, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(k, hn::Set(d, 1.428606765330187e-6f), r);
  V p = hn::MulAdd(r, hn::Set(d, 0.0013814467f), hn::Set(d, 0.0083687808f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416683927f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.1666651964f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.4999999404f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, biased));
  const V e = hn::Mul(p, hn::BitCast(d, exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)), e);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#endif  // The guard above.
