// What the command line says of the computation, as an AttentionSpec.
#pragma once

#include <google/protobuf/repeated_field.h>

#include <string>

#include "absl/status/status.h"
#include "attnd/v1/types.pb.h"
#include "client/cli/options.h"

namespace attnd::cli {

// INVALID_ARGUMENT: "--option problem".
absl::Status Usage(const std::string& option, const std::string& problem);

// Appends the numbers of "0,3,7".
absl::Status ParseList(const std::string& option, const std::string& text,
                       google::protobuf::RepeatedField<int64_t>* values);

// Sets all fields but dtype. Errors name the option.
absl::Status SetSpec(const RequestOptions& options, v1::AttentionSpec* spec);

}  // namespace attnd::cli
