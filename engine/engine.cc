#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/backend/call_memory.h"
#include "engine/core/backward_checks.h"
#include "engine/core/gradient_views.h"
#include "engine/core/layout.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr const char* kQueueFlag = "--max-queue";

int64_t TensorBytes(const CallMemory& memory) {
  return SaturatingSum(memory.inputs.bytes(), memory.outputs.bytes());
}

int64_t DeviceBytes(const CallMemory& memory, const CallPlan& plan) {
  return SaturatingSum(TensorBytes(memory), plan.workspace_bytes());
}

// What of it the host pool holds: everything, but for the workspace of a device.
int64_t HostBytes(const CallMemory& memory, const CallPlan& plan, bool on_device) {
  return on_device ? TensorBytes(memory) : DeviceBytes(memory, plan);
}

CallMemory LayOut(const AttentionProblem& problem, Pass pass, bool with_lse) {
  return pass == Pass::kForward ? LayOutForward(problem, with_lse) : LayOutBackward(problem);
}

absl::StatusOr<std::unique_ptr<CallPlan>> PlanOf(AttentionBackend& backend,
                                                 const AttentionProblem& problem, Pass pass) {
  if (pass == Pass::kForward) return backend.BuildPlan(problem);
  return backend.BuildBackwardPlan(problem);
}

absl::Status CheckCanEverHold(const MemoryPool& host, const MemoryPool* device,
                              const CallMemory& memory, const CallPlan& plan) {
  ATTND_RETURN_IF_ERROR(host.CheckCanEverHold(HostBytes(memory, plan, device != nullptr)));
  return device == nullptr ? absl::OkStatus() : device->CheckCanEverHold(DeviceBytes(memory, plan));
}

absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "",
                   "the server is draining and takes no new work");
}

// What only the inputs' values can show.
absl::Status CheckValues(const PreparedCall& prepared) {
  const AttentionProblem& p = prepared.problem();
  ATTND_RETURN_IF_ERROR(CheckSoftmaxOffset(prepared.softmax_offset()));
  if (!p.is_paged) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(CheckPageTable(p, prepared.page_table(Piece::kPageTableK), p.num_pages_k,
                                       "sequences.page_table_k"));
  return CheckPageTable(p, prepared.page_table(Piece::kPageTableV), p.num_pages_v,
                        "sequences.page_table_v");
}

absl::Status CheckLease(absl::Duration lease, absl::Duration longest) {
  if (lease <= longest) return absl::OkStatus();
  return InvalidField(reason::kInvalidField, "retain_for_backward.seconds",
                      absl::StrCat("is ", absl::ToDoubleSeconds(lease), "; at most ",
                                   absl::ToDoubleSeconds(longest), " here (--max-lease)"));
}

// What a backward call has of its forward call.
void CopyRetained(const RetainedForward& from, const PreparedCall& to) {
  for (int i = 0; i < kNumPieces; ++i) {
    const auto piece = static_cast<Piece>(i);
    const bool was_output = piece == Piece::kOut || piece == Piece::kLse;
    const BlockLayout& layout = was_output ? from.memory.outputs : from.memory.inputs;
    const PoolBuffer& block = was_output ? *from.outputs : from.inputs;
    const std::span<std::byte> source = layout.In(block.data(), piece);
    const std::span<std::byte> target = to.input(piece);
    if (!target.empty()) std::copy_n(source.begin(), source.size(), target.begin());
  }
}

}  // namespace

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
    : parts_(std::move(parts)),
      contexts_(parts_.incarnation),
      planner_(parts_.queue_bytes, kQueueFlag) {
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

EngineStats Engine::Stats() const {
  EngineStats stats;
  stats.host_pool = parts_.host_pool->stats();
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const BackendInfo& info = lane->backend.info();
    LaneStats& of_lane = stats.lanes.emplace_back();
    of_lane.backend = info.name;
    if (!info.devices.empty()) of_lane.device = info.devices.front().name;
    if (lane->device_pool != nullptr) of_lane.device_pool = lane->device_pool->stats();
    of_lane.plans = lane->backend.plan_stats();
  }
  return stats;
}

std::string NameOf(const KernelFamily& family) {
  const std::string_view dtype = Name(family.dtype);
  return absl::StrCat(family.backend, " ", family.engine, " ",
                      absl::string_view(dtype.data(), dtype.size()),
                      family.pass == Pass::kForward ? " forward" : " backward");
}

