// Parses a message without taking its tensors' bytes into it: they stay in the slices that gRPC
// received, until they are copied once, to where they will be used.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "attnd/v1/types.pb.h"

namespace attnd::wire {

// Where the `data` fields of a parsed message's tensors lie in the received bytes.
class TensorBytes {
 public:
  // Fills `message` as its generated parser would, but for Tensor.data: such a field is set and
  // empty, and its bytes are found here. INVALID_ARGUMENT where the generated parser would fail,
  // RESOURCE_EXHAUSTED where more than kMostMetadataBytes are not data.
  // Holds references to the slices of `bytes`, and pointers to tensors of `message`.
  absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message);

  // Bytes of a tensor's data; 0 where the field is not set.
  int64_t SizeOf(const v1::Tensor& tensor) const;

  // Copies a tensor's data; `target` has exactly SizeOf(tensor) bytes.
  void CopyTo(const v1::Tensor& tensor, std::span<std::byte> target) const;

 private:
  struct Range {
    int64_t offset = 0;
    int64_t size = 0;
  };
  friend class TensorWalker;

  std::vector<grpc::Slice> slices_;
  std::vector<int64_t> slice_ends_;  // Offset one past each slice.
  std::unordered_map<const google::protobuf::Message*, Range> ranges_;
};

}  // namespace attnd::wire
