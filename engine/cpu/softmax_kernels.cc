#include "engine/cpu/softmax_kernels.h"

#include <algorithm>
#include <limits>

#include "engine/cpu/panel_product.h"

// foreach_target.h comes first, and includes this file once per target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/softmax_kernels.cc"
#include "hwy/foreach_target.h"
#include "engine/cpu/exp-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, kLaneGroup>;
using Vec = hn::Vec<Tag>;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One vector of lanes of a block.
class LaneSoftmax {
 public:
  HWY_INLINE LaneSoftmax(const SoftmaxBlock& block, int64_t lane)
      : b_(block), lane_(lane), s_(block.logits + lane) {}

  HWY_INLINE void Run() {
    const Tag d;
    ReadVisibleRows();
    scale_ = hn::Set(d, b_.scale);
    if (b_.softcap != 0) Cap();
    const Vec lowest = hn::Set(d, kMinusInfinity);
    const Vec old_m = hn::LoadU(d, b_.m + lane_);
    Vec m = Max<true>(0, b_.seen_by_all.first, lowest);
    m = Max<false>(b_.seen_by_all.first, b_.seen_by_all.last, m);
    m = Max<true>(b_.seen_by_all.last, b_.keys, m);
    m = hn::Max(m, old_m);  // In this order a NaN of before stays.
    // Where nothing was seen but logits of -inf, the differences below are to be -inf, not NaN.
    m_ = hn::IfThenZeroElse(hn::Eq(m, lowest), m);
    const Vec factor = ExpUpTo80(Tag(), hn::Sub(old_m, m_));

    Vec sum = Exp<true>(0, b_.seen_by_all.first, hn::Zero(d));
    sum = Exp<false>(b_.seen_by_all.first, b_.seen_by_all.last, sum);
    sum = Exp<true>(b_.seen_by_all.last, b_.keys, sum);
    const Vec l = hn::MulAdd(hn::LoadU(d, b_.l + lane_), factor, sum);
    hn::StoreU(l, d, b_.l + lane_);
    hn::StoreU(hn::IfThenElse(hn::IsNaN(l), l, m), d, b_.m + lane_);
    ScaleAcc(hn::IfThenElse(hn::Eq(old_m, lowest), hn::Set(d, 1.0f), factor));
  }

 private:
  // Each lane's rows first_ <= row < last_, as floats: a block is far smaller than 2^24 keys.
  HWY_INLINE void ReadVisibleRows() {
    const Tag d;
    float first[kLaneGroup] = {};
    float last[kLaneGroup] = {};
    if (b_.seen_by_all.first > 0 || b_.seen_by_all.last < b_.keys) {
      for (size_t v = 0; v < hn::Lanes(d); ++v) {
        const KeyRange& keys = b_.visible[static_cast<size_t>(lane_) + v];
        first[v] = static_cast<float>(std::clamp<int64_t>(keys.first - b_.first_key, 0, b_.keys));
        last[v] = static_cast<float>(std::clamp<int64_t>(keys.last - b_.first_key, 0, b_.keys));
      }
    }
    first_ = hn::LoadU(d, first);
    last_ = hn::LoadU(d, last);
  }

  HWY_INLINE hn::Mask<Tag> IsVisible(int64_t row) const {
    const Vec r = hn::Set(Tag(), static_cast<float>(row));
    return hn::And(hn::Ge(r, first_), hn::Lt(r, last_));
  }

  // tanh is Highway's; it does not keep NaN.
  HWY_INLINE void Cap() {
    const Tag d;
    const Vec to_cap = hn::Set(d, b_.scale / b_.softcap);
    const Vec cap = hn::Set(d, b_.softcap);
    for (int64_t row = 0; row < b_.keys; ++row) {
      const Vec x = hn::Mul(hn::LoadU(d, s_ + row * kPanelRows), to_cap);
      const Vec capped = hn::Mul(cap, hn::Tanh(d, x));
      hn::StoreU(hn::IfThenElse(hn::IsNaN(x), x, capped), d, s_ + row * kPanelRows);
    }
    scale_ = hn::Set(d, 1.0f);
  }

  HWY_INLINE Vec Scaled(int64_t row) const {
    return hn::Mul(hn::LoadU(Tag(), s_ + row * kPanelRows), scale_);
  }

  template <bool kMasked>
  HWY_INLINE Vec VisibleOrLowest(int64_t row) const {
    if (!kMasked) return Scaled(row);
    return hn::IfThenElse(IsVisible(row), Scaled(row), hn::Set(Tag(), kMinusInfinity));
  }

