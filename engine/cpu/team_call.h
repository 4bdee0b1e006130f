// What calls that run on a ThreadTeam have in common.
#pragma once

#include <algorithm>
#include <mutex>

#include "absl/status/status.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// The first error of any thread.
class SharedStatus {
 public:
  void Update(const absl::Status& status) {
    if (status.ok()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    status_.Update(status);
  }
  absl::Status Get() {
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

 private:
  std::mutex mutex_;
  absl::Status status_;
};

// So many operations take one thread some 30 us; waking another was measured to take 4 to 10 us.
inline constexpr double kFlopsPerThread = 4e6;

// Threads that a call is worth which multiplies Q, K and V `products` times (forward: once): it
// depends on the request alone.
inline int WorthwhileThreads(const AttentionProblem& problem, double products, int threads) {
  double pairs = 0;
  for (const SequenceExtent& extent : problem.sequences) {
    pairs += static_cast<double>(extent.q_len) * static_cast<double>(extent.kv_len);
  }
  const double flops = 2 * products * pairs * static_cast<double>(problem.num_heads) *
                       static_cast<double>(problem.head_dim_qk + problem.head_dim_v);
  return static_cast<int>(std::clamp(flops / kFlopsPerThread, 1.0, static_cast<double>(threads)));
}

}  // namespace attnd
