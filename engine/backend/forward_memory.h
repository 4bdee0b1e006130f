// Where the tensors of one forward call lie: its inputs side by side in one block and its outputs
// in another, so that each way is one copy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// Byte offsets, all multiples of 256. Sizes saturate at 2^63 - 1, so that shapes that no memory
// could hold can be laid out, and refused by their size.
struct ForwardMemory {
  std::array<int64_t, kNumInputBuffers> inputs{};  // Indexed by Buffer.
  // INT32 [b, pages_per_sequence], behind the inputs; 0 bytes unless paged.
  int64_t page_table_k = 0;
  int64_t page_table_v = 0;
  int64_t page_table_bytes = 0;  // Of each.
  int64_t input_bytes = 0;
  // O is at 0 of the outputs.
  int64_t lse = 0;
  int64_t output_bytes = 0;
};

ForwardMemory LayOutForward(const AttentionProblem& problem, bool with_lse);

// The sum, or 2^63 - 1.
int64_t SaturatingSum(int64_t a, int64_t b);

// The call's pointers into its two blocks. Workspace, queue and cancellation are left as they are.
ForwardBuffers BuffersIn(const ForwardMemory& memory, const AttentionProblem& problem,
                         bool with_lse, const std::byte* inputs, std::byte* outputs);

}  // namespace attnd
