// The resolver: the one place that knows what a layout name means.
//
// Resolve turns (spec, sequences, buffer shapes) into an AttentionProblem whose tensors are strided
// views, or into an error that names the field. It is pure: no pointers, no allocation beyond its
// result, no I/O; any thread may call it. Plan and Forward (and Backward) all go through it, so
// that what Plan accepts is what runs.
#pragma once

#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/core/attention_problem.h"
#include "engine/core/attention_spec.h"

namespace attnd {

// Limits of one request; past them Resolve answers UNIMPLEMENTED. They bound what a few bytes of
// message can make the server hold.
inline constexpr int64_t kMaxBatch = 1 << 20;
inline constexpr int64_t kMaxHeads = 1 << 20;
inline constexpr int64_t kMaxHeadDim = 1 << 16;
inline constexpr int64_t kMaxPageSize = 1 << 30;

struct ResolveOptions {
  // kUnspecified: the spec's dtype.
  DType out_dtype = DType::kUnspecified;
  // Where no buffer at all is given, take the shapes from the spec's sizes (Plan without inputs).
  bool derive_missing_shapes = false;
};

// Errors are INVALID_ARGUMENT with the field's full path: a contradiction between any two of the
// arguments, an unset required field, a misplaced one, or a product past 2^63. What is valid and
// within the limits is returned whether or not some backend computes it.
absl::StatusOr<AttentionProblem> Resolve(const AttentionSpec& spec, const Sequences& sequences,
                                         const InputDescs& inputs,
                                         const ResolveOptions& options = {});

// Checks the entries that a paged problem reads: page_table [b, pages_per_sequence], row-major.
// `field` names the table in errors. INVALID_ARGUMENT for an entry outside 0 .. num_pages - 1.
absl::Status CheckPageTable(const AttentionProblem& problem, std::span<const int32_t> page_table,
                            int64_t num_pages, std::string_view field);

// Checks the values of a learnable sink: softmax_offset [h], natural logarithm; empty where there
// is none. INVALID_ARGUMENT for NaN and +inf; -inf is no sink.
absl::Status CheckSoftmaxOffset(std::span<const float> softmax_offset);

// The buffers that `layout` names with the meaning of their axes, e.g. "qkv [b, s, 3, h, d]"; for
// messages and for GetCapabilities' readers.
std::string_view LayoutShapes(Layout layout);

}  // namespace attnd
