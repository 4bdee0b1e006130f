#include "engine/core/status.h"

#include <gtest/gtest.h>

#include "absl/status/statusor.h"

namespace attnd {
namespace {

TEST(Status, CarriesFieldAndReasonBesideTheSentence) {
  const absl::Status status = InvalidField(reason::kShapeMismatch, "inputs.k", "has rank 3, not 4");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "inputs.k has rank 3, not 4");
  EXPECT_EQ(ErrorField(status), "inputs.k");
  EXPECT_EQ(ErrorReason(status), "SHAPE_MISMATCH");
  EXPECT_EQ(ErrorRetryAfter(status), std::nullopt);
}

TEST(Status, UnimplementedIsItsOwnCode) {
  const absl::Status status = UnimplementedField(reason::kNotBuilt, "spec.fp8", "is not built yet");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(), "spec.fp8 is not built yet");
  EXPECT_EQ(ErrorField(status), "spec.fp8");
}

TEST(Status, AnErrorMayBeAboutNoField) {
  const absl::Status status =
      MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "", "the server is draining");
  EXPECT_EQ(ErrorField(status), "");
  EXPECT_EQ(ErrorReason(status), "DRAINING");
  EXPECT_EQ(ErrorField(absl::OkStatus()), "");
  EXPECT_EQ(ErrorReason(absl::InternalError("made elsewhere")), "");
}

TEST(Status, RetryHintsComeBack) {
  const absl::Status full =
      MakeError(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "", "the queue is full");
  EXPECT_EQ(ErrorRetryAfter(full), std::nullopt);
  EXPECT_EQ(ErrorRetryAfter(WithRetryAfter(full, absl::Milliseconds(1500))),
            absl::Milliseconds(1500));
  EXPECT_EQ(ErrorReason(WithRetryAfter(full, absl::Seconds(1))), "QUEUE_FULL");
}

absl::StatusOr<int> Half(int value) {
  if (value % 2 != 0) return absl::InvalidArgumentError("odd");
  return value / 2;
}

absl::StatusOr<int> Quarter(int value) {
  ATTND_ASSIGN_OR_RETURN(const int half, Half(value));
  ATTND_ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

absl::Status CheckQuarter(int value) {
  ATTND_RETURN_IF_ERROR(Quarter(value).status());
  return absl::OkStatus();
}

TEST(Status, MacrosReturnTheFirstError) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(6).status().message(), "odd");
  EXPECT_TRUE(CheckQuarter(4).ok());
  EXPECT_EQ(CheckQuarter(2).message(), "odd");
}

}  // namespace
}  // namespace attnd
