// Host memory for a pool: aligned blocks, kept by size after use.
//
// Trim gives the largest back first.

#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "engine/memory/memory_pool.h"

namespace attnd {
namespace {

constexpr size_t kAlignment = 64;

class HostPool final : public MemoryPool {
 public:
  using MemoryPool::MemoryPool;
  ~HostPool() override { Trim(0); }

 protected:
  std::byte* Obtain(int64_t block_bytes) override {
    if (auto it = cached_.find(block_bytes); it != cached_.end()) {
      std::byte* data = it->second.back();
      it->second.pop_back();
      if (it->second.empty()) cached_.erase(it);
      cached_bytes_ -= block_bytes;
      return data;
    }
    return static_cast<std::byte*>(std::aligned_alloc(kAlignment, block_bytes));
  }

  void Release(std::byte* data, int64_t block_bytes) override {
    cached_[block_bytes].push_back(data);
    cached_bytes_ += block_bytes;
  }

  void Trim(int64_t keep_bytes) override {
    while (cached_bytes_ > keep_bytes) {
      auto largest = std::prev(cached_.end());
      std::free(largest->second.back());
      largest->second.pop_back();
      cached_bytes_ -= largest->first;
      if (largest->second.empty()) cached_.erase(largest);
    }
  }

  int64_t CachedBytes() const override { return cached_bytes_; }

 private:
  std::map<int64_t, std::vector<std::byte*>> cached_;  // By block size.
  int64_t cached_bytes_ = 0;
};

}  // namespace

std::shared_ptr<MemoryPool> MakeHostPool(int64_t capacity_bytes, std::string flag) {
  return std::make_shared<HostPool>(capacity_bytes, std::move(flag));
}

}  // namespace attnd
