// The tensors of a call by number: what a request carries, and in a backward reply the gradients of
// it.
#pragma once

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attnd/v1/attention.pb.h"
#include "client/cli/host_tensor.h"

namespace attnd::cli {

// The first slots are the fields of v1::QkvBuffers, by their numbers.
inline constexpr int kNumInputSlots = 5;
inline constexpr int kBiasSlot = 6;
inline constexpr int kSoftmaxOffsetSlot = 7;
inline constexpr int kOutSlot = 8;
inline constexpr int kLseSlot = 9;
inline constexpr int kOutGradientSlot = 10;

// By slot. `request` messages describe them and have no sources.
using CallTensors = std::map<int, HostTensor>;

// "q", "bias", "d_out", ...
const char* SlotName(int slot);

// Field numbers from a request's down to the slot's tensor. `request` is a ForwardRequest, a
// BackwardRequest or a PlanRequest with such a field.
std::vector<int> PathOf(const google::protobuf::Message& request, int slot);

// The slot's tensor in a request as above; set where it was not.
v1::Tensor* MutableTensor(google::protobuf::Message* request, int slot);

// The gradients that the reply has, by the slots of what they are gradients of.
std::vector<std::pair<int, const v1::Tensor*>> GradientsOf(const v1::BackwardResponse& reply);

}  // namespace attnd::cli
