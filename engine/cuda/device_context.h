// A queue of a device: a stream, a cuDNN handle on it, time stamps, and pinned memory for small
// arrays.
#pragma once

#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/backend/device_queue.h"

namespace attnd {

// INTERNAL with CUDA's words for `what`, or OK.
absl::Status CudaStatus(cudaError_t error, const char* what);

class DeviceContext final : public DeviceQueue {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceContext>> Make(int device);
  ~DeviceContext() override;

  absl::Status Copy(std::byte* to, const std::byte* from, int64_t bytes) override;
  absl::Status CopyAll(std::span<const CopyStep> steps) override;
  absl::Status Stamp(int slot) override;
  absl::Status Wait() override;
  absl::Duration Between(int first, int second) const override;

  // Enqueues zeros for `bytes` bytes of device memory.
  absl::Status Clear(void* memory, int64_t bytes);

  // Makes the device the calling thread's.
  absl::Status Use() const;

  cudaStream_t stream() const { return stream_; }
  cudnnHandle_t handle() const { return handle_; }

  // Pinned memory of at least `bytes`; the last call's is gone, so the stream must be idle.
  absl::StatusOr<std::span<std::byte>> Staging(size_t bytes);

 private:
  explicit DeviceContext(int device) : device_(device) {}

  const int device_;
  cudaStream_t stream_ = nullptr;
  cudnnHandle_t handle_ = nullptr;
  std::array<cudaEvent_t, kStamps> stamps_{};
  std::byte* staging_ = nullptr;
  size_t staging_bytes_ = 0;
};

}  // namespace attnd
