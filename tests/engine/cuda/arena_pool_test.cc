#include "engine/cuda/arena_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr std::align_val_t kAlignment{256};

std::shared_ptr<MemoryPool> MakeArena(int64_t capacity) {
  auto* data = static_cast<std::byte*>(operator new(static_cast<size_t>(capacity), kAlignment));
  return std::make_shared<ArenaPool>(
      capacity, "--arena",
      ArenaMemory{data, [](std::byte* memory) { operator delete(memory, kAlignment); }});
}

TEST(ArenaPool, GivesAlignedBlocksThatDoNotOverlap) {
  auto pool = MakeArena(1 << 20);
  std::vector<PoolBuffer> buffers;
  for (int64_t bytes : {1, 63, 4096, 4097, 100'003}) {
    auto buffer = pool->Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 256, 0u);
    std::memset(buffer->data(), static_cast<int>(buffers.size()), static_cast<size_t>(bytes));
    buffers.push_back(*std::move(buffer));
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    for (std::byte b : buffers[i].bytes()) ASSERT_EQ(b, static_cast<std::byte>(i));
  }
}

TEST(ArenaPool, MergesWhatComesBackInAnyOrder) {
  constexpr int64_t kBlock = 64 << 10;
  auto pool = MakeArena(16 * kBlock);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<PoolBuffer> buffers;
    for (int i = 0; i < 16; ++i) buffers.push_back(*pool->Allocate(kBlock));
    EXPECT_FALSE(pool->Allocate(1).ok());
    std::shuffle(buffers.begin(), buffers.end(), std::mt19937_64(seed));
    buffers.clear();
    ASSERT_TRUE(pool->Allocate(16 * kBlock).ok()) << seed;
  }
}

TEST(ArenaPool, TakesTheSmallestGapThatFits) {
  auto pool = MakeArena(1 << 20);
  auto large = pool->Allocate(256 << 10);
  auto wall = pool->Allocate(4096);
  auto small = pool->Allocate(16 << 10);
  auto end = pool->Allocate(4096);
  std::byte* gap = small->data();
  *large = PoolBuffer();
  *small = PoolBuffer();
  EXPECT_EQ(pool->Allocate(16 << 10)->data(), gap);
}

TEST(ArenaPool, RefusesWithARetryHintWhereOnlyTheGapsAreTooSmall) {
  auto pool = MakeArena(4 * (64 << 10));
  std::vector<PoolBuffer> buffers;
  for (int i = 0; i < 4; ++i) buffers.push_back(*pool->Allocate(64 << 10));
  buffers[0] = PoolBuffer();
  buffers[2] = PoolBuffer();
  const absl::Status refusal = pool->Allocate(128 << 10).status();
  EXPECT_EQ(refusal.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(ErrorRetryAfter(refusal).has_value());
}

TEST(ArenaPool, UsesTheWholeCapEvenWhereItIsNotRound) {
  auto pool = MakeArena(1'000'001);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool->Allocate(1'000'000).ok()) << i;
  EXPECT_EQ(pool->stats().in_use_bytes, 0);
}

TEST(ArenaPool, ReturnsItsMemoryWhenTheLastBlockIsGone) {
  static std::byte memory[4096];
  bool released = false;
  std::shared_ptr<MemoryPool> pool = std::make_shared<ArenaPool>(
      4096, "--arena", ArenaMemory{memory, [&](std::byte*) { released = true; }});
  PoolBuffer buffer = *pool->Allocate(100);
  pool.reset();
  EXPECT_FALSE(released);
  buffer = PoolBuffer();
  // A moved-from buffer took the block: it goes at the end of its scope.
  { PoolBuffer last = std::move(buffer); }
  EXPECT_TRUE(released);
}

}  // namespace
}  // namespace attnd
