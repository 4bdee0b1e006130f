// Reactors that the services share. All handlers are raw (byte buffers), so that bytes which are no
// valid message get INVALID_ARGUMENT; the generated, typed descriptors stay for reflection.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string_view>

#include "absl/status/statusor.h"
#include "engine/core/status.h"
#include "server/wire/message.h"
#include "server/wire/status.h"

namespace attnd {

// Answers a unary call on the spot: parses, calls handler(Request) -> absl::StatusOr<Response>.
template <typename Request, typename Handler>
grpc::ServerUnaryReactor* AnswerUnary(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* bytes, grpc::ByteBuffer* reply,
                                      Handler handler) {
  const absl::Status status = CatchBadAlloc([&]() -> absl::Status {
    Request request;
    ATTND_RETURN_IF_ERROR(wire::Parse(*bytes, request));
    auto response = handler(request);
    if (response.ok()) *reply = wire::Serialize(*response);
    return response.status();
  });
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(wire::ToGrpc(status));
  return reactor;
}

// Ends a call of any shape at once with UNIMPLEMENTED and the RPC's name.
template <typename Reactor>
class RefusedCall final : public Reactor {
 public:
  explicit RefusedCall(std::string_view rpc) { this->Finish(wire::ToGrpc(wire::RpcNotBuilt(rpc))); }
  void OnDone() override { delete this; }
};

using RefusedUnary = RefusedCall<grpc::ServerUnaryReactor>;
using RefusedClientStream = RefusedCall<grpc::ServerReadReactor<grpc::ByteBuffer>>;
using RefusedServerStream = RefusedCall<grpc::ServerWriteReactor<grpc::ByteBuffer>>;
using RefusedBidiStream = RefusedCall<grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>>;

}  // namespace attnd

// Overrides of RPCs that are not built yet, inside a service class.
#define ATTND_REFUSE_UNARY(service, rpc)                                               \
  grpc::ServerUnaryReactor* rpc(grpc::CallbackServerContext*, const grpc::ByteBuffer*, \
                                grpc::ByteBuffer*) override {                          \
    return new RefusedUnary(#service "." #rpc);                                        \
  }
#define ATTND_REFUSE_CLIENT_STREAM(service, rpc)                                                  \
  grpc::ServerReadReactor<grpc::ByteBuffer>* rpc(grpc::CallbackServerContext*, grpc::ByteBuffer*) \
      override {                                                                                  \
    return new RefusedClientStream(#service "." #rpc);                                            \
  }
#define ATTND_REFUSE_SERVER_STREAM(service, rpc)                                      \
  grpc::ServerWriteReactor<grpc::ByteBuffer>* rpc(grpc::CallbackServerContext*,       \
                                                  const grpc::ByteBuffer*) override { \
    return new RefusedServerStream(#service "." #rpc);                                \
  }
