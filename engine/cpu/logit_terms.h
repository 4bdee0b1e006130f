// What is added to logits and what drops probabilities, over a panel's block of them. Matrices are
// [keys, kPanelRows] (panel_product.h), one row for each of `keys` consecutive keys.
#pragma once

#include <array>
#include <cstdint>

#include "engine/cpu/panel_product.h"

namespace attnd {

// One group of kLaneGroup lanes; pointers point at its first lane.
struct LogitTerms {
  int64_t keys = 0;
  const float* terms = nullptr;
  float* logits = nullptr;
  bool before_scale = false;
  float scale = 1;
  float softcap = 0;  // 0: none.
};

// logits = cap(scale * (logits + terms)), or cap(scale * logits) + terms. A term of -inf hides its
// cell: the logit is -inf, whatever it was.
void AddTerms(const LogitTerms& terms);

// logits[j, lane] *= factors[j, lane] over one group of lanes.
void ScaleLogits(int64_t keys, const float* factors, float* logits);

// Lanes that count from a point of their own.
struct AlibiLanes {
  std::array<float, kPanelRows> slope{};
  std::array<float, kPanelRows> distance{};  // Of the first key from the lane's diagonal.
};

// terms[j, lane] = -slope * |distance + j|
void FillAlibi(const AlibiLanes& lanes, int64_t keys, float* terms);

// The generator of engine/core/dropout_mask.h, lane by lane.
struct DropoutLanes {
  std::array<uint32_t, kPanelRows> key0{}, key1{};
  std::array<uint32_t, kPanelRows> row_low{}, row_high{};
  uint64_t threshold = 0;
  float keep_factor = 1;
};

// factors[j, lane] = keep_factor where the lane's row keeps key first_key + j, else 0.
void FillKeepFactors(const DropoutLanes& lanes, int64_t first_key, int64_t keys, float* factors);

}  // namespace attnd
