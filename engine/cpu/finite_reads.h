// Whether a row's results can be finite: what tells a product past float32 from inputs that are not
// numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// Of rows that share a KV head. Looks at the keys once, when the first row asks.
class FiniteReads {
 public:
  // Both outlive this.
  FiniteReads(const AttentionProblem& problem, const ForwardBuffers& inputs, int64_t sequence,
              int64_t kv_head)
      : p_(problem), b_(inputs), sequence_(sequence), kv_head_(kv_head) {}

  // Whether Q of query row `row` of head n, and K and V of all keys that neither the mask nor a
  // bias of -inf hides from it, are finite.
  bool Row(int64_t n, int64_t row);

 private:
  void LookAtKeys(int64_t count);

  const AttentionProblem& p_;
  const ForwardBuffers& b_;
  const int64_t sequence_;
  const int64_t kv_head_;
  std::vector<bool> key_is_finite_;  // Empty until a row asks.
};

}  // namespace attnd
