#include "tests/engine/cpu/random_elements.h"

#include <random>

namespace attnd::testing {

std::vector<float> Random(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<std::byte> Narrow(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(SizeOf(dtype)));
  for (size_t k = 0; k < values.size(); ++k) {
    StoreElement(dtype, bytes.data(), static_cast<int64_t>(k), values[k]);
  }
  return bytes;
}

std::vector<float> Widen(DType dtype, const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(SizeOf(dtype)));
  for (size_t k = 0; k < values.size(); ++k) {
    values[k] = LoadElement(dtype, bytes.data(), static_cast<int64_t>(k));
  }
  return values;
}

}  // namespace attnd::testing
