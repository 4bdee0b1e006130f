#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "engine/backend/forward_memory.h"
#include "engine/core/layout.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr const char* kQueueFlag = "--max-queue";

int64_t DeviceBytes(const ForwardMemory& memory, const AttentionPlan& plan) {
  return SaturatingSum(SaturatingSum(memory.input_bytes, memory.output_bytes),
                       plan.workspace_bytes());
}

// What of it the host pool holds: everything, but for the workspace of a device.
int64_t HostBytes(const ForwardMemory& memory, const AttentionPlan& plan, bool on_device) {
  return on_device ? SaturatingSum(memory.input_bytes, memory.output_bytes)
                   : DeviceBytes(memory, plan);
}

absl::Status CheckCanEverHold(const MemoryPool& host, const MemoryPool* device,
                              const ForwardMemory& memory, const AttentionPlan& plan) {
  ATTND_RETURN_IF_ERROR(host.CheckCanEverHold(HostBytes(memory, plan, device != nullptr)));
  return device == nullptr ? absl::OkStatus() : device->CheckCanEverHold(DeviceBytes(memory, plan));
}

absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "",
                   "the server is draining and takes no new work");
}

absl::Status CheckPageTables(const PreparedForward& prepared) {
  const AttentionProblem& p = prepared.problem();
  if (!p.is_paged) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(
      CheckPageTable(p, prepared.page_table_k(), p.num_pages_k, "sequences.page_table_k"));
  return CheckPageTable(p, prepared.page_table_v(), p.num_pages_v, "sequences.page_table_v");
}

}  // namespace

std::span<std::byte> PreparedForward::input(Buffer buffer) const {
  const int i = static_cast<int>(buffer);
  const std::optional<TensorDesc>& desc = work_->problem.inputs[i];
  if (!desc) return {};
  return work_->inputs.bytes().subspan(static_cast<size_t>(work_->memory.inputs[i]),
                                       static_cast<size_t>(*NumBytes(*desc)));
}

std::span<int32_t> PreparedForward::Table(int64_t offset) const {
  const auto bytes = static_cast<size_t>(work_->memory.page_table_bytes);
  if (bytes == 0) return {};
  return {reinterpret_cast<int32_t*>(work_->inputs.data() + offset), bytes / sizeof(int32_t)};
}

struct Engine::Lane {
  Lane(const ComputeTarget& target, int64_t queue_bytes)
      : backend(*target.backend),
        device_pool(target.device_pool.get()),
        batcher({.queue_bytes = queue_bytes, .flag = kQueueFlag}) {}

  AttentionBackend& backend;
  MemoryPool* const device_pool;
  Batcher batcher;
  std::vector<std::unique_ptr<Worker>> workers;
};

Engine::Engine(EngineParts parts)
    : parts_(std::move(parts)), planner_(parts_.queue_bytes, kQueueFlag) {
  for (const ComputeTarget& target : parts_.targets) {
    lanes_.push_back(std::make_unique<Lane>(target, parts_.queue_bytes));
  }
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Make(EngineParts parts) {
  std::unique_ptr<Engine> engine(new Engine(std::move(parts)));
  for (size_t i = 0; i < engine->lanes_.size(); ++i) {
    Lane& lane = *engine->lanes_[i];
    for (int n = 0; n < engine->parts_.targets[i].workers; ++n) {
      ATTND_ASSIGN_OR_RETURN(std::unique_ptr<DeviceQueue> queue, lane.backend.MakeQueue());
      lane.workers.push_back(std::make_unique<Worker>(lane.batcher, std::move(queue)));
    }
  }
  return engine;
}

Engine::~Engine() { Drain(absl::InfinitePast()); }

std::vector<const AttentionBackend*> Engine::backends() const {
  std::vector<const AttentionBackend*> backends;
  for (const ComputeTarget& target : parts_.targets) backends.push_back(target.backend.get());
  return backends;
}

absl::StatusOr<AttentionProblem> Engine::Check(const ForwardDescription& d) const {
  return Resolve(d.spec, d.sequences, d.inputs, {.out_dtype = d.out_dtype});
}

bool Engine::PlansAreReady(const AttentionProblem& problem) const {
  return std::all_of(lanes_.begin(), lanes_.end(), [&](const std::unique_ptr<Lane>& lane) {
    return lane->backend.PlanIsReady(problem);
  });
}

void Engine::Plan(const ForwardDescription& d, PlanDone done) {
  absl::StatusOr<AttentionProblem> problem = Resolve(
      d.spec, d.sequences, d.inputs, {.out_dtype = d.out_dtype, .derive_missing_shapes = true});
  if (!problem.ok()) return done(problem.status());
  const bool ready = PlansAreReady(*problem);
  auto report = [this, problem = *std::move(problem), with_lse = d.return_lse]() mutable {
    return CatchBadAlloc([&] { return Report(std::move(problem), with_lse); });
  };
  if (draining_) return done(Draining());
  if (ready) return done(report());
  planner_.Post(
      [report = std::move(report), done = std::move(done)](const absl::Status& go) mutable {
        if (go.ok()) {
          done(report());
        } else {
          done(go);
        }
      },
      /*bytes=*/0);
}

absl::StatusOr<PlanReport> Engine::Report(AttentionProblem problem, bool with_lse) const {
  PlanReport report;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const absl::StatusOr<std::unique_ptr<AttentionPlan>> plan = lane->backend.BuildPlan(problem);
    report.backend = lane->backend.info().name;
    report.support = plan.status();
    if (absl::IsUnimplemented(plan.status())) continue;
    if (!plan.ok()) break;
    const ForwardMemory memory = LayOutForward(problem, with_lse);
    report.engine = std::string((*plan)->engine());
    report.workspace_bytes = (*plan)->workspace_bytes();
    report.device_bytes = DeviceBytes(memory, **plan);
    report.deterministic_available = true;
    report.support = CheckCanEverHold(*parts_.host_pool, lane->device_pool, memory, **plan);
    break;
  }
  report.problem = std::move(problem);
  return report;
}

