// A worker: one thread that pulls from the batcher and runs what it gets, straight through.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "engine/backend/device_queue.h"
#include "engine/sched/batcher.h"

namespace attnd {

// Runs one request and calls its `done`. `batch_size`: requests that share the launch. With a
// queue, the request's host memory is copied to its device memory and back; null: the backend
// computes in host memory.
void RunCall(Batcher::WorkPtr work, int64_t batch_size, DeviceQueue* queue);

// Calls `done` of each with why it did not run: its own state at `now`, else `otherwise`.
void DropAll(std::vector<Batcher::WorkPtr> dropped, absl::Time now, const absl::Status& otherwise);

class Worker {
 public:
  // Starts the thread, which ends when the batcher is closed and empty. `queue` may be null.
  Worker(Batcher& batcher, std::unique_ptr<DeviceQueue> queue)
      : queue_(std::move(queue)), thread_([this, &batcher] { Loop(batcher); }) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // The batcher must be closed.
  ~Worker() { thread_.join(); }

  // Whether the thread has ended by `deadline`; blocks until then.
  bool WaitUntilEnded(absl::Time deadline);

  // Ends what is running, and whatever is pulled from now on, as soon as the backend looks.
  void Abandon();

 private:
  void Loop(Batcher& batcher);

  const std::unique_ptr<DeviceQueue> queue_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<CancellationToken> running_;
  bool abandoned_ = false;
  bool ended_ = false;
  std::thread thread_;  // Last: it uses the rest.
};

}  // namespace attnd
