#include "engine/cpu/thread_team.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

namespace attnd {
namespace {

TEST(ThreadTeam, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadTeam team(threads);
    EXPECT_EQ(team.size(), threads);
    for (const int64_t n : {0, 1, 2, 7, 1000}) {
      std::vector<int> runs(static_cast<size_t>(n), 0);
      std::atomic<bool> thread_in_range{true};
      team.ParallelFor(n, threads, [&](int64_t task, int thread) {
        ++runs[static_cast<size_t>(task)];
        if (thread < 0 || thread >= threads) thread_in_range = false;
      });
      EXPECT_EQ(runs, std::vector<int>(static_cast<size_t>(n), 1));
      EXPECT_TRUE(thread_in_range);
    }
  }
}

TEST(ThreadTeam, TakesAllHardwareThreadsForZero) {
  EXPECT_EQ(ThreadTeam(0).size(), static_cast<int>(std::thread::hardware_concurrency()));
}

// Per-thread scratch without a lock: TSan would see two tasks with one thread number.
TEST(ThreadTeam, GivesAThreadNumberToOneTaskAtATime) {
  ThreadTeam team(4);
  std::vector<int64_t> sums(4, 0);
  for (int call = 0; call < 50; ++call) {
    team.ParallelFor(100, 4,
                     [&](int64_t task, int thread) { sums[static_cast<size_t>(thread)] += task; });
  }
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), int64_t{0}), 50 * 4950);
}

TEST(ThreadTeam, LetsCallersTakeTurns) {
  ThreadTeam team(3);
  std::vector<int64_t> scratch(3, 0);  // Shared by all calls, guarded by the thread number.
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int call = 0; call < 25; ++call) {
        team.ParallelFor(10, 3,
                         [&](int64_t, int thread) { ++scratch[static_cast<size_t>(thread)]; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(std::accumulate(scratch.begin(), scratch.end(), int64_t{0}), 4 * 25 * 10);
}

// All of the team works: the tasks wait for one another, so one thread could not run them alone.
TEST(ThreadTeam, WorksAtTheSameTime) {
  ThreadTeam team(3);
  std::atomic<int> arrived{0};
  team.ParallelFor(3, 3, [&](int64_t, int) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 3);
}

TEST(ThreadTeam, LetsNoMoreThreadsTakePartThanAskedFor) {
  ThreadTeam team(4);
  for (const int max_threads : {1, 2, 3}) {
    for (int call = 0; call < 50; ++call) {
      std::vector<int> tasks_of(4, 0);
      team.ParallelFor(64, max_threads, [&](int64_t, int thread) {
        ++tasks_of[static_cast<size_t>(thread)];
        std::this_thread::yield();
      });
      EXPECT_LE(4 - std::count(tasks_of.begin(), tasks_of.end(), 0), max_threads);
      EXPECT_EQ(std::accumulate(tasks_of.begin(), tasks_of.end(), 0), 64);
    }
  }
}

}  // namespace
}  // namespace attnd
