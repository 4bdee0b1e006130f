// One suite for every implementation of MemoryPool: a new one is a line in kPools.

#include "engine/memory/memory_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "engine/core/status.h"

namespace attnd {
namespace {

using Factory = std::shared_ptr<MemoryPool> (*)(int64_t, std::string);

class MemoryPoolTest : public ::testing::TestWithParam<Factory> {
 protected:
  std::shared_ptr<MemoryPool> Make(int64_t capacity) { return GetParam()(capacity, "--cap"); }
};

TEST_P(MemoryPoolTest, GivesAlignedWritableBlocks) {
  auto pool = Make(64 << 20);
  for (int64_t bytes : {1, 63, 4096, 4097, 1'000'003, 16 << 20}) {
    absl::StatusOr<PoolBuffer> buffer = pool->Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(buffer->size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
    std::memset(buffer->data(), 0xFF, static_cast<size_t>(bytes));
  }
  EXPECT_EQ(pool->stats().in_use_bytes, 0);
}

TEST_P(MemoryPoolTest, AnEmptyBufferTakesNothing) {
  auto pool = Make(4096);
  absl::StatusOr<PoolBuffer> buffer = pool->Allocate(0);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->data(), nullptr);
  EXPECT_EQ(buffer->size(), 0);
  EXPECT_EQ(pool->stats().allocations, 0);
}

TEST_P(MemoryPoolTest, RefusesPastTheCapWithNeedAndHaveAndARetryHint) {
  auto pool = Make(1 << 20);
  absl::StatusOr<PoolBuffer> first = pool->Allocate(768 << 10);
  ASSERT_TRUE(first.ok());
  const absl::Status refusal = pool->Allocate(512 << 10).status();
  EXPECT_EQ(refusal.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(refusal), reason::kPoolExhausted);
  EXPECT_TRUE(ErrorRetryAfter(refusal).has_value());
  const std::string message(refusal.message());
  EXPECT_NE(message.find("--cap"), std::string::npos) << message;
  EXPECT_NE(message.find("need 524288"), std::string::npos) << message;
  EXPECT_NE(message.find("have 262144 of 1048576"), std::string::npos) << message;
  *first = PoolBuffer();
  EXPECT_TRUE(pool->Allocate(512 << 10).ok());
  EXPECT_EQ(pool->stats().refusals, 1);
}

TEST_P(MemoryPoolTest, GivesNoRetryHintForWhatNeverFits) {
  auto pool = Make(1 << 20);
  for (int64_t bytes : {int64_t{(1 << 20) + 1}, int64_t{1} << 62, INT64_MAX}) {
    const absl::Status refusal = pool->Allocate(bytes).status();
    EXPECT_EQ(refusal.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_FALSE(ErrorRetryAfter(refusal).has_value()) << bytes;
  }
}

TEST_P(MemoryPoolTest, UsesTheWholeCap) {
  auto pool = Make(1 << 20);
  EXPECT_TRUE(pool->Allocate(1 << 20).ok());
  // Rounding to a block must not make a request refusable that the cap has room for.
  EXPECT_TRUE(Make(1'000'001)->Allocate(1'000'000).ok());
}

TEST_P(MemoryPoolTest, KeepsNoMoreThanWasOnceInUseTogether) {
  auto pool = Make(64 << 20);
  for (int64_t bytes = 4096; bytes < (1 << 20); bytes += 4096) {
    auto buffer = pool->Allocate(bytes);  // A size class of its own, every few times.
    const PoolStats stats = pool->stats();
    ASSERT_LE(stats.in_use_bytes + stats.cached_bytes, stats.high_water_bytes);
  }
  const PoolStats stats = pool->stats();
  EXPECT_EQ(stats.in_use_bytes, 0);
  EXPECT_GT(stats.cached_bytes, 0);
  EXPECT_LE(stats.cached_bytes, stats.high_water_bytes);
}

TEST_P(MemoryPoolTest, GivesBackWhatALargeRequestLeft) {
  auto pool = Make(64 << 20);
  { auto large = pool->Allocate(32 << 20); }
  EXPECT_GE(pool->stats().cached_bytes, 32 << 20);
  for (int i = 0; i < 1000; ++i) auto small = pool->Allocate(4096);
  EXPECT_EQ(pool->stats().cached_bytes, 4096);
}

TEST_P(MemoryPoolTest, SaysWhatItCanNeverHold) {
  auto pool = Make(1 << 20);
  EXPECT_TRUE(pool->CheckCanEverHold(1 << 20).ok());
  const absl::Status refusal = pool->CheckCanEverHold((1 << 20) + 1);
  EXPECT_EQ(refusal.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(ErrorRetryAfter(refusal).has_value());
}

TEST_P(MemoryPoolTest, ReusesAFreedBlock) {
  auto pool = Make(1 << 20);
  std::byte* data = nullptr;
  {
    auto buffer = pool->Allocate(100'000);
    data = buffer->data();
  }
  auto again = pool->Allocate(100'000);
  EXPECT_EQ(again->data(), data);
}

TEST_P(MemoryPoolTest, MovingABufferMovesTheOwnership) {
  auto pool = Make(1 << 20);
  PoolBuffer a = *pool->Allocate(4096);
  PoolBuffer b = std::move(a);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: what a moved-from buffer is, is its contract.
  a = std::move(b);
  EXPECT_NE(a.data(), nullptr);
  EXPECT_EQ(pool->stats().in_use_bytes, 4096);
}

TEST_P(MemoryPoolTest, ABufferKeepsItsPool) {
  auto pool = Make(1 << 20);
  PoolBuffer buffer = *pool->Allocate(4096);
  pool.reset();
  std::memset(buffer.data(), 1, 4096);
}

TEST_P(MemoryPoolTest, ThreadsDoNotShareBlocks) {
  auto pool = Make(8 << 20);
  std::vector<std::thread> threads;
  std::atomic<int> clashes{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        auto buffer = pool->Allocate(1000 + 977 * (i % 13));
        if (!buffer.ok()) continue;
        std::memset(buffer->data(), t + 1, static_cast<size_t>(buffer->size()));
        for (std::byte b : buffer->bytes()) clashes += b != static_cast<std::byte>(t + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(clashes, 0);
  EXPECT_EQ(pool->stats().in_use_bytes, 0);
}

constexpr Factory kPools[] = {MakeHostPool};
INSTANTIATE_TEST_SUITE_P(Pools, MemoryPoolTest, ::testing::ValuesIn(kPools));

}  // namespace
}  // namespace attnd
