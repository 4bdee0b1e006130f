// One block of memory, taken once and dealt out by best fit: device or pinned memory, whose own
// allocation calls are too slow for the request path.
//
// Never reads or writes the memory, so it may lie on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "engine/memory/memory_pool.h"

namespace attnd {

// The memory under an arena; `release` gets `data` when the last block is gone.
struct ArenaMemory {
  std::byte* data = nullptr;  // 256-byte aligned, of the pool's capacity.
  std::function<void(std::byte* data)> release;
};

class ArenaPool final : public MemoryPool {
 public:
  ArenaPool(int64_t capacity_bytes, std::string flag, ArenaMemory memory);
  ~ArenaPool() override;

 protected:
  // Gaps join: there is no need for few sizes.
  int64_t BlockBytes(int64_t bytes) const override;
  // 256-byte aligned; null where no gap is large enough.
  std::byte* Obtain(int64_t block_bytes) override;
  void Release(std::byte* data, int64_t block_bytes) override;
  // Nothing to give back: free memory stays in the arena.
  void Trim(int64_t) override {}
  int64_t CachedBytes() const override { return 0; }

 private:
  void AddGap(int64_t start, int64_t bytes);
  void RemoveGap(std::map<int64_t, int64_t>::iterator gap);

  const int64_t arena_bytes_;
  const ArenaMemory memory_;
  std::map<int64_t, int64_t> gaps_;                     // Start to bytes; no two touch.
  std::set<std::pair<int64_t, int64_t>> gaps_by_size_;  // Bytes, start.
};

}  // namespace attnd
