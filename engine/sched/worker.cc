#include "engine/sched/worker.h"

#include <utility>

#include "absl/time/clock.h"
#include "engine/core/status.h"

namespace attnd {

namespace {

// Where a call computes: its blocks, workspace and queue, in the backend's address space.
struct Place {
  std::byte* inputs = nullptr;
  std::byte* outputs = nullptr;
  std::span<std::byte> workspace;
  DeviceQueue* queue = nullptr;
};

template <typename Buffers>
Buffers Completed(Buffers buffers, const Work& work, const Place& place) {
  buffers.workspace = place.workspace;
  buffers.queue = place.queue;
  buffers.cancellation = work.context.cancellation.get();
  return buffers;
}

absl::Status Run(Work& work, const Place& place) {
  if (work.pass == Pass::kForward) {
    return static_cast<AttentionPlan&>(*work.plan)
        .Forward(work.problem, Completed(ForwardBuffersIn(work.memory, place.inputs, place.outputs),
                                         work, place));
  }
  return static_cast<BackwardPlan&>(*work.plan)
      .Backward(work.problem, Completed(BackwardBuffersIn(work.memory, place.inputs, place.outputs),
                                        work, place));
}

absl::Status ComputeInHostMemory(Work& work, ExecutionReport& report) {
  const absl::Time start = absl::Now();
  const absl::Status status =
      Run(work, {work.inputs.data(), work.outputs.data(), work.device.bytes(), /*queue=*/nullptr});
  report.compute = absl::Now() - start;
  return status;
}

absl::Status EnqueueOnDevice(Work& work, DeviceQueue& queue) {
  const int64_t input_bytes = work.memory.inputs.bytes();
  const int64_t output_bytes = work.memory.outputs.bytes();
  std::byte* const inputs = work.device.data();
  std::byte* const outputs = inputs + input_bytes;
  ATTND_RETURN_IF_ERROR(queue.Stamp(0));
  ATTND_RETURN_IF_ERROR(queue.Copy(inputs, work.inputs.data(), input_bytes));
  ATTND_RETURN_IF_ERROR(queue.Stamp(1));
  ATTND_RETURN_IF_ERROR(
      Run(work,
          {inputs, outputs,
           work.device.bytes().subspan(static_cast<size_t>(input_bytes + output_bytes)), &queue}));
  ATTND_RETURN_IF_ERROR(queue.Stamp(2));
  ATTND_RETURN_IF_ERROR(queue.Copy(work.outputs.data(), outputs, output_bytes));
  return queue.Stamp(3);
}

absl::Status ComputeOnDevice(Work& work, DeviceQueue& queue, ExecutionReport& report) {
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

void RunCall(Batcher::WorkPtr work, int64_t batch_size, DeviceQueue* queue) {
  const BackendInfo& info = work->backend->info();
  CallResult result;
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
  result.layout = work->memory.outputs;
  result.memory = std::make_shared<const PoolBuffer>(std::move(work->outputs));
  if (work->retain) result.context = work->retain(*work, result.memory);
  CallDone done = std::move(work->done);
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
      RunCall(std::move(work), size, queue_.get());
    }
  }
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

}  // namespace attnd
