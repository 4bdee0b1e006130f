#include "engine/cpu/thread_team.h"

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

void ThreadTeam::ParallelFor(int64_t n, int max_threads, Task fn) {
  if (n <= 0) return;
  const auto workers = static_cast<int>(
      std::min<int64_t>({n - 1, int64_t{max_threads} - 1, static_cast<int64_t>(workers_.size())}));
  std::lock_guard<std::mutex> call(call_mutex_);
  next_task_.store(0, std::memory_order_relaxed);
  if (workers <= 0) {
    TakeTasks(n, fn, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fn_ = &fn;
    num_tasks_ = n;
    places_ = workers;
    ++generation_;
  }
  for (int t = 0; t < workers; ++t) start_.notify_one();
  TakeTasks(n, fn, 0);
  // A worker that has not come yet is not waited for: on a busy machine that may take long.
  std::unique_lock<std::mutex> lock(mutex_);
  places_ = 0;
  done_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadTeam::Work(int thread) {
  int64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stopping_ || (generation_ != seen && places_ > 0); });
    if (stopping_) return;
    seen = generation_;
    const Task fn = *fn_;
    const int64_t n = num_tasks_;
    --places_;
    ++busy_;
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
