// Matrix products with query rows in the lanes of vectors, vectorised with Highway.
//
// A panel is up to kPanelRows query rows, and every matrix that belongs to them has kPanelRows
// columns: Q transposed [d_qk, rows], logits [keys, rows], O transposed [d_v, rows]. So K and V are
// read as they lie, one element for all rows at a time, and nothing is summed across lanes.
#pragma once

#include <cstdint>

namespace attnd {

inline constexpr int64_t kPanelRows = 32;
// Lanes are computed or left out in groups of so many: the widest vector of float32.
inline constexpr int64_t kLaneGroup = 16;
// Rows of a product come in multiples of this.
inline constexpr int64_t kProductStep = 8;

inline constexpr int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c[i, lane] = (accumulate ? c[i, lane] : 0) + sum over k of a[i, k] * b[k, lane],
// for lanes first_lane .. last_lane - 1, multiples of kLaneGroup.
struct PanelProduct {
  int64_t rows = 0;   // i; rounded up to a multiple of kProductStep: all of a and c is addressable.
  int64_t depth = 0;  // k
  const float* a = nullptr;
  int64_t a_row_stride = 0;
  int64_t a_depth_stride = 0;
  const float* b = nullptr;  // [depth, lanes], rows b_stride apart.
  int64_t b_stride = kPanelRows;
  float* c = nullptr;  // [rows, lanes], rows c_stride apart.
  int64_t c_stride = kPanelRows;
  int64_t first_lane = 0;
  int64_t last_lane = kPanelRows;
  bool accumulate = false;
};

void Multiply(const PanelProduct& product);

// dst[c, r] = src[r, c] for r < rows <= kPanelRows and c < cols; 0 for the other r. dst is
// [cols, kPanelRows].
void ToPanel(const float* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst);

// dst[r, c] = src[c, r] for r < rows, c < cols: the way back. Reads and writes whole groups of 4:
// dst has room for rows rounded up to a multiple of 4, and src for such cols.
void FromPanel(const float* src, int64_t rows, int64_t cols, float* dst, int64_t dst_stride);

}  // namespace attnd
