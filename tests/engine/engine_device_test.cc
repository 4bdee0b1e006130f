// The engine over a device with memory of its own: copies, plans built aside, fallback, limits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>

#include "absl/time/clock.h"
#include "engine/core/status.h"
#include "engine/cpu/cpu_backend.h"
#include "engine/cpu/reference_attention.h"
#include "engine/self_test.h"
#include "tests/engine/engine_requests.h"
#include "tests/engine/fake_device.h"

namespace attnd {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::unique_ptr<Engine> MakeEngine(FakeDevice& device, bool cpu_fallback = false) {
  EngineParts parts;
  parts.host_pool = MakeHostPool(64 << 20, "--pinned-pool");
  parts.queue_bytes = 32 << 20;
  parts.targets.push_back({.backend = std::make_unique<FakeDeviceBackend>(device),
                           .device_pool = device.MakePool(),
                           .workers = 2});
  if (cpu_fallback) parts.targets.push_back({.backend = std::make_unique<CpuBackend>(2)});
  return *Engine::Make(std::move(parts));
}

absl::StatusOr<CallResult> RunNoise(Engine& engine, const CallDescription& d) {
  absl::StatusOr<PreparedCall> prepared = TryPrepare(engine, d);
  if (!prepared.ok()) return prepared.status();
  FillWithNoise(*prepared);
  for (auto table :
       {prepared->page_table(Piece::kPageTableK), prepared->page_table(Piece::kPageTableV)}) {
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(2 - i);
  }
  return RunPrepared(engine, *std::move(prepared));
}

bool SameBytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

TEST(EngineDevice, AnswersWhatTheReferenceLoopAnswers) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device);
  EngineParts parts;
  parts.host_pool = MakeHostPool(64 << 20, "--pinned-pool");
  parts.queue_bytes = 32 << 20;
  parts.targets.push_back({.backend = std::make_unique<ReferenceBackend>()});
  auto reference = *Engine::Make(std::move(parts));
  for (CallDescription d : {Bs3hd(33), Paged()}) {
    for (bool with_lse : {true, false}) {
      d.return_lse = with_lse;
      const auto got = RunNoise(*engine, d), want = RunNoise(*reference, d);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_TRUE(SameBytes(got->bytes(Piece::kOut), want->bytes(Piece::kOut)));
      EXPECT_TRUE(SameBytes(got->bytes(Piece::kLse), want->bytes(Piece::kLse)));
      EXPECT_EQ(got->bytes(Piece::kLse).empty(), !with_lse);
      EXPECT_EQ(got->report.backend, "fake");
      EXPECT_EQ(got->report.device, "fake device");
      EXPECT_EQ(got->report.engine, "fake_kernel");
      EXPECT_EQ(got->report.compute, absl::Microseconds(201));
      EXPECT_EQ(got->report.copy_out, absl::Microseconds(302));
    }
  }
  EXPECT_EQ(engine->host_pool().stats().in_use_bytes, 0);
}

TEST(EngineDevice, ConcurrentRequestsKeepTheirBytes) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device);
  const auto want = RunNoise(*engine, Bs3hd(20));
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const auto got = RunNoise(*engine, Bs3hd(20));
        wrong += !got.ok() || !SameBytes(got->bytes(Piece::kOut), want->bytes(Piece::kOut));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(EngineDevice, APlanIsBuiltOnceAndTheReplySaysSo) {
  FakeDevice device(16 << 20);
  int builds = 0;
  device.before_build = [&] { ++builds; };
  auto engine = MakeEngine(device);
  EXPECT_FALSE(RunNoise(*engine, Bs3hd(5))->report.plan_cache_hit);
  EXPECT_TRUE(RunNoise(*engine, Bs3hd(5))->report.plan_cache_hit);
  EXPECT_FALSE(RunNoise(*engine, Bs3hd(6))->report.plan_cache_hit);
  EXPECT_EQ(builds, 2);
}

