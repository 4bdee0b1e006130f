// gRPC byte buffers to and from protobuf messages.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"

namespace attnd::wire {

// INVALID_ARGUMENT where the bytes are no valid message of its type.
absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message);

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message);

}  // namespace attnd::wire
