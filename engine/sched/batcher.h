// The queue between those who submit and those who run: bounded, ordered, and without a thread.
//
// Workers pull. What a pull returns runs together; so far that is one request. Time is an argument,
// so that a test can drive the batcher by hand. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/sched/work.h"

namespace attnd {

struct BatcherLimits {
  int64_t queue_bytes = 0;
  std::string flag;  // The setting behind queue_bytes, for messages.
};

class Batcher {
 public:
  using WorkPtr = std::unique_ptr<Work>;

  // What a pull takes out of the queue.
  struct Pulled {
    std::vector<WorkPtr> batch;    // To run together; may be empty.
    std::vector<WorkPtr> dropped;  // Expired or cancelled: for Drop, outside any lock.
  };

  explicit Batcher(BatcherLimits limits) : limits_(limits) {}

  // Queues `work`, or leaves it untouched and says why not: UNAVAILABLE after Close,
  // RESOURCE_EXHAUSTED (need, have, retry-after) where the queue is full. Never blocks.
  // `dropped` receives queued work that was found expired or cancelled on the way.
  absl::Status Submit(WorkPtr& work, absl::Time now, std::vector<WorkPtr>& dropped);

  // The next batch at `now`. Never blocks.
  Pulled Pull(absl::Time now);

  // Takes out what has expired or was cancelled.
  void Sweep(absl::Time now, std::vector<WorkPtr>& dropped);

  // Blocks until there is work or the batcher is closed; false: closed and empty.
  bool WaitForWork();

  // Refuses new work from now on; queued work is still pulled.
  void Close();

  // Takes everything that is queued.
  std::vector<WorkPtr> TakeAll();

  bool empty() const;

  // Why `work` must not run (on) at `now`: CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, or OK.
  static absl::Status CheckLive(const Work& work, absl::Time now);

 private:
  void SweepLocked(absl::Time now, std::vector<WorkPtr>& dropped);

  const BatcherLimits limits_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<WorkPtr> queue_;
  int64_t queued_bytes_ = 0;
  bool closed_ = false;
};

}  // namespace attnd
