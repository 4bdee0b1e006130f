// What this program borrows from the engine: the resolver, for the shapes of random tensors, and
// the reference loop, for --check. local_check.cc is the only file of client/ that sees engine/.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "attnd/v1/attention.pb.h"
#include "client/cli/host_tensor.h"
#include "client/cli/tensor_slots.h"

namespace attnd::cli {

// Element `index` of FLOAT32, FLOAT16 or BFLOAT16 elements; stores round to nearest even.
float LoadFloat(v1::DataType dtype, const void* base, int64_t index);
void StoreFloat(v1::DataType dtype, void* base, int64_t index, float value);

struct ShapeOf {
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
};

struct ResolvedShapes {
  std::map<int, ShapeOf> inputs;  // By field number in v1::QkvBuffers.
  int64_t num_pages_k = 0;
  int64_t num_pages_v = 0;
  int64_t batch = 0;
  int64_t num_heads = 0;
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_kv = 0;
};

// The buffers of the request: its own shapes, or where it names none those that its sizes imply.
// Bias and softmax offset are not looked at.
// INVALID_ARGUMENT with field and reason in the sentence where the request contradicts itself.
absl::StatusOr<ResolvedShapes> ResolveShapes(const v1::ForwardRequest& request);

struct CheckResult {
  double out_error = 0;  // Relative RMS of O.
  double out_bound = 0;
  std::optional<double> lse_error;  // Largest absolute one; infinite where -inf is not met by -inf.
  double lse_bound = 0;
  bool passed = false;
};

// Computes the request by the reference loop on this machine and compares. `tensors` are those that
// the request describes. Bounds of O: 1e-6 sqrt(d) for FLOAT32, 2e-3 for FLOAT16, 1.5e-2 for
// BFLOAT16, 4e-2 for FLOAT8_E4M3 and 8e-2 for FLOAT8_E5M2 (without O in FLOAT32). Of the LSE the
// same, 2e-3 for FP8, times its largest magnitude where that is above 1.
absl::StatusOr<CheckResult> CheckForward(const v1::ForwardRequest& request,
                                         const CallTensors& tensors,
                                         const v1::ForwardResponse& response);

struct GradientError {
  int slot = 0;      // Of what it is the gradient of.
  double error = 0;  // RMS of the difference over the gradient's own, or over 0.1 if that is more.
};

struct GradientCheck {
  std::vector<GradientError> gradients;
  double bound = 0;  // Of every error.
  bool passed = false;
};

// The same for gradients. Bounds: 3e-5 for FLOAT32, 8e-3 for FLOAT16, 3e-2 for BFLOAT16,
// 8e-2 for FLOAT8_E4M3 and 1.6e-1 for FLOAT8_E5M2.
absl::StatusOr<GradientCheck> CheckBackward(const v1::BackwardRequest& request,
                                            const CallTensors& tensors,
                                            const v1::BackwardResponse& response);

}  // namespace attnd::cli
