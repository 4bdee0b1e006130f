#include "engine/sched/worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "engine/core/status.h"
#include "tests/engine/sched/fake_work.h"

namespace attnd {
namespace {

TEST(Worker, ReportsWhatRanAndWhatFailed) {
  FakeBackend backend;
  std::vector<absl::Status> ended;
  RunCall(MakeWork(backend, 1, ended), 1, nullptr);
  RunCall(MakeWork(backend, 1, ended, absl::InternalError("broken")), 1, nullptr);
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_TRUE(ended[0].ok());
  EXPECT_EQ(ended[1], absl::InternalError("broken"));
}

TEST(Worker, NamesBackendEngineAndBatchInTheReport) {
  FakeBackend backend;
  std::vector<absl::Status> ended;
  auto work = MakeWork(backend, 1, ended);
  work->submitted = absl::Now() - absl::Seconds(1);
  ExecutionReport report;
  work->done = [&](absl::StatusOr<CallResult> r) { report = r->report; };
  RunCall(std::move(work), 3, nullptr);
  EXPECT_EQ(report.backend, "fake");
  EXPECT_EQ(report.engine, "fake");
  EXPECT_EQ(report.batch_size, 3);
  EXPECT_GE(report.queue, absl::Seconds(1));
}

TEST(Worker, DroppedWorkHearsItsOwnReasonFirst) {
  FakeBackend backend;
  std::vector<absl::Status> ended;
  std::vector<Batcher::WorkPtr> dropped;
  dropped.push_back(MakeWork(backend, 1, ended));
  dropped.push_back(MakeWork(backend, 1, ended));
  dropped[0]->context.deadline = absl::FromUnixSeconds(1);
  DropAll(std::move(dropped), absl::FromUnixSeconds(2), absl::UnavailableError("stopping"));
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ended[1], absl::UnavailableError("stopping"));
}

// 10,000 requests from four threads, with random cancels, deadlines, failures and refusals.
TEST(Worker, EveryDoneRunsExactlyOnce) {
  constexpr int kThreads = 4, kEach = 2500;
  FakeBackend backend;
  Batcher batcher({.queue_bytes = 50, .flag = "--max-queue"});
  std::vector<std::atomic<int>> calls(kThreads * kEach);
  auto submit = [&](int thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    for (int i = 0; i < kEach; ++i) {
      std::vector<absl::Status> unused;
      auto work = MakeWork(backend, 1 + static_cast<int64_t>(random() % 8), unused,
                           random() % 10 == 0 ? absl::InternalError("") : absl::OkStatus());
      const int id = thread * kEach + i;
      work->done = [&calls, id](absl::StatusOr<CallResult>) {
        ++calls[static_cast<size_t>(id)];
      };
      work->context.cancellation = std::make_shared<CancellationToken>();
      auto token = work->context.cancellation;
      if (random() % 5 == 0) work->context.deadline = absl::Now() + absl::Microseconds(50);
      std::vector<Batcher::WorkPtr> dropped;
      const absl::Time now = absl::Now();
      const absl::Status status = batcher.Submit(work, now, dropped);
      DropAll(std::move(dropped), now, absl::OkStatus());
      if (!status.ok()) work->done(status);
      if (random() % 5 == 0) token->Cancel(CancellationToken::Cause::kClient);
    }
  };
  {
    Worker first(batcher, nullptr), second(batcher, nullptr);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back(submit, t);
    for (std::thread& thread : threads) thread.join();
    batcher.Close();
  }
  for (const std::atomic<int>& count : calls) ASSERT_EQ(count, 1);
  EXPECT_TRUE(batcher.empty());
}

}  // namespace
}  // namespace attnd