  // The largest of `max` and of the visible logits in rows first .. last - 1; a NaN may be left
  // out.
  template <bool kMasked>
  HWY_INLINE Vec Max(int64_t first, int64_t last, Vec max) const {
    Vec max1 = max, max2 = max, max3 = max;
    int64_t row = first;
    for (; row + 4 <= last; row += 4) {
      max = hn::Max(VisibleOrLowest<kMasked>(row), max);
      max1 = hn::Max(VisibleOrLowest<kMasked>(row + 1), max1);
      max2 = hn::Max(VisibleOrLowest<kMasked>(row + 2), max2);
      max3 = hn::Max(VisibleOrLowest<kMasked>(row + 3), max3);
    }
    for (; row < last; ++row) max = hn::Max(VisibleOrLowest<kMasked>(row), max);
    return hn::Max(hn::Max(max, max1), hn::Max(max2, max3));
  }

  // The product is rounded before the difference, as it was for m: fused, the largest logit's
  // exponent would be the rounding error of m, not 0.
  template <bool kMasked>
  HWY_INLINE Vec Probability(int64_t row) const {
    const Vec e = ExpUpTo80(Tag(), hn::Sub(Scaled(row), m_));
    return kMasked ? hn::IfThenElseZero(IsVisible(row), e) : e;
  }

  // Rows first .. last - 1 become probabilities; returns sum + their sum.
  template <bool kMasked>
  HWY_INLINE Vec Exp(int64_t first, int64_t last, Vec sum) const {
    const Tag d;
    Vec sum1 = hn::Zero(d);
    int64_t row = first;
    for (; row + 2 <= last; row += 2) {
      const Vec e0 = Probability<kMasked>(row);
      const Vec e1 = Probability<kMasked>(row + 1);
      hn::StoreU(e0, d, s_ + row * kPanelRows);
      hn::StoreU(e1, d, s_ + (row + 1) * kPanelRows);
      sum = hn::Add(sum, e0);
      sum1 = hn::Add(sum1, e1);
    }
    for (; row < last; ++row) {
      const Vec e = Probability<kMasked>(row);
      hn::StoreU(e, d, s_ + row * kPanelRows);
      sum = hn::Add(sum, e);
    }
    return hn::Add(sum, sum1);
  }

  HWY_INLINE void ScaleAcc(Vec factor) const {
    const Tag d;
    if (hn::AllTrue(d, hn::Eq(factor, hn::Set(d, 1.0f)))) return;
    float* acc = b_.acc + lane_;
    for (int64_t c = 0; c < b_.d_v; ++c, acc += kPanelRows) {
      hn::StoreU(hn::Mul(hn::LoadU(d, acc), factor), d, acc);
    }
  }

  const SoftmaxBlock& b_;
  const int64_t lane_;
  float* const s_;
  Vec first_, last_;
  Vec scale_;
  Vec m_;
};

void LogSumExp(const float* m, const float* l, int64_t n, float* lse) {
  const Tag d;
  const Vec lowest = hn::Set(d, kMinusInfinity);
  float in[2][kLaneGroup];
  float out[kLaneGroup];
  for (int64_t r = 0; r < n; r += static_cast<int64_t>(hn::Lanes(d))) {
    const int64_t count = std::min(static_cast<int64_t>(hn::Lanes(d)), n - r);
    std::fill(in[0], in[0] + kLaneGroup, 0.0f);
    std::fill(in[1], in[1] + kLaneGroup, 1.0f);
    std::copy_n(m + r, count, in[0]);
    std::copy_n(l + r, count, in[1]);
    const Vec max = hn::LoadU(d, in[0]);
    const Vec sum = hn::LoadU(d, in[1]);
    // Highway's Log does not keep NaN.
    const Vec log = hn::IfThenElse(hn::IsNaN(sum), sum, hn::Log(d, sum));
    hn::StoreU(hn::IfThenElse(hn::Eq(max, lowest), lowest, hn::Add(max, log)), d, out);
    std::copy_n(out, count, lse + r);
  }
}

void OnlineSoftmax(const SoftmaxBlock& block) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
  for (int64_t lane = 0; lane < kLaneGroup; lane += lanes) LaneSoftmax(block, lane).Run();
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(OnlineSoftmax);
HWY_EXPORT(LogSumExp);

void OnlineSoftmax(const SoftmaxBlock& block) { HWY_DYNAMIC_DISPATCH(OnlineSoftmax)(block); }

void LogSumExp(const float* m, const float* l, int64_t n, float* lse) {
  HWY_DYNAMIC_DISPATCH(LogSumExp)(m, l, n, lse);
}

}  // namespace attnd
#endif  // HWY_ONCE
