#include "server/wire/message.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd::wire {

absl::Status MetadataTooLarge(int64_t bytes) {
  return MakeError(
      absl::StatusCode::kResourceExhausted, reason::kMessageTooLarge, "",
      absl::StrCat("the message has ", bytes, " bytes beside its tensors' data; at most ",
                   kMostMetadataBytes, " are taken"));
}

absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message) {
  const auto size = static_cast<int64_t>(bytes.Length());
  if (size > kMostMetadataBytes) return MetadataTooLarge(size);
  // The reader only reads; its interface predates const.
  grpc::ProtoBufferReader reader(const_cast<grpc::ByteBuffer*>(&bytes));
  if (reader.status().ok() && message.ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformedMessage, "",
                   absl::StrCat("the request's ", bytes.Length(), " bytes are no valid ",
                                message.GetTypeName()));
}

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message) {
  const std::string bytes = message.SerializeAsString();
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace attnd::wire
