// Faults that public projects for fused attention have shipped, each as a test of the backends
// here. A test's name begins with a letter and a number: of layouts (A), ragged sequences (B),
// masks (C), gradients and numbers (D), sinks, statistics and plans (E).
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/logical_case.h"

namespace attnd::testing {

inline std::unique_ptr<AttentionBackend> MakeBackend(const std::string& name) {
  if (name == "cpu") return std::make_unique<CpuBackend>(2);
  return std::make_unique<ReferenceBackend>();
}

// Of float32 sums in another order.
inline constexpr double kClose = 2e-5;

// Runs on CpuBackend and on the reference loop.
class KnownFaults : public ::testing::TestWithParam<std::string> {
 protected:
  KnownFaults() : backend_(MakeBackend(GetParam())) {}
  AttentionBackend& backend() { return *backend_; }

 private:
  const std::unique_ptr<AttentionBackend> backend_;
};

}  // namespace attnd::testing
