// From options to request messages, and the tensors that go with them.
#pragma once

#include <map>

#include "absl/status/statusor.h"
#include "attnd/v1/attention.pb.h"
#include "client/cli/host_tensor.h"
#include "client/cli/options.h"

namespace attnd::cli {

// Tensors by their field number in v1::QkvBuffers.
using InputTensors = std::map<int, HostTensor>;

struct ForwardCall {
  v1::ForwardRequest request;  // Its inputs have no sources.
  InputTensors inputs;
};

// Shapes from the files and --shape; none where there are neither. Errors are about the command
// line or a file that it names.
absl::StatusOr<v1::PlanRequest> MakePlanRequest(const RequestOptions& options);

// Every input from its file or, with --random, made here: then shapes that --shape does not say
// come from the sizes. A paged request without page tables gets random ones.
absl::StatusOr<ForwardCall> MakeForwardCall(const RequestOptions& options);

}  // namespace attnd::cli
