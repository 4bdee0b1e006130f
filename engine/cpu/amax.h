// Largest absolute values that several threads find.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>

namespace attnd {

// Raises *amax to |value| where that is finite and larger. Thread-safe. Null: does nothing.
inline void RaiseAmax(float* amax, float value) {
  const float magnitude = std::abs(value);
  if (amax == nullptr || !std::isfinite(magnitude)) return;
  const std::atomic_ref<float> target(*amax);
  float seen = target.load(std::memory_order_relaxed);
  while (magnitude > seen &&
         !target.compare_exchange_weak(seen, magnitude, std::memory_order_relaxed)) {
  }
}

// The largest finite |values[k]|; 0: none.
inline float LargestOf(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    const float magnitude = std::abs(values[k]);
    if (magnitude > largest && std::isfinite(magnitude)) largest = magnitude;
  }
  return largest;
}

}  // namespace attnd
