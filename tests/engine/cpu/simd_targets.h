// Runs a check on every instruction set that this machine has, from the best one down.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "hwy/targets.h"

namespace attnd::testing {

template <typename Check>
void ForEachTarget(const Check& check) {
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t rest = supported; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;  // A better target has a lower bit.
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(supported & ~(target - 1));
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace attnd::testing
