// attnd.v1.Admin.
#pragma once

#include <string>

#include "attnd/v1/admin.grpc.pb.h"
#include "engine/engine.h"
#include "server/services/calls.h"

namespace attnd {

using RawAdminService = v1::Admin::WithRawCallbackMethod_GetCapabilities<
    v1::Admin::WithRawCallbackMethod_Warm<v1::Admin::WithRawCallbackMethod_GetStats<
        v1::Admin::WithRawCallbackMethod_Drain<v1::Admin::Service>>>>;

class AdminService final : public RawAdminService {
 public:
  // The engine outlives the service. `incarnation` differs with every start of the server.
  AdminService(const Engine& engine, std::string incarnation);

  grpc::ServerUnaryReactor* GetCapabilities(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* reply) override;
  ATTND_REFUSE_UNARY(Admin, Warm)
  ATTND_REFUSE_UNARY(Admin, GetStats)
  ATTND_REFUSE_UNARY(Admin, Drain)

 private:
  const Engine& engine_;
  v1::GetCapabilitiesResponse capabilities_;  // Nothing in it changes while the server runs.
};

}  // namespace attnd
