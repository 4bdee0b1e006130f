// One tensor of a message: description, sources, bytes. Private to decode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "attnd/v1/types.pb.h"
#include "engine/core/status.h"
#include "engine/core/tensor_view.h"
#include "server/wire/tensor_bytes.h"

namespace attnd::wire {

inline absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

// The engine's enum of a proto enum's value; the numbers are the same. INVALID_ARGUMENT for values
// that the contract does not have.
template <typename Engine, typename Proto>
absl::Status DecodeEnum(Proto value, bool (*is_valid)(int), std::string_view field,
                        Engine& target) {
  if (!is_valid(value)) {
    return InvalidField(reason::kUnknownEnumValue, field,
                        absl::StrCat("has the unknown value ", static_cast<int>(value)));
  }
  target = static_cast<Engine>(value);
  return absl::OkStatus();
}

// Seconds above 0. `field` is the lease's.
absl::Status CheckLease(const v1::Lease& lease, std::string_view field);

absl::Status CheckRange(const v1::SharedMemoryRange& range, std::string_view field);

// dtype and shape, after its sources were checked against them. `bytes` holds the message's data;
// null: a plan, whose tensors must not have sources. `unbuilt` is set, if it was OK, to
// UNIMPLEMENTED for a source that is not built.
absl::StatusOr<TensorDesc> DecodeTensor(const v1::Tensor& tensor, const TensorBytes* bytes,
                                        std::string_view field, absl::Status& unbuilt);

// The elements as bytes, of the description's size: data as it is, values converted.
void FillTensor(const v1::Tensor& tensor, const TensorBytes& bytes, DType dtype,
                std::span<std::byte> target);

// INT32 elements. INVALID_ARGUMENT for values that are no integers of 32 bits.
absl::Status FillInt32(const v1::Tensor& tensor, const TensorBytes& bytes, std::string_view field,
                       std::span<int32_t> target);

}  // namespace attnd::wire
