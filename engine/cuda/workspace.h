// Where the pieces of a plan's workspace lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace attnd {

// Pieces side by side from an aligned start on.
class WorkspaceLayout {
 public:
  static constexpr int64_t kAlignment = 256;

  // The byte offset of a new piece.
  int64_t Take(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }

  // What a block must have, whatever its own alignment is.
  int64_t bytes() const { return bytes_ + kAlignment; }

 private:
  int64_t bytes_ = 0;
};

// The pieces of one call.
class Workspace {
 public:
  explicit Workspace(std::span<std::byte> block) {
    const auto address = reinterpret_cast<uintptr_t>(block.data());
    constexpr auto kAlignment = static_cast<uintptr_t>(WorkspaceLayout::kAlignment);
    start_ = block.data() + (kAlignment - address % kAlignment) % kAlignment;
  }

  template <typename T>
  T* At(int64_t offset) const {
    return reinterpret_cast<T*>(start_ + offset);
  }

 private:
  std::byte* start_;
};

}  // namespace attnd