TEST(EngineDevice, WhoNeedsNoNewPlanDoesNotWaitForOne) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device);
  ASSERT_TRUE(RunNoise(*engine, Bs3hd(5)).ok());
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  device.before_build = [&] { released.wait(); };
  std::promise<absl::Status> slow;
  engine->Prepare(*engine->Check(Bs3hd(6)), {},
                  [&](absl::StatusOr<PreparedCall> p) { slow.set_value(p.status()); });
  EXPECT_TRUE(RunNoise(*engine, Bs3hd(5)).ok());
  auto future = slow.get_future();
  EXPECT_EQ(future.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  release.set_value();
  EXPECT_TRUE(future.get().ok());
}

TEST(EngineDevice, ACancelledRequestBuildsNoPlan) {
  FakeDevice device(16 << 20);
  int builds = 0;
  device.before_build = [&] { ++builds; };
  auto engine = MakeEngine(device);
  auto token = std::make_shared<CancellationToken>();
  token->Cancel(CancellationToken::Cause::kClient);
  EXPECT_EQ(TryPrepare(*engine, Bs3hd(5), {.cancellation = token}).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(builds, 0);
}

TEST(EngineDevice, WhatItRefusesIsRefusedWithoutFallback) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device);
  const absl::Status status = RunNoise(*engine, Bs3hd(5, DType::kFloat16)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ErrorField(status), "spec.dtype");
  EXPECT_EQ(PlanOf(*engine, Bs3hd(5, DType::kFloat16))->support, status);
}

TEST(EngineDevice, WhatItRefusesRunsOnTheFallback) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device, true);
  EXPECT_EQ(PlanOf(*engine, Bs3hd(5, DType::kFloat16))->backend, "cpu");
  const auto half = RunNoise(*engine, Bs3hd(5, DType::kFloat16));
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_EQ(half->report.backend, "cpu");
  EXPECT_EQ(half->report.engine, "tiled");
  EXPECT_EQ(RunNoise(*engine, Bs3hd(5))->report.backend, "fake");
  EXPECT_EQ(PlanOf(*engine, Bs3hd(5))->backend, "fake");
}

TEST(EngineDevice, TheDevicePoolIsACapToo) {
  FakeDevice device(8192);
  auto engine = MakeEngine(device);
  for (const absl::Status& status :
       {RunNoise(*engine, Bs3hd(100)).status(), PlanOf(*engine, Bs3hd(100))->support}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_NE(status.message().find("--device-pool"), std::string::npos) << status;
  }
  EXPECT_TRUE(RunNoise(*engine, Bs3hd(4)).ok());
  EXPECT_EQ(engine->host_pool().stats().in_use_bytes, 0);
}

TEST(EngineDevice, ASelfTestFindsNothingWhereNothingIsWrong) {
  FakeDevice device(16 << 20);
  EXPECT_THAT(RunSelfTest(*MakeEngine(device, true)), IsEmpty());
  EXPECT_THAT(RunSelfTest(*MakeCpuEngine()), IsEmpty());
}

TEST(EngineDevice, ASelfTestDisablesKernelsThatAnswerWrong) {
  FakeDevice device(16 << 20);
  device.is_wrong = true;
  auto engine = MakeEngine(device);
  EXPECT_THAT(RunSelfTest(*engine), Contains(HasSubstr("fake fake_kernel FLOAT32 forward")));
  EXPECT_THAT(engine->disabled(), Contains(KernelFamily{"fake", "fake_kernel", DType::kFloat32}));
  const absl::Status status = RunNoise(*engine, Bs3hd(5)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(PlanOf(*engine, Bs3hd(5))->support, status);
}

TEST(EngineDevice, ADisabledFamilysRequestsRunOnTheFallback) {
  FakeDevice device(16 << 20);
  device.failure = absl::InternalError("the GPU failed: broken");
  auto engine = MakeEngine(device, true);
  EXPECT_THAT(RunSelfTest(*engine), Contains(HasSubstr("the GPU failed: broken")));
  EXPECT_EQ(RunNoise(*engine, Bs3hd(5))->report.backend, "cpu");
}

TEST(EngineDevice, AFailureOfTheDeviceIsTheRequestsAnswer) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device);
  device.failure = absl::InternalError("the GPU failed: broken");
  EXPECT_EQ(RunNoise(*engine, Bs3hd(5)).status(), device.failure);
  device.failure = absl::OkStatus();
  EXPECT_TRUE(RunNoise(*engine, Bs3hd(5)).ok());
}

