// attnd.v1.Sessions: not built yet; every RPC says so by name.
#pragma once

#include "attnd/v1/sessions.grpc.pb.h"
#include "server/services/calls.h"

namespace attnd {

// In a namespace of its own, so that the alias stays here.
namespace sessions_raw {
using S = v1::Sessions;
using Service = S::WithRawCallbackMethod_Open<S::WithRawCallbackMethod_Append<
    S::WithRawCallbackMethod_Attend<S::WithRawCallbackMethod_AttendStream<
        S::WithRawCallbackMethod_Fork<S::WithRawCallbackMethod_Truncate<
            S::WithRawCallbackMethod_Export<S::WithRawCallbackMethod_Import<
                S::WithRawCallbackMethod_Close<S::WithRawCallbackMethod_Renew<
                    S::WithRawCallbackMethod_Describe<S::Service>>>>>>>>>>>;
}  // namespace sessions_raw

class SessionsService final : public sessions_raw::Service {
 public:
  ATTND_REFUSE_UNARY(Sessions, Open)
  ATTND_REFUSE_UNARY(Sessions, Append)
  ATTND_REFUSE_UNARY(Sessions, Attend)
  ATTND_REFUSE_UNARY(Sessions, Fork)
  ATTND_REFUSE_UNARY(Sessions, Truncate)
  ATTND_REFUSE_SERVER_STREAM(Sessions, Export)
  ATTND_REFUSE_CLIENT_STREAM(Sessions, Import)
  ATTND_REFUSE_UNARY(Sessions, Close)
  ATTND_REFUSE_UNARY(Sessions, Renew)
  ATTND_REFUSE_UNARY(Sessions, Describe)

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttendStream(
      grpc::CallbackServerContext*) override {
    return new RefusedBidiStream("Sessions.AttendStream");
  }
};

}  // namespace attnd
