// Small valid requests, and a table form for what the resolver must refuse.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/core/attention_problem.h"
#include "engine/core/attention_spec.h"
#include "engine/core/layout.h"
#include "tests/conformance/pack.h"

namespace attnd::testing {

struct Request {
  AttentionSpec spec;
  Sequences sequences;
  InputDescs inputs;
  ResolveOptions options;

  std::vector<int64_t>& Shape(Buffer buffer) {
    return inputs.buffers[static_cast<int>(buffer)]->shape;
  }
  std::optional<TensorDesc>& Input(Buffer buffer) {
    return inputs.buffers[static_cast<int>(buffer)];
  }
  RequestedView& View(int which) { return spec.views->at(which); }

  absl::StatusOr<AttentionProblem> Resolve() const {
    return attnd::Resolve(spec, sequences, inputs, options);
  }
};

// b = 2, h = 6, g = 3, d_qk = 8, d_v = 10, s_q = 4, s_kv = 5; lengths 3, 4 and 5, 2. A layout that
// packs K and V has d_v = 8, one that packs Q too g = 6 and the lengths of Q on both sides.
Geometry SmallGeometry(const Arrangement& arrangement);

// A FLOAT16 request of these sizes that resolves. Its spec has no sizes unless the layout is
// STRIDED.
Request SmallRequest(const Arrangement& arrangement);
Request SmallRequest(Layout layout);
Request SmallRequest(std::string_view arrangement_name);

// A valid request, made invalid, and the field that is at fault.
struct BadRequest {
  const char* name;
  std::string_view arrangement;
  std::function<void(Request&)> spoil;
  const char* field;
};
inline void PrintTo(const BadRequest& bad, std::ostream* out) { *out << bad.name; }

// Expects INVALID_ARGUMENT about the field, with a sentence that names it, and success unspoilt.
void ExpectRefused(const BadRequest& bad);

}  // namespace attnd::testing