void Engine::Disable(const KernelFamily& family) {
  std::lock_guard lock(disabled_mutex_);
  disabled_.push_back(family);
}

std::vector<KernelFamily> Engine::disabled() const {
  std::lock_guard lock(disabled_mutex_);
  return disabled_;
}

absl::StatusOr<std::unique_ptr<CallPlan>> Engine::BuildPlan(AttentionBackend& backend,
                                                            const AttentionProblem& problem,
                                                            Pass pass) const {
  ATTND_ASSIGN_OR_RETURN(std::unique_ptr<CallPlan> plan, PlanOf(backend, problem, pass));
  const KernelFamily family = {backend.info().name, std::string(plan->engine()), problem.dtype,
                               pass};
  std::lock_guard lock(disabled_mutex_);
  if (std::find(disabled_.begin(), disabled_.end(), family) == disabled_.end()) return plan;
  return UnimplementedField(reason::kNotSupported, "spec.dtype",
                            absl::StrCat("is not computed here: ", NameOf(family),
                                         " failed the self-test when the server started"));
}

absl::StatusOr<CheckedCall> Engine::Check(const CallDescription& d) {
  CheckedCall call{.pass = d.pass, .with_lse = d.return_lse || d.retain, .retain = d.retain};
  if (!d.context.empty()) {
    ATTND_ASSIGN_OR_RETURN(call.retained, contexts_.Find(d.context, absl::Now()));
    call.problem = call.retained->problem;
    ATTND_RETURN_IF_ERROR(CheckOutGradient(call.problem, d.backward.d_out));
    ATTND_RETURN_IF_ERROR(
        SetScalesOfRetained(d.backward.fp8.value_or(StatedFp8Scales{}), call.problem));
    return call;
  }
  DType out_dtype = d.out_dtype;
  if (d.backward.out && d.backward.out->dtype == DType::kFloat32) out_dtype = DType::kFloat32;
  ATTND_ASSIGN_OR_RETURN(call.problem,
                         Resolve(d.spec, d.sequences, d.inputs, {.out_dtype = out_dtype}));
  if (d.pass == Pass::kBackward) {
    ATTND_RETURN_IF_ERROR(CheckBackwardTensors(call.problem, d.backward));
    if (d.backward.fp8) {
      ATTND_RETURN_IF_ERROR(SetBackwardScales(*d.backward.fp8, call.problem));
    }
  }
  if (d.retain) {
    ATTND_RETURN_IF_ERROR(CheckLease(*d.retain, parts_.max_lease));
    ATTND_RETURN_IF_ERROR(CheckGradientViews(call.problem));
  }
  return call;
}

bool Engine::PlansAreReady(const CheckedCall& call) const {
  return std::all_of(lanes_.begin(), lanes_.end(), [&](const std::unique_ptr<Lane>& lane) {
    return lane->backend.PlanIsReady(call.problem, call.pass);
  });
}

