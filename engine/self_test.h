// A small forward and backward call of each dtype and kernel family against the reference loop,
// when the server starts: libraries have shipped kernels that were wrong on some machine.
#pragma once

#include <string>
#include <vector>

#include "engine/engine.h"

namespace attnd {

// Takes a second, or a few where plans are to be compiled. A family that answers wrong or fails is
// disabled for its dtype and pass. Returns a sentence for each; empty: all is well.
std::vector<std::string> RunSelfTest(Engine& engine);

}  // namespace attnd