TEST(EngineDevice, ADrainFinishesWhatWaitsForAPlan) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device);
  ASSERT_TRUE(RunNoise(*engine, Bs3hd(5)).ok());
  std::promise<void> building, release;
  bool is_first = true;  // Plans are built one after another.
  device.before_build = [&] {
    if (!std::exchange(is_first, false)) return;
    building.set_value();
    release.get_future().wait();
  };
  std::promise<absl::Status> forward;
  std::promise<absl::Status> plan;
  engine->Prepare(*engine->Check(Bs3hd(6)), {}, [&](absl::StatusOr<PreparedCall> p) {
    ASSERT_TRUE(p.ok()) << p.status();
    FillWithNoise(*p);
    engine->Submit(*std::move(p),
                   [&](absl::StatusOr<CallResult> r) { forward.set_value(r.status()); });
  });
  building.get_future().wait();
  engine->Plan(Bs3hd(8), [&](absl::StatusOr<PlanReport> r) { plan.set_value(r.status()); });
  std::thread drain([&] { engine->Drain(absl::Now() + absl::Seconds(60)); });
  while (!absl::IsUnavailable(PlanOf(*engine, Bs3hd(5)).status())) {  // Its plan is there.
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(TryPrepare(*engine, Bs3hd(6)).status().code(), absl::StatusCode::kUnavailable);
  release.set_value();
  drain.join();
  EXPECT_TRUE(forward.get_future().get().ok());
  EXPECT_TRUE(plan.get_future().get().ok());
}

TEST(EngineDevice, ADrainPastItsDeadlineDropsWhatWaitsForAPlan) {
  FakeDevice device(16 << 20);
  auto engine = MakeEngine(device);
  std::promise<void> building, release;
  device.before_build = [&] {
    building.set_value();
    release.get_future().wait();
  };
  std::atomic<int> answers = 0, unavailable = 0;
  auto count = [&](const absl::Status& status) {
    ++answers;
    unavailable += absl::IsUnavailable(status);
  };
  engine->Prepare(*engine->Check(Bs3hd(6)), {},
                  [&](absl::StatusOr<PreparedCall> p) { count(p.status()); });
  building.get_future().wait();
  engine->Prepare(*engine->Check(Bs3hd(7)), {},
                  [&](absl::StatusOr<PreparedCall> p) { count(p.status()); });
  engine->Drain(absl::Now());
  EXPECT_EQ(answers, 1);
  EXPECT_EQ(unavailable, 1);
  release.set_value();
  engine.reset();
  EXPECT_EQ(answers, 2);
}

// To the last byte, though blocks are rounded where there is room.
TEST(EngineDevice, ARequestThatFitsThePoolRuns) {
  FakeDevice device(16 << 20);
  const int64_t inputs = 2 * 1000 * 3 * 2 * 8 * 4, out = inputs / 3, lse = 2 * 2 * 1000 * 4;
  auto round = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  EngineParts parts;
  parts.host_pool = MakeHostPool(round(inputs) + round(out) + round(lse), "--pinned-pool");
  parts.queue_bytes = 32 << 20;
  parts.targets.push_back(
      {.backend = std::make_unique<FakeDeviceBackend>(device), .device_pool = device.MakePool()});
  auto engine = *Engine::Make(std::move(parts));
  EXPECT_TRUE(PlanOf(*engine, Bs3hd(1000))->support.ok());
  EXPECT_TRUE(RunNoise(*engine, Bs3hd(1000)).ok());
}

}  // namespace
}  // namespace attnd
