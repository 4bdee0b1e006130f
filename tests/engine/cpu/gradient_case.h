// Attention problems with every parameter, both passes, on poisoned memory: an AttentionCase with
// bias, sink, dropout and dO.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/backend/attention_backend.h"
#include "tests/engine/cpu/attention_case.h"

namespace attnd::testing {

struct GradientOptions {
  CaseOptions shape;
  BiasKind bias_kind = BiasKind::kNone;
  bool bias_per_sequence = false, bias_per_head = false, bias_per_row = true;
  SoftmaxKind softmax_kind = SoftmaxKind::kVanilla;
  Dropout dropout;
};

// Widened, in the order of the buffers.
struct Gradients {
  std::array<std::vector<float>, kNumInputBuffers> inputs;
  std::vector<float> bias, softmax_offset;

  bool operator==(const Gradients&) const = default;
};

class GradientCase {
 public:
  // Inputs, bias, softmax offset and dO are random with unit variance; rows of no sequence are NaN.
  // The bias' own cells are all numbers.
  explicit GradientCase(const GradientOptions& options);

  AttentionCase& inputs() { return case_; }
  AttentionProblem& problem() { return case_.problem(); }
  const AttentionProblem& problem() const { return case_.problem(); }
  // In the order of their buffers; rounded to the problem's dtype when a pass runs.
  std::vector<float>& bias() { return bias_; }
  std::vector<float>& softmax_offset() { return softmax_offset_; }
  std::vector<float>& d_out() { return d_out_; }

  // Both run a plan of `backend` with poisoned outputs (0xFF) and workspace, and fail the test
  // where a status is not OK.
  Output Forward(AttentionBackend& backend) const;
  // Given O and LSE of the reference loop, NaN in rows of no sequence.
  Gradients Backward(AttentionBackend& backend) const;

  // dQ, dK or dV at (sequence, row, head, component) of its view.
  float GradientAt(const Gradients& gradients, const TensorView& view,
                   const std::array<int64_t, 4>& at) const;

  // sum over the rows of the sequences of dO * O: what the gradients are gradients of.
  double Loss(AttentionBackend& backend) const;

 private:
  // Calls visit(sequence, row, head) for the rows of the sequences.
  void ForEachRow(const std::function<void(int64_t, int64_t, int64_t)>& visit) const;
  // What a caller sends back: NaN where nothing is his.
  Output ForwardAsReturned() const;

  AttentionCase case_;
  std::vector<float> bias_, softmax_offset_, d_out_;
};

}  // namespace attnd::testing
