#include "engine/engine.h"

#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "engine/core/layout.h"
#include "engine/core/status.h"
#include "engine/cpu/cpu_backend.h"

namespace attnd {
namespace {

int64_t BytesOf(const TensorDesc& desc) {
  return *NumBytes(desc);  // Resolve checked that it does not pass 2^63.
}

int64_t PageTableBytes(const AttentionProblem& problem) {
  return problem.batch * problem.pages_per_sequence * static_cast<int64_t>(sizeof(int32_t));
}

std::span<const int32_t> Table(const PoolBuffer& buffer) {
  return {reinterpret_cast<const int32_t*>(buffer.data()),
          static_cast<size_t>(buffer.size()) / sizeof(int32_t)};
}

// Inputs, page tables, outputs and workspace. Plan takes shapes that no memory could hold:
// saturates.
int64_t DeviceBytes(const AttentionProblem& problem, bool with_lse, int64_t workspace_bytes) {
  int64_t total = workspace_bytes;
  auto add = [&](const TensorDesc& desc) {
    if (__builtin_add_overflow(total, BytesOf(desc), &total)) total = INT64_MAX;
  };
  for (const auto& input : problem.inputs) {
    if (input) add(*input);
  }
  if (problem.is_paged && __builtin_add_overflow(total, 2 * PageTableBytes(problem), &total)) {
    total = INT64_MAX;
  }
  add(problem.out_desc);
  if (with_lse) add(problem.lse_desc);
  return total;
}

// Inputs, outputs and page tables of a problem, by pool blocks and vectors.
absl::Status AllocateMemory(MemoryPool& pool, bool with_lse, ForwardWork& work) {
  auto allocate = [&](int64_t bytes, PoolBuffer& target) -> absl::Status {
    ATTND_ASSIGN_OR_RETURN(target, pool.Allocate(bytes));
    work.bytes += bytes;
    return absl::OkStatus();
  };
  const AttentionProblem& p = work.problem;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (p.inputs[i]) ATTND_RETURN_IF_ERROR(allocate(BytesOf(*p.inputs[i]), work.inputs[i]));
  }
  ATTND_RETURN_IF_ERROR(allocate(BytesOf(p.out_desc), work.out));
  if (with_lse) ATTND_RETURN_IF_ERROR(allocate(BytesOf(p.lse_desc), work.lse));
  ATTND_RETURN_IF_ERROR(allocate(work.plan->workspace_bytes(), work.workspace));
  if (!p.is_paged) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(allocate(PageTableBytes(p), work.page_table_k));
  return allocate(PageTableBytes(p), work.page_table_v);
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      host_pool_(MakeHostPool(options.host_pool_bytes, "--pinned-pool")),
      cpu_(std::make_unique<CpuBackend>(options.threads)),
      batcher_({.queue_bytes = options.queue_bytes, .flag = "--max-queue"}),
      worker_(std::make_unique<Worker>(batcher_)) {}

Engine::~Engine() { Drain(absl::InfinitePast()); }

absl::StatusOr<PlanReport> Engine::Plan(const ForwardDescription& d) const {
  ATTND_ASSIGN_OR_RETURN(AttentionProblem problem,
                         Resolve(d.spec, d.sequences, d.inputs,
                                 {.out_dtype = d.out_dtype, .derive_missing_shapes = true}));
  PlanReport report;
  report.support = cpu_->CheckSupport(problem);
  report.backend = cpu_->info().name;
  if (report.support.ok()) {
    ATTND_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPlan> plan, cpu_->BuildPlan(problem));
    report.engine = std::string(plan->engine());
    report.workspace_bytes = plan->workspace_bytes();
    report.device_bytes = DeviceBytes(problem, d.return_lse, report.workspace_bytes);
    report.deterministic_available = true;
    report.support = host_pool_->CheckCanEverHold(report.device_bytes);
  }
  report.problem = std::move(problem);
  return report;
}

absl::StatusOr<AttentionProblem> Engine::Check(const ForwardDescription& d) const {
  return Resolve(d.spec, d.sequences, d.inputs, {.out_dtype = d.out_dtype});
}

absl::StatusOr<PreparedForward> Engine::Prepare(AttentionProblem problem, bool return_lse) {
  PreparedForward prepared;
  prepared.work_ = std::make_unique<ForwardWork>();
  ForwardWork& work = *prepared.work_;
  work.problem = std::move(problem);
  work.backend = cpu_.get();
  ATTND_ASSIGN_OR_RETURN(work.plan, work.backend->BuildPlan(work.problem));
  ATTND_RETURN_IF_ERROR(host_pool_->CheckCanEverHold(
      DeviceBytes(work.problem, return_lse, work.plan->workspace_bytes())));
  const absl::Status status = AllocateMemory(*host_pool_, return_lse, work);
  if (status.ok()) return prepared;
  // What waits in the queue and will never run makes room; then from the start, with nothing held.
  std::vector<Batcher::WorkPtr> dropped;
  const absl::Time now = absl::Now();
  batcher_.Sweep(now, dropped);
  if (dropped.empty()) return status;
  DropAll(std::move(dropped), now, absl::OkStatus());
  problem = std::move(work.problem);
  prepared.work_.reset();
  return Prepare(std::move(problem), return_lse);
}

void Engine::Submit(PreparedForward prepared, RequestContext context, ForwardDone done) {
  std::unique_ptr<ForwardWork> work = std::move(prepared.work_);
  absl::Status status;
  if (const AttentionProblem& p = work->problem; p.is_paged) {
    status = CheckPageTable(p, Table(work->page_table_k), p.num_pages_k, "sequences.page_table_k");
    if (status.ok()) {
      status =
          CheckPageTable(p, Table(work->page_table_v), p.num_pages_v, "sequences.page_table_v");
    }
  }
  std::vector<Batcher::WorkPtr> dropped;
  const absl::Time now = absl::Now();
  if (status.ok()) {
    work->context = std::move(context);
    work->submitted = now;
    work->done = std::move(done);
    status = Batcher::CheckLive(*work, now);
    if (status.ok()) status = batcher_.Submit(work, now, dropped);
    if (!status.ok()) done = std::move(work->done);
  }
  DropAll(std::move(dropped), now, absl::OkStatus());
  if (!status.ok()) {
    work.reset();
    done(std::move(status));
  }
}

void Engine::Drain(absl::Time deadline) {
  batcher_.Close();
  std::lock_guard lock(drain_mutex_);
  while (!batcher_.empty() && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(2));
  }
  DropAll(batcher_.TakeAll(), absl::Now(),
          MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "",
                    "the server stopped before the request was launched"));
  if (worker_ == nullptr) return;
  if (!worker_->WaitUntilEnded(deadline)) worker_->Abandon();
  worker_.reset();
}

}  // namespace attnd
