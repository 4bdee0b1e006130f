// attnd.v1.Attention.
#pragma once

#include <grpcpp/grpcpp.h>

#include "attnd/v1/attention.grpc.pb.h"
#include "engine/engine.h"
#include "server/services/calls.h"

namespace attnd {

using RawAttentionService = v1::Attention::WithRawCallbackMethod_Forward<
    v1::Attention::WithRawCallbackMethod_Backward<v1::Attention::WithRawCallbackMethod_Plan<
        v1::Attention::WithRawCallbackMethod_Merge<v1::Attention::Service>>>>;

class AttentionService final : public RawAttentionService {
 public:
  // The engine outlives the service.
  explicit AttentionService(Engine& engine) : engine_(engine) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request, grpc::ByteBuffer* reply) override;
  ATTND_REFUSE_UNARY(Attention, Backward)
  ATTND_REFUSE_UNARY(Attention, Merge)

 private:
  Engine& engine_;
};

}  // namespace attnd
