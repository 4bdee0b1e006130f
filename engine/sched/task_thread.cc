#include "engine/sched/task_thread.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr absl::Duration kRetryAfter = absl::Seconds(1);

absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "",
                   "the server is draining and takes no new work");
}

}  // namespace

TaskThread::~TaskThread() {
  Close();
  thread_.join();
}

void TaskThread::Post(Task task) {
  absl::Status refusal;
  {
    std::lock_guard lock(mutex_);
    if (closed_) {
      refusal = Draining();
    } else if (tasks_.size() >= capacity_) {
      refusal = WithRetryAfter(
          MakeError(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "",
                    absl::StrCat(tasks_.size(), " requests wait for plans to be built already")),
          kRetryAfter);
    } else {
      tasks_.push_back(std::move(task));
      changed_.notify_one();
      return;
    }
  }
  task(refusal);
}

void TaskThread::Close() {
  std::deque<Task> refused;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    refused.swap(tasks_);
    changed_.notify_one();
  }
  for (Task& task : refused) task(Draining());
}

void TaskThread::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
    if (closed_) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task(absl::OkStatus());
    task = nullptr;
    lock.lock();
  }
}

}  // namespace attnd
