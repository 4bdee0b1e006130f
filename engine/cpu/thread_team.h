// The engine's own threads: a fixed team that works through the tasks of one call at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace attnd {

// Thread-safe: calls of ParallelFor from several threads take turns.
class ThreadTeam {
 public:
  // task is 0 .. n - 1, thread 0 .. size() - 1; no two tasks run at once with the same thread
  // number. It must not throw, and must not call ParallelFor of the same team.
  using Task = absl::FunctionRef<void(int64_t task, int thread)>;

  // A team of `threads`, of which the caller of ParallelFor is one; 0 or less: all hardware
  // threads.
  explicit ThreadTeam(int threads);
  ~ThreadTeam();

  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs fn for each task once, in any order and on any thread, and returns when all are done. The
  // lower a task's number, the earlier it starts. What the tasks wrote is visible to the caller.
  // At most max_threads take part, of which the caller is one: more are not woken.
  void ParallelFor(int64_t n, int max_threads, Task fn);

 private:
  void Work(int thread);
  void TakeTasks(int64_t n, Task fn, int thread);

  std::mutex call_mutex_;  // Held through a whole ParallelFor.

  std::mutex mutex_;  // Guards the fields below it but next_task_.
  std::condition_variable start_;
  std::condition_variable done_;
  int64_t generation_ = 0;  // Calls so far.
  int64_t num_tasks_ = 0;
  const Task* fn_ = nullptr;
  int places_ = 0;  // Workers that may still join this call.
  int busy_ = 0;    // Workers that take part in it.
  bool stopping_ = false;
  std::atomic<int64_t> next_task_{0};

  std::vector<std::thread> workers_;
};

}  // namespace attnd
