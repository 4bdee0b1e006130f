#include "engine/core/dropout_mask.h"

#include <cmath>

namespace attnd {
namespace {

using Counter = std::array<uint32_t, 4>;
using Key = std::array<uint32_t, 2>;

uint32_t Low(uint64_t x) { return static_cast<uint32_t>(x); }
uint32_t High(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

Key KeyOf(uint64_t x) { return {Low(x), High(x)}; }

}  // namespace

std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  Counter c = counter;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    c = {High(b) ^ c[1] ^ key[0], Low(b), High(a) ^ c[3] ^ key[1], Low(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

// The seed, the offset and the place of the sequence and head are mixed into one key first; a
// counter has no room for all of them.
DropoutMask::DropoutMask(const Dropout& dropout, int64_t sequence, int64_t head)
    : threshold_(static_cast<uint64_t>(std::llround(dropout.probability * 0x1p32))) {
  const auto offset = static_cast<uint64_t>(dropout.offset);
  const Counter first =
      Philox({Low(offset), High(offset), 0, 0}, KeyOf(static_cast<uint64_t>(dropout.seed)));
  const auto n = static_cast<uint64_t>(head), i = static_cast<uint64_t>(sequence);
  const Counter second = Philox({Low(i), Low(n), first[2], first[3]}, {first[0], first[1]});
  key_ = {second[0], second[1]};
}

std::array<bool, 4> DropoutMask::KeepsFour(int64_t i, int64_t four) const {
  const auto row = static_cast<uint64_t>(i), column = static_cast<uint64_t>(four);
  const Counter random = Philox({Low(column), High(column), Low(row), High(row)}, key_);
  std::array<bool, 4> keeps;
  for (size_t n = 0; n < 4; ++n) keeps[n] = random[n] >= threshold_;
  return keeps;
}

}  // namespace attnd
