// inference.GRPCInferenceService, the Open Inference Protocol: not built yet; every RPC says so by
// name.
#pragma once

#include "inference/open_inference.grpc.pb.h"
#include "server/services/calls.h"

namespace attnd {

// In a namespace of its own, so that the alias stays here.
namespace inference_raw {
using I = inference::GRPCInferenceService;
using Service = I::WithRawCallbackMethod_ServerLive<I::WithRawCallbackMethod_ServerReady<
    I::WithRawCallbackMethod_ModelReady<I::WithRawCallbackMethod_ServerMetadata<
        I::WithRawCallbackMethod_ModelMetadata<I::WithRawCallbackMethod_ModelInfer<I::Service>>>>>>;
}  // namespace inference_raw

class InferenceService final : public inference_raw::Service {
 public:
  ATTND_REFUSE_UNARY(GRPCInferenceService, ServerLive)
  ATTND_REFUSE_UNARY(GRPCInferenceService, ServerReady)
  ATTND_REFUSE_UNARY(GRPCInferenceService, ModelReady)
  ATTND_REFUSE_UNARY(GRPCInferenceService, ServerMetadata)
  ATTND_REFUSE_UNARY(GRPCInferenceService, ModelMetadata)
  ATTND_REFUSE_UNARY(GRPCInferenceService, ModelInfer)
};

}  // namespace attnd
