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

void TaskThread::Post(Task task, int64_t bytes) {
  absl::Status refusal;
  {
    std::lock_guard lock(mutex_);
    const int64_t have = capacity_bytes_ - waiting_bytes_;
    if (refusing_) {
      refusal = Draining();
    } else if (bytes > have && !tasks_.empty()) {
      refusal = WithRetryAfter(
          MakeError(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "",
                    absl::StrCat("too much waits for plans to be built (", flag_, "): need ", bytes,
                                 " bytes, have ", have, " of ", capacity_bytes_)),
          kRetryAfter);
    } else {
      tasks_.push_back({std::move(task), bytes});
      waiting_bytes_ += bytes;
      changed_.notify_all();
      return;
    }
  }
  task(refusal);
}

void TaskThread::Finish(absl::Time deadline) {
  {
    std::unique_lock lock(mutex_);
    refusing_ = true;
    changed_.wait_until(lock, absl::ToChronoTime(deadline),
                        [this] { return tasks_.empty() && !running_; });
  }
  Close();
}

void TaskThread::Close() {
  std::deque<Entry> refused;
  {
    std::lock_guard lock(mutex_);
    refusing_ = closed_ = true;
    refused.swap(tasks_);
    waiting_bytes_ = 0;
    changed_.notify_all();
  }
  for (Entry& entry : refused) entry.task(Draining());
}

void TaskThread::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
    if (closed_) return;
    Entry entry = std::move(tasks_.front());
    tasks_.pop_front();
    waiting_bytes_ -= entry.bytes;
    running_ = true;
    lock.unlock();
    entry.task(absl::OkStatus());
    entry.task = nullptr;
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

}  // namespace attnd
