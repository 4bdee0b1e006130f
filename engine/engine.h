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
#include "engine/core/request_context.h"
#include "engine/engine_types.h"
#include "engine/memory/memory_pool.h"
#include "engine/sched/batcher.h"
#include "engine/sched/task_thread.h"
#include "engine/sched/work.h"
#include "engine/sched/worker.h"

namespace attnd {

// A request that passed every check, with memory, and with its inputs still to be written.
class PreparedForward {
 public:
  const AttentionProblem& problem() const { return work_->problem; }
  // The bytes of an input buffer, of its description's size; empty for buffers without elements.
  std::span<std::byte> input(Buffer buffer) const;
  // [b, pages], row-major; empty unless paged.
  std::span<int32_t> page_table_k() const { return Table(work_->memory.page_table_k); }
  std::span<int32_t> page_table_v() const { return Table(work_->memory.page_table_v); }
  // How long writing the inputs took, for the report.
  void set_copy_in(absl::Duration duration) { work_->copy_in = duration; }

 private:
  friend class Engine;
  std::span<int32_t> Table(int64_t offset) const;

  std::unique_ptr<ForwardWork> work_;
  Batcher* batcher_ = nullptr;
};

class Engine {
 public:
  using PlanDone = absl::AnyInvocable<void(absl::StatusOr<PlanReport>)>;
  using PrepareDone = absl::AnyInvocable<void(absl::StatusOr<PreparedForward>)>;

  // Starts the workers. At least one target. INTERNAL where a device gives no queue.
  static absl::StatusOr<std::unique_ptr<Engine>> Make(EngineParts parts);
  // Drains without waiting.
  ~Engine();

  // Calls `done` once: here if the plan is at hand, else on another thread when it has been built.
  // Contradictions are INVALID_ARGUMENT; what no backend computes is in PlanReport::support. Shapes
  // may be left out where the spec states the sizes.
  void Plan(const ForwardDescription& description, PlanDone done);

  // The checked problem, whose buffers must all be described. INVALID_ARGUMENT for contradictions.
  absl::StatusOr<AttentionProblem> Check(const ForwardDescription& description) const;

  // Calls `done` once, as Plan does. UNIMPLEMENTED where no backend computes it, RESOURCE_EXHAUSTED
  // where a pool cannot hold it.
  void Prepare(AttentionProblem problem, bool return_lse, RequestContext context, PrepareDone done);

  // Queues the request. `done` runs exactly once: here if it is refused (page tables that leave the
  // pool, full queue, draining), else on a worker.
  void Submit(PreparedForward prepared, ForwardDone done);

  // Refuses new work, and waits until what was accepted has run or `deadline` has passed; then the
  // rest is dropped and what is running ended, with UNAVAILABLE; on a device, what has been
  // launched runs to its end. Later calls return at once.
  void Drain(absl::Time deadline);

  // In order of preference.
  std::vector<const AttentionBackend*> backends() const;
  const MemoryPool& host_pool() const { return *parts_.host_pool; }
  int64_t queue_bytes() const { return parts_.queue_bytes; }

 private:
  struct Lane;  // A target with its queue and workers.

  explicit Engine(EngineParts parts);
  bool PlansAreReady(const AttentionProblem& problem) const;
  absl::StatusOr<PlanReport> Report(AttentionProblem problem, bool with_lse) const;
  absl::StatusOr<PreparedForward> Place(std::unique_ptr<ForwardWork> work);
  absl::Status Reserve(const Lane& lane, ForwardWork& work);

  const EngineParts parts_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  TaskThread planner_;
  std::atomic<bool> draining_ = false;
  std::mutex drain_mutex_;
};

}  // namespace attnd
