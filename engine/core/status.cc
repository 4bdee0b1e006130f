#include "engine/core/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

constexpr char kFieldUrl[] = "attnd/field";
constexpr char kReasonUrl[] = "attnd/reason";
constexpr char kRetryUrl[] = "attnd/retry_after_ms";

std::string Payload(const absl::Status& status, const char* url) {
  auto payload = status.GetPayload(url);
  return payload.has_value() ? std::string(*payload) : std::string();
}

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

}  // namespace

absl::Status MakeError(absl::StatusCode code, std::string_view reason, std::string_view field,
                       std::string message) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(View(reason)));
  if (!field.empty()) status.SetPayload(kFieldUrl, absl::Cord(View(field)));
  return status;
}

absl::Status InvalidField(std::string_view reason, std::string_view field,
                          std::string_view problem) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, field,
                   absl::StrCat(View(field), " ", View(problem)));
}

absl::Status UnimplementedField(std::string_view reason, std::string_view field,
                                std::string_view problem) {
  return MakeError(absl::StatusCode::kUnimplemented, reason, field,
                   absl::StrCat(View(field), " ", View(problem)));
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after) {
  status.SetPayload(kRetryUrl, absl::Cord(absl::StrCat(absl::ToInt64Milliseconds(retry_after))));
  return status;
}

std::string ErrorField(const absl::Status& status) { return Payload(status, kFieldUrl); }

std::string ErrorReason(const absl::Status& status) { return Payload(status, kReasonUrl); }

std::optional<absl::Duration> ErrorRetryAfter(const absl::Status& status) {
  int64_t milliseconds = 0;
  if (!absl::SimpleAtoi(Payload(status, kRetryUrl), &milliseconds)) return std::nullopt;
  return absl::Milliseconds(milliseconds);
}

}  // namespace attnd
