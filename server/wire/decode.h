// From protos to the engine's types. Every contradiction within a message is found here or by the
// resolver; nothing that is set is passed over.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/attention.pb.h"
#include "engine/engine.h"
#include "server/wire/tensor_bytes.h"

namespace attnd::wire {

// Most elements of a tensor that travels as numbers.
inline constexpr int64_t kMaxValues = 4096;

enum class Destination { kInMessage, kValues };

struct DecodedCall {
  CallDescription description;
  std::string owner;  // The server's address, for the handles in its reply.
  Destination out = Destination::kInMessage;
  Destination lse = Destination::kInMessage;
  Destination grads = Destination::kInMessage;
  // UNIMPLEMENTED with the first field that is set and not built; OK where there is none. It counts
  // only once everything else has been found consistent.
  absl::Status unbuilt;
};

// `bytes` holds the data of the request's tensors. INVALID_ARGUMENT for unknown enum values,
// tensors without exactly one source or of the wrong size, and misplaced fields.
absl::StatusOr<DecodedCall> DecodeForward(const v1::ForwardRequest& request,
                                          const TensorBytes& bytes);

absl::StatusOr<DecodedCall> DecodeBackward(const v1::BackwardRequest& request,
                                           const TensorBytes& bytes);

// The same for a request whose tensors have no source. Placements keep their defaults.
absl::StatusOr<DecodedCall> DecodePlan(const v1::PlanRequest& request);

// Copies the tensors of a request that was decoded without error into the memory prepared for it.
// INVALID_ARGUMENT for page numbers that are no integers.
absl::Status FillInputs(const v1::ForwardRequest& request, const TensorBytes& bytes,
                        PreparedCall& prepared);
absl::Status FillInputs(const v1::BackwardRequest& request, const TensorBytes& bytes,
                        PreparedCall& prepared);

// INVALID_ARGUMENT or RESOURCE_EXHAUSTED where the outputs do not fit where they are to go.
absl::Status CheckDestinations(const DecodedCall& decoded, const AttentionProblem& problem);

}  // namespace attnd::wire
