#include "server/wire/status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace attnd::wire {
namespace {

// A sentence may quote what the client sent; trailers have room for 8 KiB in all.
constexpr size_t kMostMessageBytes = 1000;

std::string Clamp(absl::string_view message) {
  if (message.size() <= kMostMessageBytes) return std::string(message);
  size_t end = kMostMessageBytes;
  while ((message[end] & 0xC0) == 0x80) --end;  // Not inside a UTF-8 sequence.
  return absl::StrCat(message.substr(0, end), "...");
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Clamp(status.message());
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_domain("attnd");
  const std::string reason = ErrorReason(status);
  info.set_reason(reason.empty() ? std::string(reason::kInternal) : reason);
  const std::string field = ErrorField(status);
  if (!field.empty()) {
    (*info.mutable_metadata())["field"] = field;
    google::rpc::BadRequest bad;
    auto* violation = bad.add_field_violations();
    violation->set_field(field);
    violation->set_description(message);
    details.add_details()->PackFrom(bad);
  }
  details.add_details()->PackFrom(info);
  if (const auto retry_after = ErrorRetryAfter(status)) {
    google::rpc::RetryInfo retry;
    const int64_t nanos = absl::ToInt64Nanoseconds(*retry_after);
    retry.mutable_retry_delay()->set_seconds(nanos / 1'000'000'000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
    details.add_details()->PackFrom(retry);
  }
  return {static_cast<grpc::StatusCode>(status.code()), message, details.SerializeAsString()};
}

absl::Status RpcNotBuilt(std::string_view rpc) {
  return MakeError(absl::StatusCode::kUnimplemented, reason::kNotBuilt, "",
                   absl::StrCat(absl::string_view(rpc.data(), rpc.size()), " is not built yet"));
}

}  // namespace attnd::wire
