#include "engine/cuda/tiled_tasks.h"

#include <algorithm>

namespace attnd::tiled {
namespace {

// Above every length, and sums of it with lengths stay in the type.
constexpr int64_t kUnlimited = int64_t{1} << 61;

}  // namespace

Band BandOf(const BandMask& mask) {
  return {std::min(mask.left.value_or(kUnlimited), kUnlimited),
          std::min(mask.right.value_or(kUnlimited), kUnlimited), mask.bottom_right};
}

TaskCounts FillSequences(const AttentionProblem& p, std::span<Sequence> sequences) {
  const Heads heads = {p.num_heads, p.num_kv_heads};
  TaskCounts counts;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SequenceExtent& s = p.sequences[i];
    sequences[i] = {s.q_len, s.kv_len, s.q_row, s.kv_row, counts.rows, counts.keys};
    counts.rows += RowTasks(s.q_len, heads);
    counts.keys += KeyTasks(s.kv_len, heads);
  }
  return counts;
}

}  // namespace attnd::tiled
