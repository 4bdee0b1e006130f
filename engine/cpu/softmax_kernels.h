// One step of online softmax over a block of logits, vectorised with Highway.
#pragma once

#include <cstdint>

#include "engine/core/attention_problem.h"

namespace attnd {

// `rows` query rows against `keys` consecutive keys of one sequence. All matrices are row-major.
struct SoftmaxBlock {
  int64_t rows = 0;
  int64_t keys = 0;
  int64_t first_key = 0;              // Column 0's key.
  const KeyRange* visible = nullptr;  // [rows], in keys of the sequence.
  float scale = 1;
  float softcap = 0;  // 0: none.

  float* logits =
      nullptr;  // [rows, keys], rows `ld` apart: q . k going in, probabilities coming out.
  int64_t ld = 0;
  // State of each row over the keys so far: maximum (-inf at first), sum of exp(s - m) (0 at
  // first), and the unnormalised output [rows, d_v], contiguous (0 at first).
  float* m = nullptr;
  float* l = nullptr;
  float* acc = nullptr;
  int64_t d_v = 0;
};

// s = cap(scale * logit); m' = max(m, s over the visible columns); logits = exp(s - m') where
// visible, else 0; l = l * exp(m - m') + their sum; acc *= exp(m - m'). Adding logits * V to acc is
// the caller's. Rows whose m' is -inf get zeros and stay as they are. A visible NaN makes l NaN.
// At least one vector of floats past the end of `logits` must be addressable.
void OnlineSoftmax(const SoftmaxBlock& block);

}  // namespace attnd
