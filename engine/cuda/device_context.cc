#include "engine/cuda/device_context.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

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
  std::unique_ptr<DeviceContext> context(new DeviceContext(device));
  ATTND_RETURN_IF_ERROR(context->Use());
  ATTND_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&context->stream_, cudaStreamNonBlocking),
                 "cudaStreamCreateWithFlags"));
  for (cudaEvent_t& stamp : context->stamps_) {
    ATTND_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&stamp), "cudaEventCreate"));
  }
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
  for (cudaEvent_t stamp : stamps_) {
    if (stamp != nullptr) cudaEventDestroy(stamp);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (staging_ != nullptr) cudaFreeHost(staging_);
}

absl::Status DeviceContext::Use() const {
  return CudaStatus(cudaSetDevice(device_), "cudaSetDevice");
}

absl::Status DeviceContext::Copy(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(Use());
  return CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_),
      "cudaMemcpyAsync");
}

absl::Status DeviceContext::CopyAll(std::span<const CopyStep> steps) {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;
  for (const CopyStep& step : steps) {
    if (step.bytes == 0) continue;
    to.push_back(step.to);
    from.push_back(step.from);
    bytes.push_back(static_cast<size_t>(step.bytes));
  }
  if (to.empty()) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(Use());
  cudaMemcpyAttributes in_order = {};
  in_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;  // The attributes hold from this copy on.
  return CudaStatus(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &in_order,
                                         &first, 1, stream_),
                    "cudaMemcpyBatchAsync");
}

absl::Status DeviceContext::Clear(void* memory, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream_),
                    "cudaMemsetAsync");
}

absl::Status DeviceContext::Stamp(int slot) {
  ATTND_RETURN_IF_ERROR(Use());
  return CudaStatus(cudaEventRecord(stamps_[slot], stream_), "cudaEventRecord");
}

absl::Status DeviceContext::Wait() {
  ATTND_RETURN_IF_ERROR(Use());
  return CudaStatus(cudaStreamSynchronize(stream_), "the GPU");
}

absl::Duration DeviceContext::Between(int first, int second) const {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, stamps_[first], stamps_[second]) != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::ZeroDuration();
  }
  return absl::Milliseconds(milliseconds);
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

}  // namespace attnd
