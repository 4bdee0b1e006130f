// One thread for what is too slow for the threads that serve RPCs: building plans.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace attnd {

// Thread-safe.
class TaskThread {
 public:
  // Called exactly once: with OK to do its work, on the thread; or with why it will not be done.
  using Task = absl::AnyInvocable<void(const absl::Status& go)>;

  // Tasks that wait hold at most `capacity_bytes` together, but for one that is alone. `flag` names
  // the setting behind it, for messages.
  TaskThread(int64_t capacity_bytes, std::string flag)
      : capacity_bytes_(capacity_bytes), flag_(std::move(flag)), thread_([this] { Loop(); }) {}
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  // Closes, and waits for the task that is running.
  ~TaskThread();

  // Queues the task, which holds `bytes`. Calls it at once with RESOURCE_EXHAUSTED where too much
  // waits, with UNAVAILABLE after Close or Finish.
  void Post(Task task, int64_t bytes);

  // Refuses whatever comes from now on, and blocks until what waits and runs is done or `deadline`
  // has passed; then Close.
  void Finish(absl::Time deadline);

  // Refuses what waits and whatever comes, with UNAVAILABLE.
  void Close();

 private:
  struct Entry {
    Task task;
    int64_t bytes = 0;
  };
  void Loop();

  const int64_t capacity_bytes_;
  const std::string flag_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> tasks_;
  int64_t waiting_bytes_ = 0;
  bool running_ = false;
  bool refusing_ = false;  // What comes.
  bool closed_ = false;    // What waits, too.
  std::thread thread_;     // Last: it uses the rest.
};

}  // namespace attnd
