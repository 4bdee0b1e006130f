#include "engine/sched/task_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "absl/time/clock.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

TEST(TaskThread, RunsTasksInOrderOnItsOwnThread) {
  std::vector<int> order;
  std::promise<void> done;
  TaskThread thread(100, "--max-queue");
  for (int i = 0; i < 5; ++i) {
    thread.Post(
        [&, i](const absl::Status& go) {
          EXPECT_TRUE(go.ok());
          order.push_back(i);
          if (i == 4) done.set_value();
        },
        10);
  }
  done.get_future().wait();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
}

TEST(TaskThread, RefusesMoreThanItMayHold) {
  std::promise<void> running, release;
  TaskThread thread(100, "--max-queue");
  thread.Post(
      [&](const absl::Status&) {
        running.set_value();
        release.get_future().wait();
      },
      1000);
  running.get_future().wait();
  std::atomic<int> waited = 0;
  thread.Post([&](const absl::Status& go) { waited += go.ok(); }, 60);
  absl::Status refused;
  thread.Post([&](const absl::Status& go) { refused = go; }, 41);
  EXPECT_NE(refused.message().find("--max-queue"), std::string::npos) << refused;
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(ErrorRetryAfter(refused).has_value());
  std::promise<void> last;
  release.set_value();
  while (waited == 0) std::this_thread::yield();
  thread.Post([&](const absl::Status&) { last.set_value(); }, 0);
  last.get_future().wait();
}

TEST(TaskThread, CallsEveryTaskOnceWhenItCloses) {
  std::atomic<int> ran = 0, refused = 0;
  {
    std::promise<void> running, release;
    TaskThread thread(100, "--max-queue");
    thread.Post(
        [&](const absl::Status&) {
          running.set_value();
          release.get_future().wait();
          ++ran;
        },
        0);
    running.get_future().wait();
    auto count = [&](const absl::Status& go) { refused += absl::IsUnavailable(go); };
    thread.Post(count, 0);
    thread.Post(count, 0);
    thread.Close();
    EXPECT_EQ(refused, 2);
    thread.Post(count, 0);
    EXPECT_EQ(refused, 3);
    release.set_value();
  }
  EXPECT_EQ(ran, 1);
}

TEST(TaskThread, FinishesWhatWaitsAndRefusesWhatComes) {
  std::promise<void> running, release;
  std::atomic<int> ran = 0, refused = 0;
  TaskThread thread(100, "--max-queue");
  thread.Post(
      [&](const absl::Status&) {
        running.set_value();
        release.get_future().wait();
        ++ran;
      },
      0);
  running.get_future().wait();
  thread.Post([&](const absl::Status& go) { ran += go.ok(); }, 0);
  std::thread finisher([&] { thread.Finish(absl::Now() + absl::Seconds(60)); });
  while (refused == 0) {
    thread.Post([&](const absl::Status& go) { (absl::IsUnavailable(go) ? refused : ran) += 1; }, 0);
  }
  release.set_value();
  finisher.join();
  EXPECT_GE(ran, 2);
  EXPECT_EQ(refused, 1);
}

}  // namespace
}  // namespace attnd
