// The arenas and queues of the module, on a machine with a GPU.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/engine/cuda/device.h"

namespace attnd::testing {
namespace {

TEST(DevicePools, BytesGoThereAndBack) {
  std::string why_not;
  CudaParts parts;
  ASSERT_TRUE(Open({.device_pool = {.bytes = 64 << 20},
                    .pinned_pool_bytes = 16 << 20,
                    .device_pool_flag = "--device-pool",
                    .pinned_pool_flag = "--pinned-pool"},
                   parts, why_not))
      << why_not;
  EXPECT_EQ(parts.device_pool->stats().capacity_bytes, 64 << 20);
  const std::unique_ptr<DeviceQueue> queue = *parts.backend->MakeQueue();
  for (int64_t bytes : {0, 1, 4096, 5'000'001}) {
    const PoolBuffer on_device = *parts.device_pool->Allocate(bytes);
    const PoolBuffer on_host = *parts.pinned_pool->Allocate(bytes);
    const PoolBuffer back = *parts.pinned_pool->Allocate(bytes);
    for (int64_t i = 0; i < bytes; ++i) on_host.data()[i] = static_cast<std::byte>(i * 7 + 1);
    ASSERT_TRUE(queue->Stamp(0).ok());
    ASSERT_TRUE(queue->Copy(on_device.data(), on_host.data(), bytes).ok());
    ASSERT_TRUE(queue->Stamp(1).ok());
    ASSERT_TRUE(queue->Copy(back.data(), on_device.data(), bytes).ok());
    ASSERT_TRUE(queue->Wait().ok());
    EXPECT_EQ(std::memcmp(back.data(), on_host.data(), bytes), 0) << bytes;
    EXPECT_GE(queue->Between(0, 1), absl::ZeroDuration());
    EXPECT_LT(queue->Between(0, 1), absl::Seconds(1));
  }
}

TEST(DevicePools, AShareIsOneOfTheFreeMemory) {
  std::string why_not;
  CudaParts parts;
  ASSERT_TRUE(Open({.device_pool = {.percent = 2}}, parts, why_not)) << why_not;
  const int64_t all = parts.backend->info().devices.front().memory_bytes;
  EXPECT_GT(parts.device_pool->stats().capacity_bytes, all / 100);
  EXPECT_LE(parts.device_pool->stats().capacity_bytes, all / 50);
}

TEST(DevicePools, SayWhyTheyCannotBeHad) {
  std::string why_not;
  CudaParts parts;
  EXPECT_FALSE(
      Open({.device_pool = {.bytes = int64_t{1} << 45}, .device_pool_flag = "--device-pool"}, parts,
           why_not));
  EXPECT_NE(why_not.find("--device-pool"), std::string::npos) << why_not;
  EXPECT_FALSE(Open({.device = 99}, parts, why_not));
  EXPECT_NE(why_not.find("there is no GPU 99"), std::string::npos) << why_not;
}

}  // namespace
}  // namespace attnd::testing
