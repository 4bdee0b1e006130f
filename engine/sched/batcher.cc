#include "engine/sched/batcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr absl::Duration kRetryAfter = absl::Milliseconds(50);

}  // namespace

absl::Status Batcher::CheckLive(const Work& work, absl::Time now) {
  switch (work.context.cancellation->cause()) {
    case CancellationToken::Cause::kNone: break;
    case CancellationToken::Cause::kClient:
      // gRPC cancels a call whose deadline passes.
      if (now >= work.context.deadline) break;
      return MakeError(absl::StatusCode::kCancelled, reason::kCancelled, "",
                       "the client cancelled the request");
    case CancellationToken::Cause::kShutdown:
      return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "",
                       "the server stopped before the request was done");
  }
  if (now >= work.context.deadline) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kDeadlinePassed, "",
                     "the deadline passed before the request was done");
  }
  return absl::OkStatus();
}

absl::Status Batcher::Submit(WorkPtr& work, absl::Time now, std::vector<WorkPtr>& dropped) {
  std::lock_guard lock(mutex_);
  if (closed_) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "",
                     "the server is draining and takes no new work");
  }
  if (work->bytes > limits_.queue_bytes - queued_bytes_) SweepLocked(now, dropped);
  const int64_t have = limits_.queue_bytes - queued_bytes_;
  // An empty queue takes any request: what the pool could hold can always run.
  if (work->bytes > have && !queue_.empty()) {
    return WithRetryAfter(
        MakeError(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "",
                  absl::StrCat("the queue (", limits_.flag, ") is full: need ", work->bytes,
                               " bytes, have ", have, " of ", limits_.queue_bytes)),
        kRetryAfter);
  }
  queued_bytes_ += work->bytes;
  queue_.push_back(std::move(work));
  changed_.notify_one();
  return absl::OkStatus();
}

Batcher::Pulled Batcher::Pull(absl::Time now) {
  Pulled pulled;
  std::lock_guard lock(mutex_);
  while (!queue_.empty() && pulled.batch.empty()) {
    WorkPtr work = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= work->bytes;
    auto& target = CheckLive(*work, now).ok() ? pulled.batch : pulled.dropped;
    target.push_back(std::move(work));
  }
  return pulled;
}

bool Batcher::WaitForWork() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
  return !queue_.empty();
}

void Batcher::Close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

std::vector<Batcher::WorkPtr> Batcher::TakeAll() {
  std::lock_guard lock(mutex_);
  std::vector<WorkPtr> all(std::make_move_iterator(queue_.begin()),
                           std::make_move_iterator(queue_.end()));
  queue_.clear();
  queued_bytes_ = 0;
  return all;
}

bool Batcher::empty() const {
  std::lock_guard lock(mutex_);
  return queue_.empty();
}

void Batcher::Sweep(absl::Time now, std::vector<WorkPtr>& dropped) {
  std::lock_guard lock(mutex_);
  SweepLocked(now, dropped);
}

void Batcher::SweepLocked(absl::Time now, std::vector<WorkPtr>& dropped) {
  std::erase_if(queue_, [&](WorkPtr& work) {
    if (CheckLive(*work, now).ok()) return false;
    queued_bytes_ -= work->bytes;
    dropped.push_back(std::move(work));
    return true;
  });
}

}  // namespace attnd
