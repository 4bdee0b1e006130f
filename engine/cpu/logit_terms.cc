#include "engine/cpu/logit_terms.h"

#include <algorithm>
#include <limits>

// foreach_target.h comes first, and includes this file once per target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/logit_terms.cc"
#include "hwy/foreach_target.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, kLaneGroup>;
using Vec = hn::Vec<Tag>;

// Calls fn(offset) for each vector of a block of `keys` rows and `lanes` lanes.
template <typename Fn>
HWY_INLINE void ForVectors(int64_t keys, int64_t lanes, const Fn& fn) {
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < lanes; lane += static_cast<int64_t>(hn::Lanes(Tag()))) {
      fn(j * kPanelRows + lane);
    }
  }
}

HWY_INLINE Vec Hidden(Vec term, Vec logit) {
  const Vec lowest = hn::Set(Tag(), -std::numeric_limits<float>::infinity());
  return hn::IfThenElse(hn::Eq(term, lowest), lowest, logit);
}

void AddTerms(const LogitTerms& t) {
  const Tag d;
  const bool before = t.before_scale;
  if (t.softcap == 0) {
    const Vec scale = hn::Set(d, t.scale);
    ForVectors(t.keys, kLaneGroup, [&](int64_t at) HWY_ATTR {
      const Vec x = hn::LoadU(d, t.logits + at), term = hn::LoadU(d, t.terms + at);
      const Vec sum = before ? hn::Mul(hn::Add(x, term), scale) : hn::MulAdd(x, scale, term);
      hn::StoreU(Hidden(term, sum), d, t.logits + at);
    });
    return;
  }
  const Vec to_cap = hn::Set(d, t.scale / t.softcap);
  const Vec cap = hn::Set(d, t.softcap);
  ForVectors(t.keys, kLaneGroup, [&](int64_t at) HWY_ATTR {
    const Vec term = hn::LoadU(d, t.terms + at);
    const Vec product = hn::LoadU(d, t.logits + at);
    const Vec x = hn::Mul(before ? hn::Add(product, term) : product, to_cap);
    // Highway's tanh does not keep NaN.
    const Vec tanh = hn::IfThenElse(hn::IsNaN(x), x, hn::Tanh(d, x));
    const Vec sum = before ? hn::Mul(cap, tanh) : hn::MulAdd(cap, tanh, term);
    hn::StoreU(Hidden(term, sum), d, t.logits + at);
  });
}

void ScaleLogits(int64_t keys, const float* factors, float* logits) {
  const Tag d;
  ForVectors(keys, kLaneGroup, [&](int64_t at) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(d, logits + at), hn::LoadU(d, factors + at)), d, logits + at);
  });
}

void FillAlibi(const AlibiLanes& lanes, int64_t keys, float* terms) {
  const Tag d;
  ForVectors(keys, kPanelRows, [&](int64_t at) HWY_ATTR {
    const auto lane = static_cast<size_t>(at % kPanelRows);
    const Vec key = hn::Set(d, static_cast<float>(at / kPanelRows));
    const Vec distance = hn::Abs(hn::Add(hn::LoadU(d, lanes.distance.data() + lane), key));
    const Vec slope = hn::LoadU(d, lanes.slope.data() + lane);
    hn::StoreU(hn::Neg(hn::Mul(slope, distance)), d, terms + at);
  });
}

using BitsTag = hn::Rebind<uint32_t, Tag>;
using BitsVec = hn::Vec<BitsTag>;

// The halves of the 64-bit products of each lane with `factor`.
HWY_INLINE void MultiplyWide(BitsVec x, uint32_t factor, BitsVec& high, BitsVec& low) {
  const BitsTag du;
#if HWY_TARGET == HWY_SCALAR
  const uint64_t product = uint64_t{hn::GetLane(x)} * factor;
  high = hn::Set(du, static_cast<uint32_t>(product >> 32));
  low = hn::Set(du, static_cast<uint32_t>(product));
#else
  const hn::Repartition<uint64_t, BitsTag> dw;
  const BitsVec by = hn::Set(du, factor);
  const auto even = hn::MulEven(x, by);
  const auto odd = hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(dw, x))), by);
  high = hn::OddEven(hn::BitCast(du, odd), hn::BitCast(du, hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(du, hn::ShiftLeft<32>(odd)), hn::BitCast(du, even));
#endif
}

