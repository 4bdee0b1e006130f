// The engine: what the server calls. Check resolves a request, Prepare finds it a backend, a plan
// and memory; the caller fills the inputs in; Submit queues it; `done` brings the result.
//
// Thread-safe. Nothing here blocks but Drain and making an engine.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/backend/call_memory.h"
#include "engine/core/request_context.h"
#include "engine/engine_types.h"
#include "engine/memory/memory_pool.h"
#include "engine/sched/batcher.h"
#include "engine/sched/task_thread.h"
#include "engine/sched/work.h"
#include "engine/sched/worker.h"

namespace attnd {

// A request that passed every check, with memory, and with its inputs still to be written.
class PreparedCall {
 public:
  const AttentionProblem& problem() const { return work_->problem; }
  // The bytes of an input, of its description's size; empty where the call has none.
  std::span<std::byte> input(Piece piece) const {
    return work_->memory.inputs.In(work_->inputs.data(), piece);
  }
  // Null where the call has no such input.
  const TensorDesc* desc(Piece piece) const { return work_->memory.inputs.desc(piece); }
  // [b, pages], row-major.
  std::span<int32_t> page_table(Piece piece) const {
    const std::span<std::byte> bytes = input(piece);
    return {reinterpret_cast<int32_t*>(bytes.data()), bytes.size() / sizeof(int32_t)};
  }
  // [h]; empty without a learnable sink.
  std::span<const float> softmax_offset() const {
    const std::span<std::byte> bytes = input(Piece::kSoftmaxOffset);
    return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
  }
  // How long writing the inputs took, for the report.
  void set_copy_in(absl::Duration duration) { work_->copy_in = duration; }

 private:
  friend class Engine;

  std::unique_ptr<Work> work_;
  Batcher* batcher_ = nullptr;
};

class Engine {
 public:
  using PlanDone = absl::AnyInvocable<void(absl::StatusOr<PlanReport>)>;
  using PrepareDone = absl::AnyInvocable<void(absl::StatusOr<PreparedCall>)>;
  using WarmDone = absl::AnyInvocable<void(absl::StatusOr<int64_t>)>;

  // Starts the workers. At least one target. INTERNAL where a device gives no queue.
  static absl::StatusOr<std::unique_ptr<Engine>> Make(EngineParts parts);
  // Drains without waiting.
  ~Engine();

  // Calls `done` once: here if the plan is at hand, else on another thread when it has been built.
  // Contradictions are INVALID_ARGUMENT; what no backend computes is in PlanReport::support. Shapes
  // may be left out where the spec states the sizes, and backward tensors always.
  void Plan(const CallDescription& description, PlanDone done);

  // Builds what these calls need to run, so that no request waits for it, and gives how many of
  // them had something to build. Shapes as for Plan. Nothing is built where a description is wrong:
  // INVALID_ARGUMENT; what no backend computes is UNIMPLEMENTED, after the others were built.
  void Warm(const std::vector<CallDescription>& descriptions, WarmDone done);

  // All tensors must be described. INVALID_ARGUMENT for contradictions.
  // NOT_FOUND and FAILED_PRECONDITION for a context that never was, or is no more.
  absl::StatusOr<CheckedCall> Check(const CallDescription& description);

  // Calls `done` once, as Plan does. UNIMPLEMENTED where no backend computes it, RESOURCE_EXHAUSTED
  // where a pool cannot hold it.
  void Prepare(CheckedCall call, RequestContext context, PrepareDone done);

  // Queues the request. `done` runs exactly once: here if it is refused (page tables that leave the
  // pool, sinks of NaN or +inf, full queue, draining), else on a worker.
  void Submit(PreparedCall prepared, CallDone done);

  // Refuses new work, and waits until what was accepted has run or `deadline` has passed; then the
  // rest is dropped and what is running ended, with UNAVAILABLE; on a device, what has been
  // launched runs to its end. Later calls return at once.
  void Drain(absl::Time deadline);

  // Gives expired contexts' memory back, as calls do that need memory: for a server that is idle.
  void DropExpired(absl::Time now) { contexts_.Sweep(now); }

  // From now on nothing runs on these kernels.
  void Disable(const KernelFamily& family);
  std::vector<KernelFamily> disabled() const;

  EngineStats Stats() const;

  // In order of preference.
  std::vector<const AttentionBackend*> backends() const;
  const MemoryPool& host_pool() const { return *parts_.host_pool; }
  int64_t queue_bytes() const { return parts_.queue_bytes; }

 private:
  struct Lane;  // A target with its queue and workers.

  explicit Engine(EngineParts parts);
  bool PlansAreReady(const CheckedCall& call) const;
  absl::StatusOr<std::unique_ptr<CallPlan>> BuildPlan(AttentionBackend& backend,
                                                      const AttentionProblem& problem,
                                                      Pass pass) const;
  absl::StatusOr<PlanReport> Report(CheckedCall call) const;
  absl::AnyInvocable<std::string(Work&, const std::shared_ptr<const PoolBuffer>&)> Retainer(
      absl::Duration lease);
  absl::StatusOr<PreparedCall> Place(std::unique_ptr<Work> work);
  absl::Status Reserve(const Lane& lane, Work& work);

  const EngineParts parts_;
  ContextStore contexts_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  TaskThread planner_;
  mutable std::mutex disabled_mutex_;
  std::vector<KernelFamily> disabled_;
  std::atomic<bool> draining_ = false;
  std::mutex drain_mutex_;
};

}  // namespace attnd
