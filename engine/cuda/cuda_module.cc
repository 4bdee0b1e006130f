#include "engine/cuda/cuda_module.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "engine/cuda/arena_pool.h"
#include "engine/cuda/cudnn_backend.h"

namespace attnd {
namespace {

absl::Status MakeDevicePool(const CudaOptions& options, std::shared_ptr<MemoryPool>& pool) {
  size_t free = 0, total = 0;
  ATTND_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  const PoolSize& size = options.device_pool;
  const int64_t bytes =
      size.percent > 0 ? static_cast<int64_t>(free) / 100 * size.percent : size.bytes;
  if (bytes == 0) return absl::OkStatus();
  void* memory = nullptr;
  ATTND_RETURN_IF_ERROR(
      CudaStatus(cudaMalloc(&memory, static_cast<size_t>(bytes)),
                 absl::StrCat("taking ", bytes, " bytes of device memory (",
                              options.device_pool_flag, ", ", free, " bytes are free)")
                     .c_str()));
  pool = std::make_shared<ArenaPool>(
      bytes, options.device_pool_flag,
      ArenaMemory{static_cast<std::byte*>(memory), [](std::byte* data) { cudaFree(data); }});
  return absl::OkStatus();
}

absl::Status MakePinnedPool(const CudaOptions& options, std::shared_ptr<MemoryPool>& pool) {
  const int64_t bytes = options.pinned_pool_bytes;
  if (bytes == 0) return absl::OkStatus();
  void* memory = nullptr;
  ATTND_RETURN_IF_ERROR(CudaStatus(
      cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocPortable),
      absl::StrCat("pinning ", bytes, " bytes of memory (", options.pinned_pool_flag, ")")
          .c_str()));
  pool = std::make_shared<ArenaPool>(
      bytes, options.pinned_pool_flag,
      ArenaMemory{static_cast<std::byte*>(memory), [](std::byte* data) { cudaFreeHost(data); }});
  return absl::OkStatus();
}

absl::StatusOr<CudaParts> Open(const CudaOptions& options) {
  CudaParts parts;
  ATTND_ASSIGN_OR_RETURN(parts.backend, CudnnBackend::Make(options.device));
  ATTND_RETURN_IF_ERROR(MakeDevicePool(options, parts.device_pool));
  ATTND_RETURN_IF_ERROR(MakePinnedPool(options, parts.pinned_pool));
  return parts;
}

}  // namespace
}  // namespace attnd

extern "C" __attribute__((visibility("default"))) bool AttndOpenCuda(
    const attnd::CudaOptions& options, attnd::CudaParts* parts, std::string* why_not) {
  auto opened = attnd::Open(options);
  if (opened.ok()) {
    *parts = *std::move(opened);
  } else {
    *why_not = std::string(opened.status().message());
  }
  return opened.ok();
}
