#include "client/cli/tensor_slots.h"

#include <google/protobuf/descriptor.h>

namespace attnd::cli {
namespace {

using google::protobuf::Message;

constexpr std::array<const char*, 10> kSlotNames = {
    "qkv", "q", "kv", "k", "v", "bias", "softmax_offset", "out", "lse", "d_out"};

Message* MutableField(Message* message, int number) {
  const auto* field = message->GetDescriptor()->FindFieldByNumber(number);
  return message->GetReflection()->MutableMessage(message, field);
}

}  // namespace

const char* SlotName(int slot) { return kSlotNames[static_cast<size_t>(slot) - 1]; }

std::vector<int> PathOf(const Message& request, int slot) {
  const bool is_input = slot <= kNumInputSlots;
  const auto* field =
      request.GetDescriptor()->FindFieldByName(is_input ? "inputs" : SlotName(slot));
  if (is_input) return {field->number(), slot};
  return {field->number()};
}

v1::Tensor* MutableTensor(Message* request, int slot) {
  Message* message = request;
  for (const int number : PathOf(*request, slot)) message = MutableField(message, number);
  return static_cast<v1::Tensor*>(message);
}

std::vector<std::pair<int, const v1::Tensor*>> GradientsOf(const v1::BackwardResponse& reply) {
  std::vector<std::pair<int, const v1::Tensor*>> gradients;
  const v1::QkvBuffers& grads = reply.grads();
  for (int slot = 1; slot <= kNumInputSlots; ++slot) {
    const auto* field = grads.GetDescriptor()->FindFieldByNumber(slot);
    if (!grads.GetReflection()->HasField(grads, field)) continue;
    const Message& tensor = grads.GetReflection()->GetMessage(grads, field);
    gradients.emplace_back(slot, static_cast<const v1::Tensor*>(&tensor));
  }
  if (reply.has_d_bias()) gradients.emplace_back(kBiasSlot, &reply.d_bias());
  if (reply.has_d_softmax_offset()) {
    gradients.emplace_back(kSoftmaxOffsetSlot, &reply.d_softmax_offset());
  }
  return gradients;
}

}  // namespace attnd::cli
