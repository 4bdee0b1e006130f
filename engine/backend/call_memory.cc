#include "engine/backend/call_memory.h"

namespace attnd {
namespace {

constexpr int64_t kAlignment = 256;

void AddInputs(const AttentionProblem& p, BlockLayout& block) {
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (p.inputs[i]) block.Add(static_cast<Piece>(i), *p.inputs[i]);
  }
  if (p.bias) block.Add(Piece::kBias, *p.bias);
  if (p.softmax_offset) block.Add(Piece::kSoftmaxOffset, *p.softmax_offset);
}

template <typename T>
T* Pointer(const BlockLayout& layout, std::byte* block, Piece piece) {
  const std::span<std::byte> bytes = layout.In(block, piece);
  return bytes.empty() ? nullptr : reinterpret_cast<T*>(bytes.data());
}

template <typename Buffers>
void SetInputs(const BlockLayout& layout, std::byte* block, Buffers& buffers) {
  for (int i = 0; i < kNumInputBuffers; ++i) {
    buffers.inputs[i] = Pointer<std::byte>(layout, block, static_cast<Piece>(i));
  }
  buffers.bias = Pointer<std::byte>(layout, block, Piece::kBias);
  buffers.softmax_offset = Pointer<float>(layout, block, Piece::kSoftmaxOffset);
}

}  // namespace

int64_t SaturatingSum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

void BlockLayout::Add(Piece piece, const TensorDesc& desc) {
  const int64_t bytes = *NumBytes(desc);  // Resolve checked that it does not pass 2^63.
  entries_[static_cast<size_t>(piece)] = {desc, bytes_, bytes};
  bytes_ = SaturatingSum(bytes_, SaturatingSum(bytes, kAlignment - 1) / kAlignment * kAlignment);
}

const BlockLayout::Entry* BlockLayout::Find(Piece piece) const {
  const std::optional<Entry>& entry = entries_[static_cast<size_t>(piece)];
  return entry ? &*entry : nullptr;
}

const TensorDesc* BlockLayout::desc(Piece piece) const {
  const Entry* const entry = Find(piece);
  return entry == nullptr ? nullptr : &entry->desc;
}

std::span<std::byte> BlockLayout::In(std::byte* block, Piece piece) const {
  const Entry* const entry = Find(piece);
  if (entry == nullptr || entry->bytes == 0) return {};
  return {block + entry->offset, static_cast<size_t>(entry->bytes)};
}

CallMemory LayOutForward(const AttentionProblem& p, bool with_lse) {
  CallMemory memory;
  AddInputs(p, memory.inputs);
  if (p.is_paged) {
    const TensorDesc table{DType::kInt32, {p.batch, p.pages_per_sequence}};
    memory.inputs.Add(Piece::kPageTableK, table);
    memory.inputs.Add(Piece::kPageTableV, table);
  }
  memory.outputs.Add(Piece::kOut, p.out_desc);
  if (with_lse) memory.outputs.Add(Piece::kLse, p.lse_desc);
  if (IsFloat8(p.dtype)) memory.outputs.Add(Piece::kAmax, {DType::kFloat32, {2}});
  return memory;
}

CallMemory LayOutBackward(const AttentionProblem& p) {
  CallMemory memory;
  AddInputs(p, memory.inputs);
  memory.inputs.Add(Piece::kOut, p.out_desc);
  memory.inputs.Add(Piece::kLse, p.lse_desc);
  memory.inputs.Add(Piece::kOutGradient, p.out_desc);
  AddInputs(p, memory.outputs);
  if (IsFloat8(p.dtype)) memory.outputs.Add(Piece::kAmax, {DType::kFloat32, {4}});
  return memory;
}

ForwardBuffers ForwardBuffersIn(const CallMemory& memory, std::byte* inputs, std::byte* outputs) {
  ForwardBuffers buffers;
  SetInputs(memory.inputs, inputs, buffers);
  buffers.page_table_k = Pointer<int32_t>(memory.inputs, inputs, Piece::kPageTableK);
  buffers.page_table_v = Pointer<int32_t>(memory.inputs, inputs, Piece::kPageTableV);
  buffers.out = Pointer<std::byte>(memory.outputs, outputs, Piece::kOut);
  buffers.lse = Pointer<float>(memory.outputs, outputs, Piece::kLse);
  buffers.amax = Pointer<float>(memory.outputs, outputs, Piece::kAmax);
  return buffers;
}

BackwardBuffers BackwardBuffersIn(const CallMemory& memory, std::byte* inputs, std::byte* outputs) {
  BackwardBuffers buffers;
  SetInputs(memory.inputs, inputs, buffers);
  buffers.out = Pointer<std::byte>(memory.inputs, inputs, Piece::kOut);
  buffers.lse = Pointer<float>(memory.inputs, inputs, Piece::kLse);
  buffers.d_out = Pointer<std::byte>(memory.inputs, inputs, Piece::kOutGradient);
  for (int i = 0; i < kNumInputBuffers; ++i) {
    buffers.grads[i] = Pointer<std::byte>(memory.outputs, outputs, static_cast<Piece>(i));
  }
  buffers.d_bias = Pointer<std::byte>(memory.outputs, outputs, Piece::kBias);
  buffers.d_softmax_offset = Pointer<float>(memory.outputs, outputs, Piece::kSoftmaxOffset);
  buffers.amax = Pointer<float>(memory.outputs, outputs, Piece::kAmax);
  return buffers;
}

}  // namespace attnd
