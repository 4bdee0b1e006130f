// The tasks of backward: each writes gradients that no other task does.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/cpu/backward_plan.h"
#include "engine/cpu/tile_backward.h"

namespace attnd {

// Rows first_row .. first_row + num_rows - 1 of a sequence, those of them that there are: writes
// context.d for all heads. INVALID_ARGUMENT where an LSE of -inf is not theirs.
struct RowBlock {
  int64_t sequence = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};
absl::Status ComputeRowSums(const BackwardContext& context, const RowBlock& rows,
                            const GradientScratch& scratch);

// The tasks below read context.d. They are CANCELLED where the call was cancelled.

// dK and dV of the block.
absl::Status ComputeKeyGradients(const BackwardContext& context, const KeyBlock& block,
                                 const GradientScratch& scratch);

// dQ of the tile. INVALID_ARGUMENT where LSE is not that of Q and K.
absl::Status ComputeQueryGradients(const BackwardContext& context, const Tile& tile,
                                   const GradientScratch& scratch);

// dBias of the block.
absl::Status ComputeBiasGradients(const BackwardContext& context, const BiasBlock& block,
                                  const GradientScratch& scratch);

// dSoftmaxOffset of head n.
void ComputeSinkGradient(const BackwardContext& context, int64_t n);

}  // namespace attnd
