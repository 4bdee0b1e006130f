#include "engine/sched/worker.h"

#include <utility>

#include "absl/time/clock.h"
#include "engine/core/status.h"

namespace attnd {

void RunForward(Batcher::WorkPtr work, int64_t batch_size) {
  const absl::Time start = absl::Now();
  ForwardBuffers buffers;
  for (int i = 0; i < kNumInputBuffers; ++i) buffers.inputs[i] = work->inputs[i].data();
  if (work->problem.is_paged) {
    buffers.page_table_k = reinterpret_cast<const int32_t*>(work->page_table_k.data());
    buffers.page_table_v = reinterpret_cast<const int32_t*>(work->page_table_v.data());
  }
  buffers.out = work->out.data();
  buffers.lse = reinterpret_cast<float*>(work->lse.data());
  buffers.workspace = work->workspace.bytes();
  buffers.cancellation = work->context.cancellation.get();
  const absl::Status status = work->plan->Forward(work->problem, buffers);
  if (!status.ok()) {
    const absl::Status live = Batcher::CheckLive(*work, absl::Now());
    work->done(absl::IsCancelled(status) && !live.ok() ? live : status);
    return;
  }
  const BackendInfo& info = work->backend->info();
  ForwardResult result;
  result.out_desc = std::move(work->problem.out_desc);
  result.lse_desc = std::move(work->problem.lse_desc);
  result.out = std::move(work->out);
  result.lse = std::move(work->lse);
  result.report = {.backend = info.name,
                   .device = info.devices.empty() ? "" : info.devices.front().name,
                   .engine = std::string(work->plan->engine()),
                   .batch_size = batch_size,
                   .queue = start - work->submitted,
                   .copy_in = work->copy_in,
                   .compute = absl::Now() - start};
  ForwardDone done = std::move(work->done);
  work.reset();  // Inputs and workspace go back before the reply is made.
  done(std::move(result));
}

void DropAll(std::vector<Batcher::WorkPtr> dropped, absl::Time now, const absl::Status& otherwise) {
  for (Batcher::WorkPtr& work : dropped) {
    const absl::Status status = Batcher::CheckLive(*work, now);
    work->done(status.ok() ? otherwise : status);
  }
}

bool Worker::WaitUntilEnded(absl::Time deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, absl::ToChronoTime(deadline), [this] { return ended_; });
}

void Worker::Abandon() {
  std::lock_guard lock(mutex_);
  abandoned_ = true;
  if (running_ != nullptr) running_->Cancel(CancellationToken::Cause::kShutdown);
}

void Worker::Loop(Batcher& batcher) {
  while (batcher.WaitForWork()) {
    const absl::Time now = absl::Now();
    Batcher::Pulled pulled = batcher.Pull(now);
    DropAll(std::move(pulled.dropped), now, absl::OkStatus());
    const auto size = static_cast<int64_t>(pulled.batch.size());
    for (Batcher::WorkPtr& work : pulled.batch) {
      {
        std::lock_guard lock(mutex_);
        running_ = work->context.cancellation;
        if (abandoned_) running_->Cancel(CancellationToken::Cause::kShutdown);
      }
      RunForward(std::move(work), size);
    }
  }
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

}  // namespace attnd
