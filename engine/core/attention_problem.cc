#include "engine/core/attention_problem.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace attnd {
namespace {

// A window may be as wide as an int64: sums stop at the ends of the type.
int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return b > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
}

int64_t SaturatingSub(int64_t a, int64_t b) {
  int64_t difference;
  if (!__builtin_sub_overflow(a, b, &difference)) return difference;
  return b > 0 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
}

}  // namespace

KeyRange BandMask::VisibleKeys(int64_t i, int64_t q_len, int64_t kv_len) const {
  const int64_t diagonal = bottom_right ? i + (kv_len - q_len) : i;
  KeyRange keys = {0, kv_len};
  if (left) keys.first = std::max<int64_t>(0, SaturatingSub(diagonal, *left));
  if (right) keys.last = std::min(kv_len, SaturatingAdd(SaturatingAdd(diagonal, *right), 1));
  if (keys.first >= keys.last) return {0, 0};
  return keys;
}

// With n the largest power of two up to h, the first n heads get 2^(-8k/n) for
// k = 1, 2, ..., the others 2^(-4k/n) for k = 1, 3, ...
double AlibiSlope(int64_t total_heads, int64_t head) {
  const auto n = static_cast<double>(std::bit_floor(static_cast<uint64_t>(total_heads)));
  const auto k = static_cast<double>(head);
  return k < n ? std::exp2(-8 * (k + 1) / n) : std::exp2(-4 * (2 * (k - n) + 1) / n);
}

}  // namespace attnd
