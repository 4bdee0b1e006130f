#include "engine/sched/batcher.h"

#include <gtest/gtest.h>

#include "engine/core/status.h"
#include "tests/engine/sched/fake_work.h"

namespace attnd {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);

class BatcherTest : public ::testing::Test {
 protected:
  absl::Status Submit(std::unique_ptr<Work> work, absl::Time now = kStart) {
    return batcher_.Submit(work, now, dropped_);
  }
  std::unique_ptr<Work> NewWork(int64_t bytes) { return MakeWork(backend_, bytes, ended_); }

  FakeBackend backend_;
  std::vector<absl::Status> ended_;
  std::vector<Batcher::WorkPtr> dropped_;
  Batcher batcher_{{.queue_bytes = 100, .flag = "--max-queue"}};
};

TEST_F(BatcherTest, GivesWorkOutInOrder) {
  for (int64_t bytes : {1, 2, 3}) ASSERT_TRUE(Submit(NewWork(bytes)).ok());
  for (int64_t bytes : {1, 2, 3}) {
    Batcher::Pulled pulled = batcher_.Pull(kStart);
    ASSERT_EQ(pulled.batch.size(), 1u);
    EXPECT_EQ(pulled.batch[0]->bytes, bytes);
  }
  EXPECT_TRUE(batcher_.Pull(kStart).batch.empty());
  EXPECT_TRUE(batcher_.empty());
}

TEST_F(BatcherTest, RefusesWhenFullAndLeavesTheWorkToTheCaller) {
  ASSERT_TRUE(Submit(NewWork(60)).ok());
  auto work = NewWork(41);
  const absl::Status status = batcher_.Submit(work, kStart, dropped_);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), reason::kQueueFull);
  EXPECT_TRUE(ErrorRetryAfter(status).has_value());
  EXPECT_NE(std::string(status.message()).find("need 41 bytes, have 40 of 100"), std::string::npos);
  ASSERT_NE(work, nullptr);
  EXPECT_TRUE(Submit(NewWork(40)).ok());
}

TEST_F(BatcherTest, AnEmptyQueueTakesWorkOfAnySize) {
  EXPECT_TRUE(Submit(NewWork(1000)).ok());
  EXPECT_EQ(Submit(NewWork(1)).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(BatcherTest, ExpiredAndCancelledWorkIsDroppedAtThePull) {
  auto expired = NewWork(1);
  expired->context.deadline = kStart + absl::Seconds(1);
  auto cancelled = NewWork(2);
  cancelled->context.cancellation = std::make_shared<CancellationToken>();
  auto token = cancelled->context.cancellation;
  ASSERT_TRUE(Submit(std::move(expired)).ok());
  ASSERT_TRUE(Submit(std::move(cancelled)).ok());
  ASSERT_TRUE(Submit(NewWork(3)).ok());
  token->Cancel(CancellationToken::Cause::kClient);
  const absl::Time now = kStart + absl::Seconds(1);
  Batcher::Pulled pulled = batcher_.Pull(now);
  ASSERT_EQ(pulled.batch.size(), 1u);
  EXPECT_EQ(pulled.batch[0]->bytes, 3);
  ASSERT_EQ(pulled.dropped.size(), 2u);
  EXPECT_EQ(Batcher::CheckLive(*pulled.dropped[0], now).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Batcher::CheckLive(*pulled.dropped[1], now).code(), absl::StatusCode::kCancelled);
}

TEST_F(BatcherTest, AFullQueueMakesRoomFromWhatHasExpired) {
  auto expiring = NewWork(90);
  expiring->context.deadline = kStart + absl::Seconds(1);
  ASSERT_TRUE(Submit(std::move(expiring)).ok());
  EXPECT_FALSE(Submit(NewWork(50)).ok());
  EXPECT_TRUE(Submit(NewWork(50), kStart + absl::Seconds(2)).ok());
  EXPECT_EQ(dropped_.size(), 1u);
}

TEST_F(BatcherTest, AClosedBatcherRefusesNewWorkAndGivesOutTheRest) {
  ASSERT_TRUE(Submit(NewWork(1)).ok());
  batcher_.Close();
  EXPECT_EQ(Submit(NewWork(2)).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(batcher_.WaitForWork());
  EXPECT_EQ(batcher_.Pull(kStart).batch.size(), 1u);
  EXPECT_FALSE(batcher_.WaitForWork());
}

TEST_F(BatcherTest, TakeAllEmptiesTheQueue) {
  for (int64_t bytes : {10, 20}) ASSERT_TRUE(Submit(NewWork(bytes)).ok());
  EXPECT_EQ(batcher_.TakeAll().size(), 2u);
  EXPECT_TRUE(batcher_.empty());
  EXPECT_TRUE(Submit(NewWork(100)).ok());
}

}  // namespace
}  // namespace attnd
