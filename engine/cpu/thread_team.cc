#include "engine/cpu/thread_team.h"

#include <omp.h>

#include <algorithm>

namespace attnd {

ThreadTeam::ThreadTeam(int threads) {
  if (threads <= 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  workers_.reserve(static_cast<size_t>(threads - 1));
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { Work(t); });
}

ThreadTeam::~ThreadTeam() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::ParallelFor(int64_t n, Task fn) {
  if (n <= 0) return;
  std::lock_guard<std::mutex> call(call_mutex_);
  omp_set_num_threads(1);  // A variable of the calling thread.
  next_task_.store(0, std::memory_order_relaxed);
  if (n == 1 || workers_.empty()) {
    TakeTasks(n, fn, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fn_ = &fn;
    num_tasks_ = n;
    busy_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  start_.notify_all();
  TakeTasks(n, fn, 0);
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadTeam::Work(int thread) {
  omp_set_num_threads(1);
  int64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    const Task fn = *fn_;
    const int64_t n = num_tasks_;
    lock.unlock();
    TakeTasks(n, fn, thread);
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

void ThreadTeam::TakeTasks(int64_t n, Task fn, int thread) {
  while (true) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= n) return;
    fn(task, thread);
  }
}

}  // namespace attnd
