// What forward calls left for their backward calls, under names, until their leases end.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/backend/call_memory.h"
#include "engine/core/attention_problem.h"
#include "engine/memory/memory_pool.h"

namespace attnd {

// A forward call that is over; never changed again.
struct RetainedForward {
  AttentionProblem problem;
  CallMemory memory;                          // Of the forward call, with LSE.
  PoolBuffer inputs;                          // Host memory.
  std::shared_ptr<const PoolBuffer> outputs;  // Host memory; replies may be reading it too.
};

// Thread-safe. Time is an argument, so that a test can drive it by hand.
class ContextStore {
 public:
  // `incarnation` differs with every start of the server; it begins every name.
  explicit ContextStore(std::string incarnation);

  // Keeps it until `expires`, and names it.
  std::string Put(std::shared_ptr<const RetainedForward> context, absl::Time expires);

  // NOT_FOUND for a name that was never given out, FAILED_PRECONDITION for one whose lease is over.
  absl::StatusOr<std::shared_ptr<const RetainedForward>> Find(const std::string& name,
                                                              absl::Time now);

  // Drops what has expired, and says how many.
  int64_t Sweep(absl::Time now);

 private:
  struct Entry {
    std::shared_ptr<const RetainedForward> context;
    absl::Time expires;
  };

  const std::string prefix_;
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  uint64_t next_ = 0;
  std::random_device random_;  // Names are not to be guessed.
};

}  // namespace attnd
