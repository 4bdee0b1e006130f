// What the subcommands print: text for people, one JSON document for machines.
#pragma once

#include <grpcpp/support/status.h>

#include <optional>
#include <string>

#include "attnd/v1/admin.pb.h"
#include "attnd/v1/attention.pb.h"
#include "client/cli/local_check.h"
#include "client/cli/request.h"

namespace attnd::cli {

// One call as it went.
struct Traffic {
  int64_t sent_bytes = 0;  // Of tensors.
  int64_t received_bytes = 0;
  double seconds = 0;  // From the call to its answer.
};

// "INVALID_ARGUMENT: sentence (field spec.x, reason Y)"
std::string ErrorLine(const grpc::Status& status);
std::string ErrorJson(const grpc::Status& status);

// A reply as one line of JSON, with the proto's field names.
std::string MessageJson(const google::protobuf::Message& message);

std::string CapabilitiesText(const v1::GetCapabilitiesResponse& reply);
std::string PlanText(const v1::PlanResponse& reply);

// Tensors of the replies must hold the bytes that their shapes say.
std::string ForwardText(const ForwardCall& call, const v1::ForwardResponse& reply,
                        const Traffic& traffic, const std::optional<CheckResult>& check);
std::string BackwardText(const BackwardCall& call, const v1::BackwardResponse& reply,
                         const Traffic& traffic, const std::optional<GradientCheck>& check);

// {"reply": without the tensors' elements, "sent_bytes", "received_bytes", "seconds", "check"}
std::string ForwardJson(v1::ForwardResponse reply, const Traffic& traffic,
                        const std::optional<CheckResult>& check);
std::string BackwardJson(v1::BackwardResponse reply, const Traffic& traffic,
                         const std::optional<GradientCheck>& check);

}  // namespace attnd::cli
