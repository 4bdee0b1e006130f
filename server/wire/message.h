// gRPC byte buffers to and from protobuf messages.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>

#include "absl/status/status.h"

namespace attnd::wire {

// Most bytes of a message beside its tensors' data. A parsed message is several times as large.
inline constexpr int64_t kMostMetadataBytes = 32 << 20;

absl::Status MetadataTooLarge(int64_t bytes);

// INVALID_ARGUMENT where the bytes are no valid message of its type, RESOURCE_EXHAUSTED where they
// are more than kMostMetadataBytes.
absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message);

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message);

}  // namespace attnd::wire
