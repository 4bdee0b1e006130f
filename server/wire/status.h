// The one seam from the engine's errors to gRPC's.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace attnd::wire {

// The same code and sentence, with a google.rpc.Status in the details: ErrorInfo (domain "attnd",
// stable reason), BadRequest where a field is at fault, RetryInfo where a retry helps.
grpc::Status ToGrpc(const absl::Status& status);

// UNIMPLEMENTED, naming the RPC ("Attention.Backward").
absl::Status RpcNotBuilt(std::string_view rpc);

}  // namespace attnd::wire