void Engine::Prepare(AttentionProblem problem, bool return_lse, RequestContext context,
                     PrepareDone done) {
  auto work = std::make_unique<ForwardWork>();
  work->problem = std::move(problem);
  work->with_lse = return_lse;
  work->context = std::move(context);
  work->plan_cache_hit = PlansAreReady(work->problem);
  const bool ready = work->plan_cache_hit;
  // While it waits, its message holds them.
  const int64_t bytes = LayOutForward(work->problem, work->with_lse).input_bytes;
  auto place = [this, work = std::move(work)]() mutable {
    return CatchBadAlloc([&]() -> absl::StatusOr<PreparedForward> {
      ATTND_RETURN_IF_ERROR(Batcher::CheckLive(*work, absl::Now()));
      return Place(std::move(work));
    });
  };
  if (draining_) return done(Draining());
  if (ready) return done(place());
  planner_.Post(
      [place = std::move(place), done = std::move(done)](const absl::Status& go) mutable {
        if (go.ok()) {
          done(place());
        } else {
          done(go);
        }
      },
      bytes);
}

absl::StatusOr<PreparedForward> Engine::Place(std::unique_ptr<ForwardWork> work) {
  absl::Status refusal;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    absl::StatusOr<std::unique_ptr<AttentionPlan>> plan = lane->backend.BuildPlan(work->problem);
    refusal = plan.status();
    if (absl::IsUnimplemented(refusal)) continue;
    ATTND_RETURN_IF_ERROR(refusal);
    work->backend = &lane->backend;
    work->plan = *std::move(plan);
    work->memory = LayOutForward(work->problem, work->with_lse);
    ATTND_RETURN_IF_ERROR(Reserve(*lane, *work));
    PreparedForward prepared;
    prepared.work_ = std::move(work);
    prepared.batcher_ = &lane->batcher;
    return prepared;
  }
  return refusal;
}

absl::Status Engine::Reserve(const Lane& lane, ForwardWork& work) {
  const ForwardMemory& memory = work.memory;
  MemoryPool& host = *parts_.host_pool;
  ATTND_RETURN_IF_ERROR(CheckCanEverHold(host, lane.device_pool, memory, *work.plan));
  work.bytes = DeviceBytes(memory, *work.plan);
  auto allocate = [&](Fit fit) -> absl::Status {
    ATTND_ASSIGN_OR_RETURN(work.inputs, host.Allocate(memory.input_bytes, fit));
    ATTND_ASSIGN_OR_RETURN(work.outputs, host.Allocate(memory.output_bytes, fit));
    ATTND_ASSIGN_OR_RETURN(work.device, lane.device_pool == nullptr
                                            ? host.Allocate(work.plan->workspace_bytes(), fit)
                                            : lane.device_pool->Allocate(work.bytes, fit));
    return absl::OkStatus();
  };
  const absl::Status status = allocate(Fit::kReusable);
  if (status.ok()) return status;
  // What waits in a queue and will never run makes room; then once more, with nothing held and no
  // byte to spare.
  work.inputs = PoolBuffer();
  work.outputs = PoolBuffer();
  std::vector<Batcher::WorkPtr> dropped;
  const absl::Time now = absl::Now();
  for (const std::unique_ptr<Lane>& other : lanes_) other->batcher.Sweep(now, dropped);
  DropAll(std::move(dropped), now, absl::OkStatus());
  return allocate(Fit::kTight);
}

void Engine::Submit(PreparedForward prepared, ForwardDone done) {
  absl::Status status = CheckPageTables(prepared);
  std::unique_ptr<ForwardWork> work = std::move(prepared.work_);
  std::vector<Batcher::WorkPtr> dropped;
  const absl::Time now = absl::Now();
  if (status.ok()) {
    work->submitted = now;
    work->done = std::move(done);
    status = Batcher::CheckLive(*work, now);
    if (status.ok()) status = prepared.batcher_->Submit(work, now, dropped);
    if (!status.ok()) done = std::move(work->done);
  }
  DropAll(std::move(dropped), now, absl::OkStatus());
  if (!status.ok()) {
    work.reset();
    done(std::move(status));
  }
}

void Engine::Drain(absl::Time deadline) {
  draining_ = true;
  std::lock_guard lock(drain_mutex_);
  planner_.Finish(deadline);  // What waits for a plan was accepted: it goes on into the queues.
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->batcher.Close();
  auto all_empty = [&] {
    return std::all_of(lanes_.begin(), lanes_.end(),
                       [](const std::unique_ptr<Lane>& lane) { return lane->batcher.empty(); });
  };
  while (!all_empty() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(2));
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    DropAll(lane->batcher.TakeAll(), absl::Now(),
            MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "",
                      "the server stopped before the request was launched"));
    for (const std::unique_ptr<Worker>& worker : lane->workers) {
      if (!worker->WaitUntilEnded(deadline)) worker->Abandon();
    }
    lane->workers.clear();
  }
}

}  // namespace attnd
