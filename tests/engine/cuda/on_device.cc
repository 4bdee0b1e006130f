#include "tests/engine/cuda/on_device.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <iostream>
#include <memory>

#include "tests/engine/cuda/device.h"

namespace attnd::testing {
namespace {

void Must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::cerr << cudaGetErrorString(error) << std::endl;
  std::abort();
}

DeviceQueue& Queue() {
  static AttentionBackend* const backend = MakeBackend().release();
  thread_local const std::unique_ptr<DeviceQueue> queue = *backend->MakeQueue();
  return *queue;
}

}  // namespace

const BackendUnderTest& OnDevice() {
  static const BackendUnderTest backend{
      .name = "cuda",
      .make = MakeBackend,
      .allocate =
          [](size_t size) {
            void* memory = nullptr;
            Must(cudaMalloc(&memory, size));
            return static_cast<std::byte*>(memory);
          },
      .release = [](std::byte* memory) { Must(cudaFree(memory)); },
      .copy =
          [](std::byte* to, const std::byte* from, size_t size) {
            // From pageable memory, cudaMemcpy returns before the last bytes have arrived.
            Must(cudaMemcpy(to, from, size, cudaMemcpyDefault));
            Must(cudaDeviceSynchronize());
          },
      .queue = Queue,
      .runs_everything = false,
  };
  return backend;
}

}  // namespace attnd::testing
