#include "engine/cuda/cudnn_call.h"

namespace attnd {

void PointToArrays(const std::byte* block, const RequestArrayLayout& layout, int64_t first,
                   SdpaPointers& pointers) {
  auto offsets = [&](int64_t at) { return reinterpret_cast<const int64_t*>(block + at) + first; };
  auto lens = [&](int64_t at) { return reinterpret_cast<const int32_t*>(block + at) + first; };
  pointers.q_offsets = offsets(layout.q_offsets);
  pointers.k_offsets = offsets(layout.k_offsets);
  pointers.v_offsets = offsets(layout.v_offsets);
  pointers.out_offsets = offsets(layout.out_offsets);
  pointers.lse_offsets = offsets(layout.lse_offsets);
  pointers.d_out_offsets = offsets(layout.d_out_offsets);
  pointers.dq_offsets = offsets(layout.dq_offsets);
  pointers.dk_offsets = offsets(layout.dk_offsets);
  pointers.dv_offsets = offsets(layout.dv_offsets);
  pointers.q_lens = lens(layout.q_lens);
  pointers.kv_lens = lens(layout.kv_lens);
  pointers.fp8_scales = reinterpret_cast<const float*>(block + layout.fp8_scales);
}

}  // namespace attnd
