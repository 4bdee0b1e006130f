// What backward knows of each row before it starts: where its softmax lies, and dO . O.
//
// Forward's LSE is float32: its own rounding is a relative error of P, which is small where |LSE|
// is, and as large as P where all logits are near the type's lowest number. So rows of a large
// |LSE| get their maximum, the logarithm of the sum above it, and D anew from the inputs; and rows
// whose logits float32 does not hold get them in double, as forward's answer for them came from
// double.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/cpu/backward_plan.h"
#include "engine/cpu/tile_backward.h"

namespace attnd {

// Up to here float32's LSE leaves P within 4e-6; measured on unit-variance inputs, float32 and
// bfloat16, with logits shifted by up to 1e6.
inline constexpr float kLargestLse = 64;

// Rows first_row .. first_row + num_rows - 1 of a sequence, those of them that there are.
struct RowBlock {
  int64_t sequence = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

// Writes context.rows for all heads, from LSE, O and dO. False: NormalizeRows has to complete some.
bool StartRows(const BackwardContext& context, const RowBlock& rows,
               const GradientScratch& scratch);

// Completes the tile's rows that StartRows left. INVALID_ARGUMENT where their LSE is not
// that of Q and K, CANCELLED where the call was cancelled.
absl::Status NormalizeRows(const BackwardContext& context, const Tile& tile,
                           const GradientScratch& scratch);

// INVALID_ARGUMENT (lse) where the row's LSE is not that of Q and K, computed in double, so that no
// rounding is taken for an error of the caller's.
absl::Status CheckLse(const BackwardContext& context, const SequenceHead& at, int64_t row);

// CANCELLED where the call was cancelled.
absl::Status CheckNotCancelled(const BackwardContext& context);

}  // namespace attnd