void Engine::Plan(const CallDescription& d, PlanDone done) {
  absl::StatusOr<AttentionProblem> problem = Resolve(
      d.spec, d.sequences, d.inputs, {.out_dtype = d.out_dtype, .derive_missing_shapes = true});
  if (!problem.ok()) return done(problem.status());
  CheckedCall call{*std::move(problem), d.pass, d.return_lse};
  const bool ready = PlansAreReady(call);
  auto report = [this, call = std::move(call)]() mutable {
    return CatchBadAlloc([&] { return Report(std::move(call)); });
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

void Engine::Warm(const std::vector<CallDescription>& descriptions, WarmDone done) {
  std::vector<CheckedCall> calls;
  for (const CallDescription& d : descriptions) {
    absl::StatusOr<AttentionProblem> problem = Resolve(
        d.spec, d.sequences, d.inputs, {.out_dtype = d.out_dtype, .derive_missing_shapes = true});
    if (!problem.ok()) return done(problem.status());
    calls.push_back({*std::move(problem), d.pass, d.return_lse});
  }
  if (draining_) return done(Draining());
  planner_.Post(
      [this, calls = std::move(calls), done = std::move(done)](const absl::Status& go) mutable {
        if (!go.ok()) return done(go);
        int64_t built = 0;
        absl::Status refusal;
        for (CheckedCall& call : calls) {
          const bool ready = PlansAreReady(call);
          const absl::StatusOr<PlanReport> report =
              CatchBadAlloc([&] { return Report(std::move(call)); });
          refusal.Update(report.ok() ? report->support : report.status());
          built += ready ? 0 : 1;
        }
        if (refusal.ok()) return done(built);
        done(refusal);
      },
      /*bytes=*/0);
}

absl::StatusOr<PlanReport> Engine::Report(CheckedCall call) const {
  PlanReport report;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const absl::StatusOr<std::unique_ptr<CallPlan>> plan =
        BuildPlan(lane->backend, call.problem, call.pass);
    report.backend = lane->backend.info().name;
    report.support = plan.status();
    if (absl::IsUnimplemented(plan.status())) continue;
    if (!plan.ok()) break;
    const CallMemory memory = LayOut(call.problem, call.pass, call.with_lse);
    report.engine = std::string((*plan)->engine());
    report.workspace_bytes = (*plan)->workspace_bytes();
    report.device_bytes = DeviceBytes(memory, **plan);
    report.deterministic_available = true;
    report.support = CheckCanEverHold(*parts_.host_pool, lane->device_pool, memory, **plan);
    break;
  }
  report.problem = std::move(call.problem);
  return report;
}

void Engine::Prepare(CheckedCall call, RequestContext context, PrepareDone done) {
  auto work = std::make_unique<Work>();
  work->plan_cache_hit = PlansAreReady(call);
  work->problem = std::move(call.problem);
  work->pass = call.pass;
  work->with_lse = call.with_lse;
  work->context = std::move(context);
  if (call.retain) work->retain = Retainer(*call.retain);
  const bool ready = work->plan_cache_hit;
  // While it waits, its message holds them.
  const int64_t bytes = LayOut(work->problem, work->pass, work->with_lse).inputs.bytes();
  auto place = [this, work = std::move(work), retained = std::move(call.retained)]() mutable {
    return CatchBadAlloc([&]() -> absl::StatusOr<PreparedCall> {
      ATTND_RETURN_IF_ERROR(Batcher::CheckLive(*work, absl::Now()));
      ATTND_ASSIGN_OR_RETURN(PreparedCall prepared, Place(std::move(work)));
      if (retained != nullptr) CopyRetained(*retained, prepared);
      return prepared;
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

// Run by a worker: the engine outlives its workers.
absl::AnyInvocable<std::string(Work&, const std::shared_ptr<const PoolBuffer>&)> Engine::Retainer(
    absl::Duration lease) {
  return [this, lease](Work& work, const std::shared_ptr<const PoolBuffer>& outputs) {
    auto context = std::make_shared<RetainedForward>();
    context->problem = std::move(work.problem);
    context->memory = work.memory;
    context->inputs = std::move(work.inputs);
    context->outputs = outputs;
    return contexts_.Put(std::move(context), absl::Now() + lease);
  };
}

absl::StatusOr<PreparedCall> Engine::Place(std::unique_ptr<Work> work) {
  absl::Status refusal;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    absl::StatusOr<std::unique_ptr<CallPlan>> plan =
        BuildPlan(lane->backend, work->problem, work->pass);
    refusal = plan.status();
    if (absl::IsUnimplemented(refusal)) continue;
    ATTND_RETURN_IF_ERROR(refusal);
    work->backend = &lane->backend;
    work->plan = *std::move(plan);
    work->memory = LayOut(work->problem, work->pass, work->with_lse);
    ATTND_RETURN_IF_ERROR(Reserve(*lane, *work));
    PreparedCall prepared;
    prepared.work_ = std::move(work);
    prepared.batcher_ = &lane->batcher;
    return prepared;
  }
  return refusal;
}

absl::Status Engine::Reserve(const Lane& lane, Work& work) {
  const CallMemory& memory = work.memory;
  MemoryPool& host = *parts_.host_pool;
  ATTND_RETURN_IF_ERROR(CheckCanEverHold(host, lane.device_pool, memory, *work.plan));
  work.bytes = DeviceBytes(memory, *work.plan);
  auto allocate = [&](Fit fit) -> absl::Status {
    ATTND_ASSIGN_OR_RETURN(work.inputs, host.Allocate(memory.inputs.bytes(), fit));
    ATTND_ASSIGN_OR_RETURN(work.outputs, host.Allocate(memory.outputs.bytes(), fit));
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
  contexts_.Sweep(now);
  DropAll(std::move(dropped), now, absl::OkStatus());
  return allocate(Fit::kTight);
}

void Engine::Submit(PreparedCall prepared, CallDone done) {
  absl::Status status = CheckValues(prepared);
  std::unique_ptr<Work> work = std::move(prepared.work_);
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
