// One thread for what is too slow for the threads that serve RPCs: building plans.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace attnd {

// Thread-safe.
class TaskThread {
 public:
  // Called exactly once: with OK to do its work, on the thread; or with why it will not be done.
  using Task = absl::AnyInvocable<void(const absl::Status& go)>;

  // Holds at most `capacity` waiting tasks.
  explicit TaskThread(size_t capacity) : capacity_(capacity), thread_([this] { Loop(); }) {}
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  // Closes, and waits for the task that is running.
  ~TaskThread();

  // Queues the task. Calls it at once with RESOURCE_EXHAUSTED where too many wait, with UNAVAILABLE
  // after Close.
  void Post(Task task);

  // Refuses what waits and whatever comes, with UNAVAILABLE.
  void Close();

 private:
  void Loop();

  const size_t capacity_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool closed_ = false;
  std::thread thread_;  // Last: it uses the rest.
};

}  // namespace attnd
