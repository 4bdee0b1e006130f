// A compiled cuDNN attention graph. Its .cc is the one translation unit that sees cudnn_frontend.
#pragma once

#include <cudnn.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/cuda/sdpa_description.h"

namespace attnd {

inline constexpr int kMaxFp8Amax = 4;

// Device pointers, but for the scale. Those of tensors and arrays that the description does not use
// are ignored. They point to the first element of the tensor, not of its buffer. Forward writes O
// and LSE; backward reads them.
struct SdpaPointers {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  const void* bias = nullptr;
  const float* sink = nullptr;  // [h]
  const void* d_out = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  void* d_bias = nullptr;
  // FP8 only: scales in the order of kFp8ScaleFields, and largest magnitudes (forward: S, O;
  // backward: dP, dQ, dK, dV), kFp8Slot floats apart.
  const float* fp8_scales = nullptr;
  float* fp8_amax = nullptr;
  const int64_t* q_offsets = nullptr;
  const int64_t* k_offsets = nullptr;
  const int64_t* v_offsets = nullptr;
  const int64_t* out_offsets = nullptr;
  const int64_t* lse_offsets = nullptr;
  // Only where HasGradientOffsets.
  const int64_t* d_out_offsets = nullptr;
  const int64_t* dq_offsets = nullptr;
  const int64_t* dk_offsets = nullptr;
  const int64_t* dv_offsets = nullptr;
  const int32_t* q_lens = nullptr;
  const int32_t* kv_lens = nullptr;
  const int32_t* page_table_k = nullptr;  // INT32 [batch, pages_per_sequence] of the description
  const int32_t* page_table_v = nullptr;
  float scale = 1;
};

// Thread-safe: runs on many handles of its device at once.
class SdpaGraph {
 public:
  // Takes 0.04 to 1.2 s. UNIMPLEMENTED with a field and cuDNN's own words where it refuses.
  static absl::StatusOr<std::unique_ptr<SdpaGraph>> Build(const SdpaDescription& description,
                                                          cudnnHandle_t handle);
  ~SdpaGraph();

  int64_t workspace_bytes() const;

  // Enqueues it on the handle's stream. `workspace` is device memory of workspace_bytes().
  absl::Status Enqueue(cudnnHandle_t handle, const SdpaPointers& pointers,
                       std::byte* workspace) const;

 private:
  struct State;
  explicit SdpaGraph(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

}  // namespace attnd
