// A worker: one thread that pulls from the batcher and runs what it gets, straight through.
#pragma once

#include <thread>

#include "engine/sched/batcher.h"

namespace attnd {

// Runs or drops one request and calls its `done`. `batch_size`: requests that share the launch.
void RunForward(Batcher::WorkPtr work, int64_t batch_size);

// Calls `done` of each with why it did not run: its own state at `now`, else `otherwise`.
void DropAll(std::vector<Batcher::WorkPtr> dropped, absl::Time now, const absl::Status& otherwise);

class Worker {
 public:
  // Starts the thread. It ends when the batcher is closed and empty.
  explicit Worker(Batcher& batcher) : thread_([&batcher] { Loop(batcher); }) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // The batcher must be closed.
  ~Worker() { thread_.join(); }

 private:
  static void Loop(Batcher& batcher);

  std::thread thread_;
};

}  // namespace attnd
