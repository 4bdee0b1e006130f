#include "engine/cuda/tiled_dropout.h"

#include "engine/core/dropout_mask.h"

namespace attnd::tiled {
namespace {

uint32_t Low(int64_t x) { return static_cast<uint32_t>(x); }
uint32_t High(int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); }

}  // namespace

DropoutCall DropoutCallOf(const Dropout& dropout) {
  const RandomWords start = PhiloxWords({{Low(dropout.offset), High(dropout.offset), 0, 0}},
                                        {Low(dropout.seed), High(dropout.seed)});
  return {start, DropoutMask(dropout, 0, 0).threshold(), static_cast<float>(KeepScale(dropout)),
          dropout.probability != 0};
}

}  // namespace attnd::tiled
