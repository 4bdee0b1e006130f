#include "engine/cpu/panel_product.h"

#include <algorithm>

// foreach_target.h comes first, and includes this file once per target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/panel_product.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// No vector is wider than a group of lanes.
using Tag = hn::CappedTag<float, kLaneGroup>;
using Vec = hn::Vec<Tag>;

// Accumulators of one block are kStepRows x 2 vectors: half the registers, as the other operands
// need some too.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
constexpr int kStepRows = 4;
#else
constexpr int kStepRows = 8;
#endif
static_assert(kProductStep % kStepRows == 0);

// kStepRows rows of c, kVectors vectors of lanes. kIsPanel: the strides of b and c are kPanelRows,
// which is 4% faster than reading them.
template <bool kIsPanel, int kVectors>
HWY_INLINE void MultiplyBlock(const PanelProduct& p, const float* HWY_RESTRICT a,
                              const float* HWY_RESTRICT b, float* HWY_RESTRICT c) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t c_stride = kIsPanel ? kPanelRows : p.c_stride;
  Vec sum[kStepRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kStepRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = p.accumulate ? hn::LoadU(d, c + r * c_stride + v * lanes) : hn::Zero(d);
    }
  }
  const int64_t row_stride = p.a_row_stride;
  const int64_t depth_stride = p.a_depth_stride;
  const int64_t b_stride = kIsPanel ? kPanelRows : p.b_stride;
  for (int64_t k = 0; k < p.depth; ++k) {
    Vec column[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) column[v] = hn::LoadU(d, b + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kStepRows; ++r) {
      const Vec element = hn::Set(d, a[r * row_stride]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(element, column[v], sum[r][v]);
    }
    a += depth_stride;
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kStepRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sum[r][v], d, c + r * c_stride + v * lanes);
    }
  }
}

template <bool kIsPanel>
HWY_INLINE void MultiplyRows(const PanelProduct& p) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
  for (int64_t i = 0; i < p.rows; i += kStepRows) {
    const float* a = p.a + i * p.a_row_stride;
    float* c = p.c + i * p.c_stride;
    int64_t lane = p.first_lane;
    for (; lane + 2 * lanes <= p.last_lane; lane += 2 * lanes) {
      MultiplyBlock<kIsPanel, 2>(p, a, p.b + lane, c + lane);
    }
    if (lane < p.last_lane) MultiplyBlock<kIsPanel, 1>(p, a, p.b + lane, c + lane);
  }
}

void Multiply(const PanelProduct& p) {
  const bool is_panel = p.b_stride == kPanelRows && p.c_stride == kPanelRows;
  is_panel ? MultiplyRows<true>(p) : MultiplyRows<false>(p);
}

// [4, 4] at src, transposed to dst.
HWY_INLINE void Transpose4x4(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) dst[c * dst_stride + r] = src[r * src_stride + c];
  }
#else
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> dd;
  const auto r0 = hn::LoadU(d, src);
  const auto r1 = hn::LoadU(d, src + src_stride);
  const auto r2 = hn::LoadU(d, src + 2 * src_stride);
  const auto r3 = hn::LoadU(d, src + 3 * src_stride);
  const auto low01 = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, low01, low23)), d, dst);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, low01, low23)), d, dst + dst_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, high01, high23)), d, dst + 2 * dst_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, high01, high23)), d, dst + 3 * dst_stride);
#endif
}

void ToPanel(const float* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst) {
  const int64_t whole_rows = rows / 4 * 4;
  const int64_t whole_cols = cols / 4 * 4;
  // Row by row: rows far apart compete for the same places of the cache.
  for (int64_t r = 0; r < whole_rows; r += 4) {
    for (int64_t c = 0; c < whole_cols; c += 4) {
      Transpose4x4(src + r * src_stride + c, src_stride, dst + c * kPanelRows + r, kPanelRows);
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    float* out = dst + c * kPanelRows;
    for (int64_t r = c < whole_cols ? whole_rows : 0; r < rows; ++r)
      out[r] = src[r * src_stride + c];
    std::fill(out + rows, out + kPanelRows, 0.0f);
  }
}

void FromPanel(const float* src, int64_t rows, int64_t cols, float* dst, int64_t dst_stride) {
  for (int64_t r = 0; r < rows; r += 4) {
    for (int64_t c = 0; c < cols; c += 4) {
      Transpose4x4(src + c * kPanelRows + r, kPanelRows, dst + r * dst_stride + c, dst_stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(Multiply);
HWY_EXPORT(ToPanel);
HWY_EXPORT(FromPanel);

void Multiply(const PanelProduct& product) { HWY_DYNAMIC_DISPATCH(Multiply)(product); }

void ToPanel(const float* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst) {
  HWY_DYNAMIC_DISPATCH(ToPanel)(src, src_stride, rows, cols, dst);
}

void FromPanel(const float* src, int64_t rows, int64_t cols, float* dst, int64_t dst_stride) {
  HWY_DYNAMIC_DISPATCH(FromPanel)(src, rows, cols, dst, dst_stride);
}

}  // namespace attnd
#endif  // HWY_ONCE
