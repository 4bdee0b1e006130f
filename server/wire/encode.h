// From the engine's results to protos. Output tensors are not copied: the reply's slices point into
// the pool's blocks and give them back when they have been sent.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "attnd/v1/attention.pb.h"
#include "engine/engine.h"
#include "server/wire/decode.h"

namespace attnd::wire {

// A serialized ForwardResponse, or BackwardResponse.
grpc::ByteBuffer EncodeForward(const DecodedCall& decoded, const CallResult& result);
grpc::ByteBuffer EncodeBackward(const DecodedCall& decoded, const CallResult& result);

// `obstacle`: what makes the plan unsupported whatever the engine says; OK: nothing.
v1::PlanResponse EncodePlan(const PlanReport& report, const absl::Status& obstacle);

// A plan that came to nothing.
v1::PlanResponse Unsupported(const absl::Status& reason);

}  // namespace attnd::wire
