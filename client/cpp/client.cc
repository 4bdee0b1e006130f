#include "client/cpp/client.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <future>
#include <limits>
#include <utility>
#include <vector>

namespace attnd::client {
namespace {

constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();

using DataOwner = std::shared_ptr<const std::byte[]>;

// The wire bytes that precede a payload: tag and length of each message on the tensor's path, and
// of its `data`. Parsers merge repeated occurrences of an embedded message, so these, after a
// serialized request that already has the tensor's dtype and shape, complete it.
std::string PayloadPrefix(const std::vector<int>& path, int64_t size) {
  using google::protobuf::io::CodedOutputStream;
  constexpr uint32_t kLengthDelimited = 2;
  const auto header = [](int number, int64_t length) {
    std::string bytes;
    google::protobuf::io::StringOutputStream stream(&bytes);
    CodedOutputStream coded(&stream);
    coded.WriteTag(static_cast<uint32_t>(number) << 3 | kLengthDelimited);
    coded.WriteVarint64(static_cast<uint64_t>(length));
    coded.Trim();
    return bytes;
  };
  // From the inside out: a message holds all that has been written so far.
  std::string prefix = header(v1::Tensor::kDataFieldNumber, size);
  for (auto field = path.rbegin(); field != path.rend(); ++field) {
    prefix.insert(0, header(*field, static_cast<int64_t>(prefix.size()) + size));
  }
  return prefix;
}

// A slice that points at the tensor's bytes and keeps their owner alive.
grpc::Slice PayloadSlice(const TensorBytes& tensor) {
  // The slice API takes a mutable pointer; gRPC only reads what it sends.
  void* bytes = const_cast<std::byte*>(tensor.data.get());
  return grpc::Slice(
      bytes, static_cast<size_t>(tensor.size),
      [](void* owner) { delete static_cast<DataOwner*>(owner); }, new DataOwner(tensor.data));
}

// The request, and after it the payloads, which are not copied.
grpc::Status Assemble(const google::protobuf::Message& request,
                      std::span<const TensorBytes> tensors, grpc::ByteBuffer* message) {
  std::vector<grpc::Slice> slices;
  slices.emplace_back(request.SerializeAsString());
  auto total = static_cast<int64_t>(slices.front().size());
  for (const TensorBytes& tensor : tensors) {
    const std::string prefix = PayloadPrefix(tensor.path, tensor.size);
    total += static_cast<int64_t>(prefix.size()) + tensor.size;
    if (total > kMaxMessageBytes) {
      return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                          "the request has at least " + std::to_string(total) +
                              " bytes, more than the " + std::to_string(kMaxMessageBytes) +
                              " that a gRPC message can hold");
    }
    slices.emplace_back(prefix);
    slices.push_back(PayloadSlice(tensor));
  }
  *message = grpc::ByteBuffer(slices.data(), slices.size());
  return grpc::Status::OK;
}

// One unary call on raw bytes.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const CallOptions& options, const grpc::ByteBuffer& request,
                     google::protobuf::Message* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + options.timeout);
  context.set_wait_for_ready(options.wait_for_ready);
  grpc::GenericStub stub(channel);
  grpc::ByteBuffer reply;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &request, &reply,
                 [&done](grpc::Status status) { done.set_value(std::move(status)); });
  grpc::Status status = done.get_future().get();  // The deadline bounds this.
  if (!status.ok()) return status;
  grpc::ProtoBufferReader reader(&reply);
  if (!reader.status().ok() || !response->ParseFromZeroCopyStream(&reader)) {
    return grpc::Status(grpc::StatusCode::INTERNAL,
                        "the reply of " + method + " is no valid " + response->GetTypeName());
  }
  return status;
}

grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const CallOptions& options, const google::protobuf::Message& request,
                  google::protobuf::Message* response) {
  const grpc::Slice slice(request.SerializeAsString());
  const grpc::ByteBuffer message(&slice, 1);
  return CallRaw(channel, method, options, message, response);
}

}  // namespace

grpc::ChannelArguments MakeChannelArguments() {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return args;
}

Client::Client(const std::string& address)
    : channel_(grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                         MakeChannelArguments())) {}

grpc::Status Client::Forward(const v1::ForwardRequest& request,
                             std::span<const TensorBytes> tensors, const CallOptions& options,
                             v1::ForwardResponse* response) {
  grpc::ByteBuffer message;
  const grpc::Status status = Assemble(request, tensors, &message);
  if (!status.ok()) return status;
  return CallRaw(channel_, "/attnd.v1.Attention/Forward", options, message, response);
}

grpc::Status Client::Backward(const v1::BackwardRequest& request,
                              std::span<const TensorBytes> tensors, const CallOptions& options,
                              v1::BackwardResponse* response) {
  grpc::ByteBuffer message;
  const grpc::Status status = Assemble(request, tensors, &message);
  if (!status.ok()) return status;
  return CallRaw(channel_, "/attnd.v1.Attention/Backward", options, message, response);
}

grpc::Status Client::Plan(const v1::PlanRequest& request, const CallOptions& options,
                          v1::PlanResponse* response) {
  return Call(channel_, "/attnd.v1.Attention/Plan", options, request, response);
}

grpc::Status Client::GetCapabilities(const CallOptions& options,
                                     v1::GetCapabilitiesResponse* response) {
  return Call(channel_, "/attnd.v1.Admin/GetCapabilities", options, v1::GetCapabilitiesRequest(),
              response);
}

grpc::Status Client::CheckHealth(const std::string& service, const CallOptions& options,
                                 ::grpc::health::v1::HealthCheckResponse* response) {
  ::grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  return Call(channel_, "/grpc.health.v1.Health/Check", options, request, response);
}

}  // namespace attnd::client
