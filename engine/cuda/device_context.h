// What one forward call holds of a device while it runs: a stream, a cuDNN handle on it, and pinned
// memory for small arrays. Never shared by two calls at once; kept for the next one.
#pragma once

#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd {

// INTERNAL with CUDA's words for `what`, or OK.
absl::Status CudaStatus(cudaError_t error, const char* what);

class DeviceContext {
 public:
  // Sets the calling thread's device.
  static absl::StatusOr<std::unique_ptr<DeviceContext>> Make(int device);
  ~DeviceContext();

  cudaStream_t stream() const { return stream_; }
  cudnnHandle_t handle() const { return handle_; }

  // Pinned memory of at least `bytes`; the last call's is gone. The stream must be idle.
  absl::StatusOr<std::span<std::byte>> Staging(size_t bytes);

 private:
  DeviceContext() = default;

  cudaStream_t stream_ = nullptr;
  cudnnHandle_t handle_ = nullptr;
  std::byte* staging_ = nullptr;
  size_t staging_bytes_ = 0;
};

// Idle contexts of a device. Thread-safe.
class DeviceContexts {
 public:
  explicit DeviceContexts(int device) : device_(device) {}

  // A context for one call of this thread, back in the pool when the lease ends. Sets the thread's
  // device.
  class Lease {
   public:
    Lease(DeviceContexts& home, std::unique_ptr<DeviceContext> context)
        : home_(&home), context_(std::move(context)) {}
    Lease(Lease&&) = default;
    ~Lease();
    DeviceContext* operator->() const { return context_.get(); }
    DeviceContext* get() const { return context_.get(); }

   private:
    DeviceContexts* home_;
    std::unique_ptr<DeviceContext> context_;
  };
  absl::StatusOr<Lease> Take();

 private:
  const int device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<DeviceContext>> idle_;
};

}  // namespace attnd
