// The tasks of backward: each writes gradients that no other task does.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/cpu/backward_plan.h"
#include "engine/cpu/tile_backward.h"

namespace attnd {

// All read context.rows (row_statistics.h), are CANCELLED where the call was cancelled.

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
