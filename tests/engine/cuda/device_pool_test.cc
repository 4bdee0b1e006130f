// The arenas of the module, on a machine with a GPU.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/engine/cuda/device.h"

namespace attnd::testing {
namespace {

TEST(DevicePools, BytesGoThereAndBack) {
  std::string why_not;
  std::shared_ptr<MemoryPool> device, pinned;
  ASSERT_TRUE(FromModule<decltype(AttndMakeDevicePool)>("AttndMakeDevicePool")(
      0, 64 << 20, "--device-pool", &device, &why_not))
      << why_not;
  ASSERT_TRUE(FromModule<decltype(AttndMakePinnedPool)>("AttndMakePinnedPool")(
      16 << 20, "--pinned-pool", &pinned, &why_not))
      << why_not;
  auto* copy = FromModule<decltype(AttndCudaCopy)>("AttndCudaCopy");
  for (int64_t bytes : {1, 4096, 5'000'001}) {
    const PoolBuffer on_device = *device->Allocate(bytes), on_host = *pinned->Allocate(bytes);
    std::vector<std::byte> back(bytes);
    for (int64_t i = 0; i < bytes; ++i) on_host.data()[i] = static_cast<std::byte>(i * 7 + 1);
    ASSERT_TRUE(copy(0, on_device.data(), on_host.data(), bytes, &why_not)) << why_not;
    ASSERT_TRUE(copy(0, back.data(), on_device.data(), bytes, &why_not)) << why_not;
    EXPECT_EQ(std::memcmp(back.data(), on_host.data(), bytes), 0) << bytes;
  }
}

TEST(DevicePools, SayWhyAPoolCannotBeHad) {
  std::string why_not;
  std::shared_ptr<MemoryPool> pool;
  EXPECT_FALSE(FromModule<decltype(AttndMakeDevicePool)>("AttndMakeDevicePool")(
      0, int64_t{1} << 45, "--device-pool", &pool, &why_not));
  EXPECT_FALSE(why_not.empty());
  EXPECT_EQ(FromModule<decltype(AttndMakeCudaBackend)>("AttndMakeCudaBackend")(99, &why_not),
            nullptr);
  EXPECT_NE(why_not.find("there is no GPU 99"), std::string::npos) << why_not;
}

}  // namespace
}  // namespace attnd::testing
