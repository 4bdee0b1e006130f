// From options to request messages, and the tensors that go with them.
#pragma once

#include "absl/status/statusor.h"
#include "attnd/v1/attention.pb.h"
#include "client/cli/host_tensor.h"
#include "client/cli/options.h"
#include "client/cli/tensor_slots.h"

namespace attnd::cli {

// Requests have no sources; `tensors` are what they describe.
struct ForwardCall {
  v1::ForwardRequest request;
  CallTensors tensors;
};
struct BackwardCall {
  v1::BackwardRequest request;
  CallTensors tensors;
};

// Shapes from the files and --shape; none where there are neither. Errors are about the command
// line or a file that it names.
absl::StatusOr<v1::PlanRequest> MakePlanRequest(const RequestOptions& options);

// Every tensor from its file or, with --random, made here: then shapes that --shape and
// --bias-shape do not say come from the sizes. A paged request without page tables gets random
// ones.
absl::StatusOr<ForwardCall> MakeForwardCall(const RequestOptions& options);

// What of out, lse and d_out comes from files: the first two or neither; d_out unless --random.
absl::StatusOr<CallTensors> ReadBackwardFiles(const RequestOptions& options,
                                              v1::DataType out_dtype);

// The call for the gradients of `forward`. `results`: its out and lse, and d_out.
BackwardCall MakeBackwardCall(ForwardCall forward, CallTensors results);

// The same for a forward that the server retains.
BackwardCall MakeRetainedCall(const v1::Handle& context, const HostTensor& d_out);

}  // namespace attnd::cli
