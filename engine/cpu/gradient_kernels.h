// The softmax of backward over a panel's block of logits, vectorised with Highway.
#pragma once

#include <cstdint>

namespace attnd {

// kPanelRows query rows (panel_product.h) against `keys` consecutive keys. Matrices are [keys,
// kPanelRows], vectors [kPanelRows].
struct GradientBlock {
  int64_t keys = 0;
  float* logits = nullptr;       // q . k going in; P times keep coming out.
  float* d_logits = nullptr;     // dO . v going in; the gradient of the logits coming out.
  const float* terms = nullptr;  // Null: none. A cell of -inf is not visible.
  bool terms_before_scale = false;
  const float* keep = nullptr;  // What dropout multiplies P with; null: nothing is dropped.
  float scale = 1;
  float softcap = 0;  // 0: none.
  bool through_cap =
      false;  // The gradient is that of what the cap is put on, not of what it gives.
  // Rows that each lane sees are those from `first` on before `last`.
  const float* first = nullptr;
  const float* last = nullptr;
  // SoftmaxGradient:
  const float* shift = nullptr;
  const float* inverse_sum = nullptr;
  const float* d = nullptr;
  float* sum = nullptr;
  // AddSoftmaxStatistics:
  float* m = nullptr;
  float* l = nullptr;
  float* weighted = nullptr;
};

// P = exp(logit - shift) * inverse_sum where visible, else 0; d_logit = P * (keep * dP - d), times
// the slope of the cap; sum += P. What is not visible, or dropped, does not count whatever it
// holds.
void SoftmaxGradient(const GradientBlock& block);

// Adds the block to each lane's maximum m of visible logits (-inf at first), l = sum of
// exp(logit - m) and weighted = sum of exp(logit - m) * keep * dP (both 0 at first). Writes logits.
void AddSoftmaxStatistics(const GradientBlock& block);

// to += from
void AddFloats(const float* from, int64_t n, float* to);

// Summed as Multiply (panel_product.h) does, to the same bits: where a row sees one key, O is its
// value, and dO . O less dO . v is 0.
float Dot(const float* a, const float* b, int64_t n);

}  // namespace attnd
