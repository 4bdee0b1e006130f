// What the server says about an error beside its sentence.
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <optional>
#include <string>

namespace attnd::client {

struct ErrorDetails {
  std::string reason;  // Stable, machine-readable: google.rpc.ErrorInfo.reason.
  std::string field;   // Full path of the field at fault: google.rpc.BadRequest.
  std::optional<std::chrono::milliseconds> retry_after;  // google.rpc.RetryInfo
};

// Empty members where the status carries no such detail, or none that can be read.
ErrorDetails ParseErrorDetails(const grpc::Status& status);

// "INVALID_ARGUMENT", ...
std::string CodeName(grpc::StatusCode code);

}  // namespace attnd::client
