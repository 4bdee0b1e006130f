#include "engine/backend/plan_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"

namespace attnd {
namespace {

using Cache = PlanCache<int, std::string>;

Cache::Result Value(int key) { return std::make_shared<const std::string>(std::to_string(key)); }

TEST(PlanCache, BuildsAKeyOnce) {
  Cache cache(4);
  const auto first = cache.GetOrBuild(7, [] { return Value(7); });
  const auto second = cache.GetOrBuild(7, []() -> Cache::Result { return Value(8); });
  EXPECT_EQ(**first, "7");
  EXPECT_EQ(first->get(), second->get());
  EXPECT_EQ(cache.builds(), 1);
}

// A known fault (E8): the plan of one device ran on another.
TEST(PlanCache, E8_CachesOfTwoDevicesShareNothing) {
  Cache first(4), second(4);
  EXPECT_EQ(**first.GetOrBuild(7, [] { return Value(1); }), "1");
  EXPECT_EQ(**second.GetOrBuild(7, [] { return Value(2); }), "2");
  EXPECT_EQ(**first.GetOrBuild(7, [] { return Value(3); }), "1");
  EXPECT_EQ(first.builds() + second.builds(), 2);
}

TEST(PlanCache, DropsTheLeastRecentlyUsed) {
  Cache cache(2);
  const auto one = *cache.GetOrBuild(1, [] { return Value(1); });
  for (int key : {2, 1, 3}) (void)cache.GetOrBuild(key, [key] { return Value(key); });
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(cache.builds(), 3);
  (void)cache.GetOrBuild(1, [] { return Value(1); });
  EXPECT_EQ(cache.builds(), 3);
  (void)cache.GetOrBuild(2, [] { return Value(2); });
  EXPECT_EQ(cache.builds(), 4);
  EXPECT_EQ(*one, "1");
}

TEST(PlanCache, RemembersWhatIsNotSupportedAndForgetsAccidents) {
  Cache cache(4);
  for (int i = 0; i < 3; ++i) {
    const auto result =
        cache.GetOrBuild(1, []() -> Cache::Result { return absl::UnimplementedError("no"); });
    EXPECT_EQ(result.status().code(), absl::StatusCode::kUnimplemented);
  }
  EXPECT_EQ(cache.builds(), 1);
  for (int i = 0; i < 3; ++i) {
    const auto result =
        cache.GetOrBuild(2, []() -> Cache::Result { return absl::InternalError("lost"); });
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  }
  EXPECT_EQ(cache.builds(), 4);
  EXPECT_EQ(cache.size(), 1u);
}

TEST(PlanCache, ABuilderThatThrowsLeavesTheKeyUsable) {
  Cache cache(4);
  const auto thrown =
      cache.GetOrBuild(1, []() -> Cache::Result { throw std::runtime_error("no memory"); });
  EXPECT_EQ(thrown.status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(thrown.status().message(), "no memory");
  EXPECT_EQ(**cache.GetOrBuild(1, [] { return Value(1); }), "1");
}

TEST(PlanCache, ThreadsThatAskTogetherShareOneBuild) {
  Cache cache(4);
  std::atomic<int> builds = 0, started = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      ++started;
      const auto result = cache.GetOrBuild(5, [&] {
        ++builds;
        for (int i = 0; i < 1000 && started < 8; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return Value(5);
      });
      EXPECT_EQ(**result, "5");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(builds, 1);
}

TEST(PlanCache, OtherKeysDoNotWaitForABuild) {
  Cache cache(1);
  const auto slow = cache.GetOrBuild(1, [&] {
    EXPECT_EQ(**cache.GetOrBuild(2, [] { return Value(2); }), "2");
    return Value(1);
  });
  EXPECT_EQ(**slow, "1");
  EXPECT_EQ(cache.size(), 1u);
}

}  // namespace
}  // namespace attnd
