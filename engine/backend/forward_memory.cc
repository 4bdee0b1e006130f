#include "engine/backend/forward_memory.h"

namespace attnd {
namespace {

constexpr int64_t kAlignment = 256;

int64_t BytesOf(const TensorDesc& desc) {
  return *NumBytes(desc);  // Resolve checked that it does not pass 2^63.
}

// Appends `bytes` to a block of `total`, and says where they begin.
int64_t Take(int64_t bytes, int64_t& total) {
  const int64_t at = total;
  total = SaturatingSum(total, SaturatingSum(bytes, kAlignment - 1) / kAlignment * kAlignment);
  return at;
}

}  // namespace

int64_t SaturatingSum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

ForwardMemory LayOutForward(const AttentionProblem& p, bool with_lse) {
  ForwardMemory memory;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (p.inputs[i]) memory.inputs[i] = Take(BytesOf(*p.inputs[i]), memory.input_bytes);
  }
  if (p.is_paged) {
    memory.page_table_bytes =
        p.batch * p.pages_per_sequence * static_cast<int64_t>(sizeof(int32_t));
    memory.page_table_k = Take(memory.page_table_bytes, memory.input_bytes);
    memory.page_table_v = Take(memory.page_table_bytes, memory.input_bytes);
  }
  Take(BytesOf(p.out_desc), memory.output_bytes);
  memory.lse = memory.output_bytes;
  if (with_lse) Take(BytesOf(p.lse_desc), memory.output_bytes);
  return memory;
}

ForwardBuffers BuffersIn(const ForwardMemory& memory, const AttentionProblem& p, bool with_lse,
                         const std::byte* inputs, std::byte* outputs) {
  ForwardBuffers buffers;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (p.inputs[i] && BytesOf(*p.inputs[i]) > 0) buffers.inputs[i] = inputs + memory.inputs[i];
  }
  if (memory.page_table_bytes > 0) {
    buffers.page_table_k = reinterpret_cast<const int32_t*>(inputs + memory.page_table_k);
    buffers.page_table_v = reinterpret_cast<const int32_t*>(inputs + memory.page_table_v);
  }
  buffers.out = outputs;
  if (with_lse) buffers.lse = reinterpret_cast<float*>(outputs + memory.lse);
  return buffers;
}

}  // namespace attnd
