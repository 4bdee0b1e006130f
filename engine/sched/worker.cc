#include "engine/sched/worker.h"

#include <utility>

#include "absl/time/clock.h"
#include "engine/core/status.h"

namespace attnd {

namespace {

absl::Status ComputeInHostMemory(ForwardWork& work, ExecutionReport& report) {
  const absl::Time start = absl::Now();
  ForwardBuffers buffers =
      BuffersIn(work.memory, work.problem, work.with_lse, work.inputs.data(), work.outputs.data());
  buffers.workspace = work.device.bytes();
  buffers.cancellation = work.context.cancellation.get();
  const absl::Status status = work.plan->Forward(work.problem, buffers);
  report.compute = absl::Now() - start;
  return status;
}

absl::Status EnqueueOnDevice(ForwardWork& work, DeviceQueue& queue) {
  std::byte* const inputs = work.device.data();
  std::byte* const outputs = inputs + work.memory.input_bytes;
  ForwardBuffers buffers = BuffersIn(work.memory, work.problem, work.with_lse, inputs, outputs);
  buffers.workspace = work.device.bytes().subspan(
      static_cast<size_t>(work.memory.input_bytes + work.memory.output_bytes));
  buffers.queue = &queue;
  ATTND_RETURN_IF_ERROR(queue.Stamp(0));
  ATTND_RETURN_IF_ERROR(queue.Copy(inputs, work.inputs.data(), work.memory.input_bytes));
  ATTND_RETURN_IF_ERROR(queue.Stamp(1));
  ATTND_RETURN_IF_ERROR(work.plan->Forward(work.problem, buffers));
  ATTND_RETURN_IF_ERROR(queue.Stamp(2));
  ATTND_RETURN_IF_ERROR(queue.Copy(work.outputs.data(), outputs, work.memory.output_bytes));
  return queue.Stamp(3);
}

absl::Status ComputeOnDevice(ForwardWork& work, DeviceQueue& queue, ExecutionReport& report) {
  const absl::Status enqueued = EnqueueOnDevice(work, queue);
  // After an error too: what was enqueued still uses the request's memory.
  const absl::Status done = queue.Wait();
  ATTND_RETURN_IF_ERROR(enqueued);
  ATTND_RETURN_IF_ERROR(done);
  report.copy_in = queue.Between(0, 1);
  report.compute = queue.Between(1, 2);
  report.copy_out = queue.Between(2, 3);
  return absl::OkStatus();
}

}  // namespace

void RunForward(Batcher::WorkPtr work, int64_t batch_size, DeviceQueue* queue) {
  const BackendInfo& info = work->backend->info();
  ForwardResult result;
  result.report = {.backend = info.name,
                   .device = info.devices.empty() ? "" : info.devices.front().name,
                   .engine = std::string(work->plan->engine()),
                   .batch_size = batch_size,
                   .queue = absl::Now() - work->submitted,
                   .plan_cache_hit = work->plan_cache_hit};
  const absl::Status status = queue == nullptr ? ComputeInHostMemory(*work, result.report)
                                               : ComputeOnDevice(*work, *queue, result.report);
  if (!status.ok()) {
    const absl::Status live = Batcher::CheckLive(*work, absl::Now());
    work->done(absl::IsCancelled(status) && !live.ok() ? live : status);
    return;
  }
  result.report.copy_in += work->copy_in;
  result.out_desc = std::move(work->problem.out_desc);
  result.lse_desc = std::move(work->problem.lse_desc);
  result.memory = std::make_shared<const PoolBuffer>(std::move(work->outputs));
  const std::span<const std::byte> bytes = result.memory->bytes();
  result.out = bytes.first(static_cast<size_t>(*NumBytes(result.out_desc)));
  if (work->with_lse) {
    result.lse = bytes.subspan(static_cast<size_t>(work->memory.lse),
                               static_cast<size_t>(*NumBytes(result.lse_desc)));
  }
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
      RunForward(std::move(work), size, queue_.get());
    }
  }
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

}  // namespace attnd
