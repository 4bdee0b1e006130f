// Where the tensors of one call lie: its inputs side by side in one block and its outputs in
// another, so that each way is one copy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// The tensors of a call. The first five are those of Buffer.
enum class Piece : uint8_t {
  kQkv = 0,
  kQ,
  kKv,
  kK,
  kV,
  kBias,
  kSoftmaxOffset,
  kPageTableK,
  kPageTableV,
  kOut,
  kLse,
  kOutGradient,
  kAmax,
};
inline constexpr int kNumPieces = 13;

inline Piece PieceOf(Buffer buffer) { return static_cast<Piece>(buffer); }

// Tensors side by side, at offsets that are multiples of 256. Sizes saturate at 2^63 - 1, so that
// shapes that no memory could hold can be laid out, and refused by their size.
class BlockLayout {
 public:
  void Add(Piece piece, const TensorDesc& desc);

  int64_t bytes() const { return bytes_; }
  // Null where the block has no such tensor.
  const TensorDesc* desc(Piece piece) const;
  // The tensor's bytes in a block that begins at `block`; empty where there is none.
  std::span<std::byte> In(std::byte* block, Piece piece) const;

 private:
  struct Entry {
    TensorDesc desc;
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  const Entry* Find(Piece piece) const;

  std::array<std::optional<Entry>, kNumPieces> entries_;  // By Piece.
  int64_t bytes_ = 0;
};

// Forward: inputs, bias, softmax offset and page tables; O, and LSE where it is wanted.
// Backward: those inputs, O, LSE and dO; outputs are gradients, each under the name and with the
// shape of what it is a gradient of. Both have amax among the outputs with an FP8 dtype.
struct CallMemory {
  BlockLayout inputs;
  BlockLayout outputs;
};

CallMemory LayOutForward(const AttentionProblem& problem, bool with_lse);
CallMemory LayOutBackward(const AttentionProblem& problem);

// A call's pointers into its two blocks, without workspace, queue and cancellation. Tensors without
// elements are null.
ForwardBuffers ForwardBuffersIn(const CallMemory& memory, std::byte* inputs, std::byte* outputs);
BackwardBuffers BackwardBuffersIn(const CallMemory& memory, std::byte* inputs, std::byte* outputs);

// The sum, or 2^63 - 1.
int64_t SaturatingSum(int64_t a, int64_t b);

}  // namespace attnd
