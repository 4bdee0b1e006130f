// One row of the attention matrix in double: what the reference loop of each pass starts from.
// Private to them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/core/attention_problem.h"

namespace attnd {

// What both passes read, as ForwardBuffers has it.
struct ReferenceInputs {
  std::array<const std::byte*, kNumInputBuffers> buffers{};
  const std::byte* bias = nullptr;
  const float* softmax_offset = nullptr;
  const int32_t* page_table_k = nullptr;
  const int32_t* page_table_v = nullptr;
};

// A cell of the row: query and key j.
struct ReferenceCell {
  int64_t j = 0;
  double logit = 0;
  double cap_slope = 1;    // Derivative of the soft cap where the logit lies on it.
  double weight = 0;       // Of the softmax, before dropout.
  double keep_factor = 1;  // What dropout multiplies the weight with.
};

class ReferenceRow {
 public:
  ReferenceRow(const AttentionProblem& problem, const ReferenceInputs& inputs)
      : p_(problem), in_(inputs), q_(static_cast<size_t>(problem.head_dim_qk)) {}

  // Query row `row` of head n of sequence i.
  void Compute(int64_t i, int64_t n, int64_t row);

  // The same without the softmax, for some of the row's keys: cells() have no weight.
  void ComputeLogits(int64_t i, int64_t n, int64_t row, const KeyRange& keys);

  // One for each key that neither the mask nor a bias of -inf hides; none where all logits are -inf
  // as well.
  const std::vector<ReferenceCell>& cells() const { return cells_; }
  const std::vector<double>& q() const { return q_; }  // Undefined without cells.
  // Natural logarithm of the softmax's denominator: of the sink alone without cells, or -inf.
  double lse() const { return lse_; }
  // The largest logit, the sink's among them, and the sum of exp(logit - maximum): at large logits
  // the LSE loses the latter. Undefined without cells.
  double maximum() const { return maximum_; }
  double sum() const { return sum_; }
  // What the sink takes of the softmax, where there is one.
  double sink_weight() const { return sink_weight_; }

  // Elements, from the view's byte offset, where a row starts: of Q or O, of K, of V.
  int64_t QueryElement(const TensorView& view, int64_t i, int64_t n, int64_t row) const;
  int64_t KeyElement(int64_t i, int64_t n, int64_t j) const;
  int64_t ValueElement(int64_t i, int64_t n, int64_t j) const;
  // Of a dense bias: the cell's element.
  int64_t BiasElement(int64_t i, int64_t n, int64_t row, int64_t j) const;

  // Real values.
  double LoadQ(int64_t element) const { return Load(p_.q, element) * p_.fp8.descale_q; }
  double LoadK(int64_t element) const { return Load(p_.k, element) * p_.fp8.descale_k; }
  double LoadV(int64_t element) const { return Load(p_.v, element) * p_.fp8.descale_v; }

 private:
  double Load(const TensorView& view, int64_t element) const {
    const std::byte* base = in_.buffers[static_cast<size_t>(view.buffer)] + view.byte_offset;
    return LoadElement(p_.dtype, base, element);
  }
  double BiasOf(int64_t i, int64_t n, int64_t row, int64_t j) const;  // 0: none.
  bool IsHidden(int64_t i, int64_t n, int64_t row, int64_t j) const;
  void ComputeLogit(int64_t i, int64_t n, int64_t row, ReferenceCell& cell) const;
  void Normalize(int64_t n);
  double Sink(int64_t n) const;
  int64_t RowElement(const TensorView& view, const int32_t* pages, int64_t i, int64_t n,
                     int64_t j) const;

  const AttentionProblem& p_;
  const ReferenceInputs in_;
  std::vector<double> q_;
  std::vector<ReferenceCell> cells_;
  double lse_ = 0;
  double maximum_ = 0;
  double sum_ = 0;
  double sink_weight_ = 0;
};

}  // namespace attnd
