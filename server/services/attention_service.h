// attnd.v1.Attention.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "attnd/v1/attention.grpc.pb.h"
#include "engine/engine.h"
#include "server/services/calls.h"

namespace attnd {

using RawAttentionService = v1::Attention::WithRawCallbackMethod_Forward<
    v1::Attention::WithRawCallbackMethod_Backward<v1::Attention::WithRawCallbackMethod_Plan<
        v1::Attention::WithRawCallbackMethod_Merge<v1::Attention::Service>>>>;

// Counts calls from their start until gRPC has done with them, their replies sent. Thread-safe.
class LiveCalls {
 public:
  void Begin();
  void End();
  // Blocks until there is none, or `deadline` has passed.
  void WaitForNone(absl::Time deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t count_ = 0;
};

class AttentionService final : public RawAttentionService {
 public:
  // The engine outlives the service.
  // `owner`: the address that handles carry.
  AttentionService(Engine& engine, std::string owner) : engine_(engine), owner_(std::move(owner)) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request, grpc::ByteBuffer* reply) override;
  ATTND_REFUSE_UNARY(Attention, Merge)

  // Calls that are being answered.
  LiveCalls& live_calls() { return live_calls_; }

 private:
  Engine& engine_;
  const std::string owner_;
  LiveCalls live_calls_;
};

}  // namespace attnd
