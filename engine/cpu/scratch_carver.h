// Pieces of a workspace.
#pragma once

#include <cstdint>

#include "engine/core/attention_problem.h"
#include "engine/cpu/tile_plan.h"

namespace attnd {

// Hands out pieces of memory at multiples of 64 bytes, or only counts them where there is none.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}

  float* Floats(int64_t count) {
    float* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    return piece;
  }
  int64_t* Integers(int64_t count) { return reinterpret_cast<int64_t*>(Floats(2 * count)); }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignFloats = 16;

  float* base_;
  int64_t used_ = 0;
};

TermScratch CarveTerms(Carver& carver, const AttentionProblem& problem);

}  // namespace attnd
