#include "engine/cpu/gradient_kernels.h"

#include <limits>

#include "engine/cpu/panel_product.h"

// foreach_target.h comes first, and includes this file once per target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/gradient_kernels.cc"
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

// One vector of lanes of a block.
class Lanes {
 public:
  HWY_INLINE Lanes(const GradientBlock& block, int64_t lane)
      : b_(block),
        lane_(lane),
        first_(hn::LoadU(Tag(), block.first + lane)),
        last_(hn::LoadU(Tag(), block.last + lane)) {}

  HWY_INLINE void Gradient() const {
    const Tag d;
    const Vec shift = hn::LoadU(d, b_.shift + lane_);
    const Vec inverse_sum = hn::LoadU(d, b_.inverse_sum + lane_);
    const Vec row_sum = hn::LoadU(d, b_.d + lane_);
    // Where the LSE is of other inputs, there is no end to this.
    const Vec limit = hn::Set(d, 80.0f);
    Vec sum = hn::Zero(d);
    for (int64_t row = 0; row < b_.keys; ++row) {
      const int64_t at = row * kPanelRows + lane_;
      const hn::Mask<Tag> visible = IsVisible(row, at);
      Vec slope = hn::Set(d, 1.0f);
      const Vec x = hn::Sub(Logit(at, slope), shift);
      const Vec e = ExpUpTo80(d, hn::IfThenElse(hn::Gt(x, limit), limit, x));
      const Vec p = hn::IfThenElseZero(visible, hn::Mul(e, inverse_sum));
      Vec kept = p;
      const Vec dp = WeightGradient(at, visible, kept);
      const Vec dx = hn::Mul(hn::Mul(p, hn::Sub(dp, row_sum)), slope);
      hn::StoreU(kept, d, b_.logits + at);
      hn::StoreU(hn::IfThenElseZero(visible, dx), d, b_.d_logits + at);
      sum = hn::Add(sum, p);
    }
    hn::StoreU(hn::Add(hn::LoadU(d, b_.sum + lane_), sum), d, b_.sum + lane_);
  }

  HWY_INLINE void Statistics() const {
    const Tag d;
    const Vec lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
    const Vec old_m = hn::LoadU(d, b_.m + lane_);
    Vec m = old_m;
    for (int64_t row = 0; row < b_.keys; ++row) {
      const int64_t at = row * kPanelRows + lane_;
      Vec slope = lowest;
      const Vec x = hn::IfThenElse(IsVisible(row, at), Logit(at, slope), lowest);
      hn::StoreU(x, d, b_.logits + at);
      m = hn::IfThenElse(hn::Or(hn::Gt(x, m), hn::IsNaN(x)), x, m);  // A NaN stays.
    }
    // Where nothing was seen yet, the differences below are to be -inf, not NaN.
    const Vec from = hn::IfThenZeroElse(hn::Eq(m, lowest), m);
    const Vec factor = ExpUpTo80(d, hn::Sub(old_m, from));
    Vec l = hn::Mul(hn::LoadU(d, b_.l + lane_), factor);
    Vec weighted = hn::Mul(hn::LoadU(d, b_.weighted + lane_), factor);
    for (int64_t row = 0; row < b_.keys; ++row) {
      const int64_t at = row * kPanelRows + lane_;
      const hn::Mask<Tag> visible = IsVisible(row, at);
      const Vec e = ExpUpTo80(d, hn::Sub(hn::LoadU(d, b_.logits + at), from));
      l = hn::Add(l, e);
      Vec kept = e;
      const Vec dp = WeightGradient(at, visible, kept);
      weighted = hn::Add(weighted, hn::IfThenElseZero(visible, hn::Mul(e, dp)));
    }
    hn::StoreU(m, d, b_.m + lane_);
    hn::StoreU(l, d, b_.l + lane_);
    hn::StoreU(weighted, d, b_.weighted + lane_);
  }

