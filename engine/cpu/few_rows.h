// The products of attention for a few query rows (decode), too few to fill the lanes of vectors:
// the head dim is in the lanes instead. K and V may lie anywhere. Vectorised with Highway.
#pragma once

#include <cstdint>

namespace attnd {

inline constexpr int64_t kFewRows = 4;

struct FewRows {
  int64_t rows = 0;  // 1 .. kFewRows
  int64_t keys = 0;
  int64_t dim = 0;
  const float* kv = nullptr;  // K or V [keys, dim], rows kv_stride apart.
  int64_t kv_stride = 0;
  float* logits = nullptr;  // [keys, kPanelRows], of which the first `rows` columns are used.
};

// logits[j, r] = sum over c of q[r, c] * k[j, c]; q is [rows, dim].
void MultiplyFewRows(const FewRows& k, const float* q);

// acc[c, r] += sum over j of logits[j, r] * v[j, c]; acc is [dim, kPanelRows].
void AddValuesOfFewRows(const FewRows& v, float* acc);

}  // namespace attnd
