#include "engine/cpu/finite_reads.h"

#include <limits>

#include "engine/cpu/head_rows.h"

namespace attnd {

bool FiniteReads::Row(int64_t n, int64_t row) {
  if (!AllRowsFinite(QueryRows(p_, b_, sequence_, n), row, 1)) return false;
  const SequenceExtent& extent = p_.sequences[static_cast<size_t>(sequence_)];
  const KeyRange keys = p_.mask.VisibleKeys(row, extent.q_len, extent.kv_len);
  if (key_is_finite_.empty()) LookAtKeys(extent.kv_len);
  for (int64_t j = keys.first; j < keys.last; ++j) {
    if (key_is_finite_[static_cast<size_t>(j)]) continue;
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    const bool is_hidden =
        p_.bias && IsRowOf(BiasRows(p_, b_.bias, {sequence_, n}, {j, j + 1}), row, kHidden);
    if (!is_hidden) return false;
  }
  return true;
}

void FiniteReads::LookAtKeys(int64_t count) {
  const HeadRows k = KeyRows(p_, b_, sequence_, kv_head_);
  const HeadRows v = ValueRows(p_, b_, sequence_, kv_head_);
  for (int64_t j = 0; j < count; ++j) {
    key_is_finite_.push_back(AllRowsFinite(k, j, 1) && AllRowsFinite(v, j, 1));
  }
}

}  // namespace attnd
