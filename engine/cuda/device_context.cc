#include "engine/cuda/device_context.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr size_t kSmallestStaging = 16384;

}  // namespace

absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // Or the next launch of this thread would report it again.
  return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                   absl::StrCat(what, " failed: ", cudaGetErrorString(error)));
}

absl::StatusOr<std::unique_ptr<DeviceContext>> DeviceContext::Make(int device) {
  ATTND_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device), "cudaSetDevice"));
  std::unique_ptr<DeviceContext> context(new DeviceContext);
  ATTND_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&context->stream_, cudaStreamNonBlocking),
                 "cudaStreamCreateWithFlags"));
  cudnnStatus_t status = cudnnCreate(&context->handle_);
  if (status == CUDNN_STATUS_SUCCESS) status = cudnnSetStream(context->handle_, context->stream_);
  if (status != CUDNN_STATUS_SUCCESS) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     absl::StrCat("cudnnCreate failed: ", cudnnGetErrorString(status)));
  }
  return context;
}

DeviceContext::~DeviceContext() {
  // At the end of the process the driver may be gone already: the results say nothing useful.
  if (handle_ != nullptr) cudnnDestroy(handle_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (staging_ != nullptr) cudaFreeHost(staging_);
}

absl::StatusOr<std::span<std::byte>> DeviceContext::Staging(size_t bytes) {
  if (bytes > staging_bytes_) {
    if (staging_ != nullptr) cudaFreeHost(std::exchange(staging_, nullptr));
    staging_bytes_ = 0;
    const size_t grown = std::max(kSmallestStaging, std::bit_ceil(bytes));
    void* memory = nullptr;
    ATTND_RETURN_IF_ERROR(
        CudaStatus(cudaHostAlloc(&memory, grown, cudaHostAllocDefault), "cudaHostAlloc"));
    staging_ = static_cast<std::byte*>(memory);
    staging_bytes_ = grown;
  }
  return std::span(staging_, bytes);
}

DeviceContexts::Lease::~Lease() {
  if (context_ == nullptr) return;
  std::lock_guard lock(home_->mutex_);
  home_->idle_.push_back(std::move(context_));
}

absl::StatusOr<DeviceContexts::Lease> DeviceContexts::Take() {
  std::unique_ptr<DeviceContext> context;
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      context = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (context == nullptr) {
    ATTND_ASSIGN_OR_RETURN(context, DeviceContext::Make(device_));
    return Lease(*this, std::move(context));
  }
  ATTND_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
  return Lease(*this, std::move(context));
}

}  // namespace attnd
