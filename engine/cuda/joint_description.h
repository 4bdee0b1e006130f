// The graph that serves small calls of one spec together, whatever their layouts, batches and
// lengths: a ragged one, whose sequences lie anywhere in the device's arena.
//
// Pure: needs no CUDA header and no device.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"
#include "engine/cuda/sdpa_description.h"

namespace attnd {

// Two calls may share a graph where this is equal. It says as little of a call's lengths as it can:
// its batch is the slots of the graph. UNIMPLEMENTED for what cuDNN does not run ragged (biases,
// sinks, FP8, pages, ...) and for calls that fill a GPU alone.
absl::StatusOr<SdpaDescription> DescribeJoint(const AttentionProblem& problem, bool is_backward);

// Of a call with that description. The scale is in the key, since one launch has one.
JoinTerms TermsOf(const AttentionProblem& problem, const SdpaDescription& description);

}  // namespace attnd
