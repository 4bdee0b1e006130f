// One step of online softmax over a panel's logits, vectorised with Highway.
#pragma once

#include <cstdint>

#include "engine/core/attention_problem.h"

namespace attnd {

// One group of kLaneGroup query rows of a panel (panel_product.h) against `keys` consecutive keys.
// Pointers to matrices point at the group's first lane; their rows are kPanelRows apart.
struct SoftmaxBlock {
  int64_t keys = 0;
  float* logits = nullptr;  // [keys, lanes]: q . k going in, probabilities coming out.
  float scale = 1;
  float softcap = 0;  // 0: none.
  // Rows of logits that every lane sees. Of the others each lane sees what `visible` says: [lanes],
  // in keys of the sequence, of which first_key is row 0. Not read where all lanes see all keys.
  KeyRange seen_by_all;
  const KeyRange* visible = nullptr;
  int64_t first_key = 0;

  // State of each lane over the keys so far: maximum (-inf at first), sum of exp(s - m) (0 at
  // first), and the unnormalised output [d_v, lanes] (0 at first).
  float* m = nullptr;
  float* l = nullptr;
  float* acc = nullptr;
  int64_t d_v = 0;
};

// s = cap(scale * logit); m' = max(m, s over the visible keys); logits = exp(s - m') where visible,
// else 0; l = l * exp(m - m') + their sum; acc *= exp(m - m'). Adding V * logits to acc is the
// caller's. Lanes whose m' is -inf get zeros and stay as they are. A visible NaN makes m and l NaN.
void OnlineSoftmax(const SoftmaxBlock& block);

// lse[r] = m[r] + log(l[r]) for r < n; -inf where m[r] is. l[r] >= 1 or NaN elsewhere.
void LogSumExp(const float* m, const float* l, int64_t n, float* lse);

}  // namespace attnd
