// The engine: what the server calls. Check resolves a request, Prepare finds it a plan and memory;
// the caller fills the inputs in; Submit queues it; `done` brings the result.
//
// Thread-safe. Nothing here blocks but Drain. This is the one place that names concrete backends.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/backend/attention_backend.h"
#include "engine/core/attention_spec.h"
#include "engine/core/request_context.h"
#include "engine/memory/memory_pool.h"
#include "engine/sched/batcher.h"
#include "engine/sched/work.h"
#include "engine/sched/worker.h"

namespace attnd {

struct EngineOptions {
  int threads = 0;  // CPU threads; 0: one for each hardware thread.
  int64_t host_pool_bytes = 0;
  int64_t queue_bytes = 0;
};

// A request but for its tensors' bytes.
struct ForwardDescription {
  AttentionSpec spec;
  Sequences sequences;
  InputDescs inputs;
  bool return_lse = false;
  DType out_dtype = DType::kUnspecified;  // kUnspecified: the spec's.
};

// What would run, and what it needs.
struct PlanReport {
  absl::Status support;  // OK; UNIMPLEMENTED with the reason; RESOURCE_EXHAUSTED: it never fits.
  std::string backend;
  std::string engine;
  int64_t workspace_bytes = 0;
  int64_t device_bytes = 0;  // Inputs, page tables, outputs and workspace.
  bool deterministic_available = false;
  AttentionProblem problem;
};

// Memory of a request that passed every check, with its inputs still to be written.
class PreparedForward {
 public:
  const AttentionProblem& problem() const { return work_->problem; }
  // The bytes of an input buffer, of its description's size; empty for buffers without elements.
  std::span<std::byte> input(Buffer buffer) const {
    return work_->inputs[static_cast<int>(buffer)].bytes();
  }
  // [b, pages], row-major; empty unless paged.
  std::span<int32_t> page_table_k() const { return Table(work_->page_table_k); }
  std::span<int32_t> page_table_v() const { return Table(work_->page_table_v); }
  // How long writing the inputs took, for the report.
  void set_copy_in(absl::Duration duration) { work_->copy_in = duration; }

 private:
  friend class Engine;
  static std::span<int32_t> Table(const PoolBuffer& buffer) {
    return {reinterpret_cast<int32_t*>(buffer.data()),
            static_cast<size_t>(buffer.size()) / sizeof(int32_t)};
  }
  std::unique_ptr<ForwardWork> work_;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  // Drains without waiting.
  ~Engine();

  // Contradictions are INVALID_ARGUMENT; what no backend computes is in PlanReport::support. Shapes
  // may be left out where the spec states the sizes.
  absl::StatusOr<PlanReport> Plan(const ForwardDescription& description) const;

  // The checked problem, whose buffers must all be described. INVALID_ARGUMENT for contradictions.
  absl::StatusOr<AttentionProblem> Check(const ForwardDescription& description) const;

  // UNIMPLEMENTED where no backend computes it, RESOURCE_EXHAUSTED where the pool cannot hold it.
  absl::StatusOr<PreparedForward> Prepare(AttentionProblem problem, bool return_lse);

  // Queues the request. `done` runs exactly once: here if it is refused (page tables that leave the
  // pool, full queue, draining), else on a worker.
  void Submit(PreparedForward prepared, RequestContext context, ForwardDone done);

  // Refuses new work, and waits until what is queued has run or `deadline` has passed; then the
  // rest is dropped and what is running ended, with UNAVAILABLE. Later calls return at once.
  void Drain(absl::Time deadline);

  // In order of preference.
  std::vector<const AttentionBackend*> backends() const { return {cpu_.get()}; }
  const MemoryPool& host_pool() const { return *host_pool_; }
  int64_t queue_bytes() const { return options_.queue_bytes; }

 private:
  const EngineOptions options_;
  std::shared_ptr<MemoryPool> host_pool_;
  std::unique_ptr<AttentionBackend> cpu_;
  Batcher batcher_;
  std::unique_ptr<Worker> worker_;
  std::mutex drain_mutex_;
};

}  // namespace attnd
