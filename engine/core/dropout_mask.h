// Which cells of the attention matrix dropout keeps: a function of (seed, offset) and of the cell's
// place in its sequence, and of nothing else, so that both passes, every layout and every split of
// the work agree.
//
// The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
#pragma once

#include <array>
#include <cstdint>

#include "engine/core/attention_spec.h"

namespace attnd {

// One call of the generator: four numbers for a counter under a key.
std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// One sequence and head.
class DropoutMask {
 public:
  DropoutMask(const Dropout& dropout, int64_t sequence, int64_t head);

  // Whether query row i keeps key j. Keys 4n .. 4n + 3 come from one call of the generator.
  bool Keeps(int64_t i, int64_t j) const { return KeepsFour(i, j / 4)[static_cast<size_t>(j % 4)]; }
  std::array<bool, 4> KeepsFour(int64_t i, int64_t four) const;

  // For loops over many rows: key j is kept where number j % 4 of Philox({j / 4, row}, key()), each
  // of both as its low and high half, is threshold() or more.
  const std::array<uint32_t, 2>& key() const { return key_; }
  uint64_t threshold() const { return threshold_; }

 private:
  std::array<uint32_t, 2> key_;
  uint64_t threshold_;  // Of 2^32 numbers, how many drop.
};

// What kept cells are multiplied with.
inline double KeepScale(const Dropout& dropout) { return 1 / (1 - dropout.probability); }

}  // namespace attnd
