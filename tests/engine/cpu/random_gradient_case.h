// Random problems with every parameter, the same for the same seed.
#pragma once

#include <cstdint>
#include <string>

#include "tests/engine/cpu/gradient_case.h"

namespace attnd::testing {

GradientOptions RandomGradientOptions(uint64_t seed, bool paged);

std::string Describe(const GradientOptions& options);

// NaN in every cell of the bias that no pair of a query and a key it sees needs.
void PoisonUnusedBias(GradientCase& test);

}  // namespace attnd::testing
