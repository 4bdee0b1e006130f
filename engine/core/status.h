// Errors of the engine: absl::Status with the field at fault and a stable reason.
//
// Whatever a peer can cause is a Status made here. The message is a sentence that already names the
// field by its full path (`spec.head_dim_v`); the same path and the reason travel beside it as
// payloads, so that the server can send them as google.rpc details without reading the sentence.
#pragma once

#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace attnd {

// Stable machine-readable reasons (google.rpc.ErrorInfo.reason).
namespace reason {
inline constexpr std::string_view kInvalidField = "INVALID_FIELD";
inline constexpr std::string_view kMissingField = "MISSING_FIELD";
inline constexpr std::string_view kMisplacedField = "MISPLACED_FIELD";
inline constexpr std::string_view kUnknownEnumValue = "UNKNOWN_ENUM_VALUE";
inline constexpr std::string_view kShapeMismatch = "SHAPE_MISMATCH";
inline constexpr std::string_view kSizeMismatch = "SIZE_MISMATCH";
inline constexpr std::string_view kOverflow = "OVERFLOW";
inline constexpr std::string_view kOutOfBuffer = "OUT_OF_BUFFER";
inline constexpr std::string_view kMalformedMessage = "MALFORMED_MESSAGE";
inline constexpr std::string_view kNotBuilt = "NOT_BUILT";
inline constexpr std::string_view kNotSupported = "NOT_SUPPORTED";
inline constexpr std::string_view kPoolExhausted = "POOL_EXHAUSTED";
inline constexpr std::string_view kQueueFull = "QUEUE_FULL";
inline constexpr std::string_view kMessageTooLarge = "MESSAGE_TOO_LARGE";
inline constexpr std::string_view kDeadlinePassed = "DEADLINE_PASSED";
inline constexpr std::string_view kCancelled = "CANCELLED";
inline constexpr std::string_view kDraining = "DRAINING";
inline constexpr std::string_view kExpired = "EXPIRED";
inline constexpr std::string_view kNoSuchHandle = "NO_SUCH_HANDLE";
inline constexpr std::string_view kInternal = "INTERNAL";
}  // namespace reason

// A status of `code` about `field`. `message` must name the field itself: callers write sentences.
// `field` is empty where no single field is at fault.
absl::Status MakeError(absl::StatusCode code, std::string_view reason, std::string_view field,
                       std::string message);

// INVALID_ARGUMENT: "`field` problem". The sentence is the field followed by `problem`.
absl::Status InvalidField(std::string_view reason, std::string_view field,
                          std::string_view problem);

// UNIMPLEMENTED: "`field` problem", for what is valid but not built or not supported.
absl::Status UnimplementedField(std::string_view reason, std::string_view field,
                                std::string_view problem);

// RESOURCE_EXHAUSTED or UNAVAILABLE with a hint when a retry may help.
absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after);

// What `function` returns (a Status or a StatusOr); RESOURCE_EXHAUSTED where the process finds no
// memory for it.
template <typename Function>
auto CatchBadAlloc(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kPoolExhausted, "",
                     "the server has no memory for this request");
  }
}

// What the payloads say; empty or nullopt where there are none.
std::string ErrorField(const absl::Status& status);
std::string ErrorReason(const absl::Status& status);
std::optional<absl::Duration> ErrorRetryAfter(const absl::Status& status);

}  // namespace attnd

// Evaluates an absl::Status expression and returns it from the enclosing function if not OK.
#define ATTND_RETURN_IF_ERROR(expr)                                                     \
  do {                                                                                  \
    if (absl::Status attnd_status_ = (expr); !attnd_status_.ok()) return attnd_status_; \
  } while (false)

#define ATTND_CONCAT_INNER_(a, b) a##b
#define ATTND_CONCAT_(a, b) ATTND_CONCAT_INNER_(a, b)

// ATTND_ASSIGN_OR_RETURN(auto x, ExpressionOfStatusOr()); returns the status if not OK.
#define ATTND_ASSIGN_OR_RETURN(lhs, expr) \
  ATTND_ASSIGN_OR_RETURN_IMPL_(ATTND_CONCAT_(attnd_status_or_, __LINE__), lhs, expr)
#define ATTND_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                                 \
  if (!tmp.ok()) return tmp.status();                \
  lhs = *std::move(tmp)
