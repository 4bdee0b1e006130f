#include "engine/cpu/gradient_kernels.h"

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
class LaneGradient {
 public:
  HWY_INLINE LaneGradient(const GradientBlock& block, int64_t lane)
      : b_(block),
        lane_(lane),
        first_(hn::LoadU(Tag(), block.first + lane)),
        last_(hn::LoadU(Tag(), block.last + lane)),
        lse_(hn::LoadU(Tag(), block.lse + lane)),
        d_(hn::LoadU(Tag(), block.d + lane)) {}

  HWY_INLINE void Run() {
    const Tag d;
    Vec sum = hn::Zero(d);
    for (int64_t row = 0; row < b_.keys; ++row) sum = hn::Add(sum, Step(row));
    hn::StoreU(hn::Add(hn::LoadU(d, b_.sum + lane_), sum), d, b_.sum + lane_);
  }

 private:
  // Returns P.
  HWY_INLINE Vec Step(int64_t row) const {
    const Tag d;
    const int64_t at = row * kPanelRows + lane_;
    const Vec r = hn::Set(d, static_cast<float>(row));
    const auto visible = hn::And(hn::Ge(r, first_), hn::Lt(r, last_));
    Vec slope = hn::Set(d, 1.0f);
    const Vec x = hn::Sub(Logit(at, slope), lse_);
    // Where the LSE is of other inputs, there is no end to this.
    const Vec limit = hn::Set(d, 80.0f);
    const Vec p =
        hn::IfThenElseZero(visible, ExpUpTo80(d, hn::IfThenElse(hn::Gt(x, limit), limit, x)));
    Vec kept = p;
    Vec dp = hn::LoadU(d, b_.d_logits + at);
    if (b_.keep != nullptr) {
      const Vec keep = hn::LoadU(d, b_.keep + at);
      const auto is_kept = hn::And(visible, hn::Gt(keep, hn::Zero(d)));
      kept = hn::IfThenElseZero(is_kept, hn::Mul(p, keep));
      dp = hn::IfThenElseZero(is_kept, hn::Mul(dp, keep));
    }
    const Vec dx = hn::Mul(hn::Mul(p, hn::Sub(dp, d_)), slope);
    hn::StoreU(kept, d, b_.logits + at);
    hn::StoreU(hn::IfThenElseZero(visible, dx), d, b_.d_logits + at);
    return p;
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
  const Vec first_, last_, lse_, d_;
};

void SoftmaxGradient(const GradientBlock& block) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
  for (int64_t lane = 0; lane < kPanelRows; lane += lanes) LaneGradient(block, lane).Run();
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
HWY_EXPORT(AddFloats);
HWY_EXPORT(Dot);

void SoftmaxGradient(const GradientBlock& block) { HWY_DYNAMIC_DISPATCH(SoftmaxGradient)(block); }

void AddFloats(const float* from, int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(AddFloats)(from, n, to);
}

float Dot(const float* a, const float* b, int64_t n) { return HWY_DYNAMIC_DISPATCH(Dot)(a, b, n); }

}  // namespace attnd
#endif  // HWY_ONCE
