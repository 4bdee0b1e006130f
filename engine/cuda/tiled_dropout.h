// engine/core/dropout_mask.h for the device: the same bits, from functions that both sides share.
// Needs no CUDA header.
#pragma once

#include <cstdint>

#include "engine/core/attention_spec.h"
#include "engine/cuda/tiled_tasks.h"

namespace attnd::tiled {

struct RandomWords {
  uint32_t word[4];
};

struct DropoutKey {
  uint32_t low;
  uint32_t high;
};

// What the masks of one call have in common.
struct DropoutCall {
  RandomWords start;       // Of the seed and the offset.
  uint64_t threshold = 0;  // Of 2^32 numbers, how many drop.
  float keep_factor = 1;
  bool on = false;
};

DropoutCall DropoutCallOf(const Dropout& dropout);

// Philox4x32-10.
ATTND_HD inline RandomWords PhiloxWords(RandomWords c, DropoutKey key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * c.word[2];
    c = {{static_cast<uint32_t>(b >> 32) ^ c.word[1] ^ key.low, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.word[3] ^ key.high, static_cast<uint32_t>(a)}};
    key.low += 0x9E3779B9;
    key.high += 0xBB67AE85;
  }
  return c;
}

ATTND_HD inline DropoutKey DropoutKeyOf(const DropoutCall& call, int64_t sequence, int64_t head) {
  const uint32_t* start = call.start.word;
  const RandomWords words = PhiloxWords(
      {{static_cast<uint32_t>(sequence), static_cast<uint32_t>(head), start[2], start[3]}},
      {start[0], start[1]});
  return {words.word[0], words.word[1]};
}

// Bit n: query row `row` keeps key 4 * four + n.
ATTND_HD inline uint32_t KeepsFour(const DropoutCall& call, DropoutKey key, int64_t row,
                                   int64_t four) {
  const auto r = static_cast<uint64_t>(row), f = static_cast<uint64_t>(four);
  const RandomWords words =
      PhiloxWords({{static_cast<uint32_t>(f), static_cast<uint32_t>(f >> 32),
                    static_cast<uint32_t>(r), static_cast<uint32_t>(r >> 32)}},
                  key);
  uint32_t keeps = 0;
  // Not a shifted condition: g++ 12.2 gets that wrong under UBSan.
  for (int n = 0; n < 4; ++n) {
    if (words.word[n] >= call.threshold) keeps |= 1u << n;
  }
  return keeps;
}

}  // namespace attnd::tiled