 private:
  HWY_INLINE hn::Mask<Tag> IsVisible(int64_t row, int64_t at) const {
    const Tag d;
    const Vec r = hn::Set(d, static_cast<float>(row));
    const auto visible = hn::And(hn::Ge(r, first_), hn::Lt(r, last_));
    if (b_.terms == nullptr) return visible;
    const Vec lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
    return hn::And(visible, hn::Ne(hn::LoadU(d, b_.terms + at), lowest));
  }

  // keep * (dO . v), 0 where the cell is dropped whatever is there; multiplies p with keep.
  HWY_INLINE Vec WeightGradient(int64_t at, hn::Mask<Tag> visible, Vec& p) const {
    const Tag d;
    const Vec dp = hn::LoadU(d, b_.d_logits + at);
    if (b_.keep == nullptr) return dp;
    const Vec keep = hn::LoadU(d, b_.keep + at);
    const auto is_kept = hn::And(visible, hn::Gt(keep, hn::Zero(d)));
    p = hn::IfThenElseZero(is_kept, hn::Mul(p, keep));
    return hn::IfThenElseZero(is_kept, hn::Mul(dp, keep));
  }

  HWY_INLINE Vec Logit(int64_t at, Vec& slope) const {
    const Tag d;
    Vec x = hn::LoadU(d, b_.logits + at);
    const bool before = b_.terms != nullptr && b_.terms_before_scale;
    if (before) x = hn::Add(x, hn::LoadU(d, b_.terms + at));
    if (b_.softcap == 0) {
      x = hn::Mul(x, hn::Set(d, b_.scale));
    } else {
      x = hn::Mul(x, hn::Set(d, b_.scale / b_.softcap));
      // Highway's tanh does not keep NaN.
      const Vec t = hn::IfThenElse(hn::IsNaN(x), x, hn::Tanh(d, x));
      x = hn::Mul(t, hn::Set(d, b_.softcap));
      if (b_.through_cap) slope = hn::NegMulAdd(t, t, slope);
    }
    if (b_.terms != nullptr && !before) x = hn::Add(x, hn::LoadU(d, b_.terms + at));
    return x;
  }

  const GradientBlock& b_;
  const int64_t lane_;
  const Vec first_, last_;
};

template <typename Fn>
HWY_INLINE void ForLanes(const GradientBlock& block, const Fn& fn) {
  for (int64_t lane = 0; lane < kPanelRows; lane += static_cast<int64_t>(hn::Lanes(Tag()))) {
    fn(Lanes(block, lane));
  }
}

void SoftmaxGradient(const GradientBlock& block) {
  ForLanes(block, [](const Lanes& lanes) HWY_ATTR { lanes.Gradient(); });
}

void AddSoftmaxStatistics(const GradientBlock& block) {
  ForLanes(block, [](const Lanes& lanes) HWY_ATTR { lanes.Statistics(); });
}

void AddFloats(const float* from, int64_t n, float* to) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t k = 0;
  for (; k + lanes <= n; k += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, to + k), hn::LoadU(d, from + k)), d, to + k);
  }
  for (; k < n; ++k) to[k] += from[k];
}

float Dot(const float* a, const float* b, int64_t n) {
  const hn::CappedTag<float, 1> d;
  auto sum = hn::Zero(d);
  for (int64_t k = 0; k < n; ++k) sum = hn::MulAdd(hn::Set(d, a[k]), hn::Set(d, b[k]), sum);
  return hn::GetLane(sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(SoftmaxGradient);
HWY_EXPORT(AddSoftmaxStatistics);
HWY_EXPORT(AddFloats);
HWY_EXPORT(Dot);

void SoftmaxGradient(const GradientBlock& block) { HWY_DYNAMIC_DISPATCH(SoftmaxGradient)(block); }

void AddSoftmaxStatistics(const GradientBlock& block) {
  HWY_DYNAMIC_DISPATCH(AddSoftmaxStatistics)(block);
}

void AddFloats(const float* from, int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(AddFloats)(from, n, to);
}

float Dot(const float* a, const float* b, int64_t n) { return HWY_DYNAMIC_DISPATCH(Dot)(a, b, n); }

}  // namespace attnd
#endif  // HWY_ONCE
