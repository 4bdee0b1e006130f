#include "engine/cuda/cuda_module.h"

#include <cuda_runtime_api.h>

#include "engine/cuda/arena_pool.h"
#include "engine/cuda/cudnn_backend.h"

namespace {

bool Done(cudaError_t error, std::string* why_not) {
  if (error == cudaSuccess) return true;
  *why_not = cudaGetErrorString(error);
  (void)cudaGetLastError();  // Or the next launch of this thread would report it again.
  return false;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) attnd::AttentionBackend* AttndMakeCudaBackend(
    int device, std::string* why_not) {
  auto backend = attnd::CudnnBackend::Make(device);
  if (backend.ok()) return backend->release();
  *why_not = std::string(backend.status().message());
  return nullptr;
}

__attribute__((visibility("default"))) bool AttndMakeDevicePool(
    int device, int64_t bytes, const std::string& flag, std::shared_ptr<attnd::MemoryPool>* pool,
    std::string* why_not) {
  void* memory = nullptr;
  if (!Done(cudaSetDevice(device), why_not)) return false;
  if (!Done(cudaMalloc(&memory, static_cast<size_t>(bytes)), why_not)) return false;
  *pool = std::make_shared<attnd::ArenaPool>(
      bytes, flag,
      attnd::ArenaMemory{static_cast<std::byte*>(memory), [](std::byte* data) { cudaFree(data); }});
  return true;
}

__attribute__((visibility("default"))) bool AttndMakePinnedPool(
    int64_t bytes, const std::string& flag, std::shared_ptr<attnd::MemoryPool>* pool,
    std::string* why_not) {
  void* memory = nullptr;
  if (!Done(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocPortable), why_not)) {
    return false;
  }
  *pool = std::make_shared<attnd::ArenaPool>(
      bytes, flag, attnd::ArenaMemory{static_cast<std::byte*>(memory), [](std::byte* data) {
                                        cudaFreeHost(data);
                                      }});
  return true;
}

__attribute__((visibility("default"))) bool AttndCudaCopy(int device, std::byte* to,
                                                          const std::byte* from, int64_t bytes,
                                                          std::string* why_not) {
  if (!Done(cudaSetDevice(device), why_not)) return false;
  // The per-thread stream: copies of two threads do not wait for each other.
  if (!Done(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault,
                            cudaStreamPerThread),
            why_not)) {
    return false;
  }
  return Done(cudaStreamSynchronize(cudaStreamPerThread), why_not);
}

}  // extern "C"
