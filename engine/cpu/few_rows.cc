#include "engine/cpu/few_rows.h"

#include <algorithm>

#include "engine/cpu/panel_product.h"

// foreach_target.h comes first, and includes this file once per target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/few_rows.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, kLaneGroup>;
using Vec = hn::Vec<Tag>;

// The vector at p, or its first `count` lanes and zeros.
HWY_INLINE Vec LoadUpTo(const float* p, int64_t count) {
  const Tag d;
  if (count >= static_cast<int64_t>(hn::Lanes(d))) return hn::LoadU(d, p);
  float part[kLaneGroup] = {};  // Highway's MaskedLoad may read on.
  std::copy_n(p, std::max<int64_t>(count, 0), part);
  return hn::LoadU(d, part);
}

template <int kRows>
HWY_INLINE void MultiplyKeys(const FewRows& k, const float* q) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < k.keys; ++j) {
    const float* key = k.kv + j * k.kv_stride;
    Vec sum[kRows];
    for (Vec& s : sum) s = hn::Zero(d);
    for (int64_t c = 0; c < k.dim; c += lanes) {
      const Vec part = LoadUpTo(key + c, k.dim - c);
      for (int r = 0; r < kRows; ++r) {
        sum[r] = hn::MulAdd(LoadUpTo(q + r * k.dim + c, k.dim - c), part, sum[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      k.logits[j * kPanelRows + r] = hn::GetLane(hn::SumOfLanes(d, sum[r]));
    }
  }
}

// Components c .. c + kVectors vectors, of which `count` exist.
template <int kRows, int kVectors>
HWY_INLINE void AddValuesBlock(const FewRows& v, int64_t c, int64_t count, float* acc) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  Vec sum[kRows][kVectors];
  for (auto& row : sum) {
    for (Vec& s : row) s = hn::Zero(d);
  }
  for (int64_t j = 0; j < v.keys; ++j) {
    const float* value = v.kv + j * v.kv_stride + c;
    Vec part[kVectors];
    for (int k = 0; k < kVectors; ++k) part[k] = LoadUpTo(value + k * lanes, count - k * lanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec p = hn::Set(d, v.logits[j * kPanelRows + r]);
      for (int k = 0; k < kVectors; ++k) sum[r][k] = hn::MulAdd(p, part[k], sum[r][k]);
    }
  }
  float out[kVectors * kLaneGroup];
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kVectors; ++k) hn::StoreU(sum[r][k], d, out + k * lanes);
    const int64_t size = std::min(count, kVectors * lanes);
    for (int64_t i = 0; i < size; ++i) acc[(c + i) * kPanelRows + r] += out[i];
  }
}

template <int kRows>
HWY_INLINE void AddValues(const FewRows& v, float* acc) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
  int64_t c = 0;
  for (; c + 4 * lanes <= v.dim; c += 4 * lanes) {
    AddValuesBlock<kRows, 4>(v, c, 4 * lanes, acc);
  }
  for (; c < v.dim; c += lanes) AddValuesBlock<kRows, 1>(v, c, v.dim - c, acc);
}

void MultiplyFewRows(const FewRows& k, const float* q) {
  switch (k.rows) {
    case 1: return MultiplyKeys<1>(k, q);
    case 2: return MultiplyKeys<2>(k, q);
    case 3: return MultiplyKeys<3>(k, q);
    default: return MultiplyKeys<4>(k, q);
  }
}

void AddValuesOfFewRows(const FewRows& v, float* acc) {
  switch (v.rows) {
    case 1: return AddValues<1>(v, acc);
    case 2: return AddValues<2>(v, acc);
    case 3: return AddValues<3>(v, acc);
    default: return AddValues<4>(v, acc);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(MultiplyFewRows);
HWY_EXPORT(AddValuesOfFewRows);

void MultiplyFewRows(const FewRows& k, const float* q) {
  HWY_DYNAMIC_DISPATCH(MultiplyFewRows)(k, q);
}

void AddValuesOfFewRows(const FewRows& v, float* acc) {
  HWY_DYNAMIC_DISPATCH(AddValuesOfFewRows)(v, acc);
}

}  // namespace attnd
#endif  // HWY_ONCE
