// attnd.v1.Tensors: not built yet; every RPC says so by name.
#pragma once

#include "attnd/v1/tensors.grpc.pb.h"
#include "server/services/calls.h"

namespace attnd {

// In a namespace of its own, so that the alias stays here.
namespace tensors_raw {
using T = v1::Tensors;
using Service = T::WithRawCallbackMethod_Put<T::WithRawCallbackMethod_PutStatus<
    T::WithRawCallbackMethod_Get<T::WithRawCallbackMethod_Renew<T::WithRawCallbackMethod_Release<
        T::WithRawCallbackMethod_List<T::WithRawCallbackMethod_CreateSharedMemory<
            T::WithRawCallbackMethod_RegisterSharedMemory<
                T::WithRawCallbackMethod_UnregisterSharedMemory<
                    T::WithRawCallbackMethod_ListSharedMemory<T::Service>>>>>>>>>>;
}  // namespace tensors_raw

class TensorsService final : public tensors_raw::Service {
 public:
  ATTND_REFUSE_CLIENT_STREAM(Tensors, Put)
  ATTND_REFUSE_UNARY(Tensors, PutStatus)
  ATTND_REFUSE_SERVER_STREAM(Tensors, Get)
  ATTND_REFUSE_UNARY(Tensors, Renew)
  ATTND_REFUSE_UNARY(Tensors, Release)
  ATTND_REFUSE_UNARY(Tensors, List)
  ATTND_REFUSE_UNARY(Tensors, CreateSharedMemory)
  ATTND_REFUSE_UNARY(Tensors, RegisterSharedMemory)
  ATTND_REFUSE_UNARY(Tensors, UnregisterSharedMemory)
  ATTND_REFUSE_UNARY(Tensors, ListSharedMemory)
};

}  // namespace attnd