// Four numbers for each of the lanes from `lane` on, whose counters begin with `four`.
HWY_INLINE void Philox(const DropoutLanes& lanes, size_t lane, uint64_t four, BitsVec (&c)[4]) {
  const BitsTag du;
  BitsVec key0 = hn::LoadU(du, lanes.key0.data() + lane);
  BitsVec key1 = hn::LoadU(du, lanes.key1.data() + lane);
  c[0] = hn::Set(du, static_cast<uint32_t>(four));
  c[1] = hn::Set(du, static_cast<uint32_t>(four >> 32));
  c[2] = hn::LoadU(du, lanes.row_low.data() + lane);
  c[3] = hn::LoadU(du, lanes.row_high.data() + lane);
  for (int round = 0; round < 10; ++round) {
    BitsVec high_a, low_a, high_b, low_b;
    MultiplyWide(c[0], 0xD2511F53, high_a, low_a);
    MultiplyWide(c[2], 0xCD9E8D57, high_b, low_b);
    c[0] = hn::Xor(hn::Xor(high_b, c[1]), key0);
    c[1] = low_b;
    c[2] = hn::Xor(hn::Xor(high_a, c[3]), key1);
    c[3] = low_a;
    key0 = hn::Add(key0, hn::Set(du, 0x9E3779B9));
    key1 = hn::Add(key1, hn::Set(du, 0xBB67AE85));
  }
}

void FillKeepFactors(const DropoutLanes& lanes, int64_t first_key, int64_t keys, float* factors) {
  const Tag d;
  const BitsTag du;
  const bool drops_all = lanes.threshold > 0xFFFFFFFF;
  const BitsVec threshold = hn::Set(du, static_cast<uint32_t>(lanes.threshold));
  const Vec keep = hn::Set(d, drops_all ? 0.0f : lanes.keep_factor);
  for (int64_t four = first_key / 4; four * 4 < first_key + keys; ++four) {
    const int64_t first = std::max<int64_t>(0, first_key - four * 4);
    const int64_t last = std::min<int64_t>(4, first_key + keys - four * 4);
    for (int64_t lane = 0; lane < kPanelRows; lane += static_cast<int64_t>(hn::Lanes(d))) {
      BitsVec random[4];
      Philox(lanes, static_cast<size_t>(lane), static_cast<uint64_t>(four), random);
      for (int64_t n = first; n < last; ++n) {
        const auto is_dropped = hn::RebindMask(d, hn::Lt(random[n], threshold));
        hn::StoreU(hn::IfThenZeroElse(is_dropped, keep), d,
                   factors + (four * 4 + n - first_key) * kPanelRows + lane);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(AddTerms);
HWY_EXPORT(ScaleLogits);
HWY_EXPORT(FillAlibi);
HWY_EXPORT(FillKeepFactors);

void AddTerms(const LogitTerms& terms) { HWY_DYNAMIC_DISPATCH(AddTerms)(terms); }

void ScaleLogits(int64_t keys, const float* factors, float* logits) {
  HWY_DYNAMIC_DISPATCH(ScaleLogits)(keys, factors, logits);
}

void FillAlibi(const AlibiLanes& lanes, int64_t keys, float* terms) {
  HWY_DYNAMIC_DISPATCH(FillAlibi)(lanes, keys, terms);
}

void FillKeepFactors(const DropoutLanes& lanes, int64_t first_key, int64_t keys, float* factors) {
  HWY_DYNAMIC_DISPATCH(FillKeepFactors)(lanes, first_key, keys, factors);
}

}  // namespace attnd
#endif  // HWY_ONCE
