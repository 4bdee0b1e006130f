#include "engine/cuda/arena_pool.h"

#include <algorithm>
#include <iterator>

namespace attnd {
namespace {

constexpr int64_t kAlignment = 256;

int64_t RoundUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

ArenaPool::ArenaPool(int64_t capacity_bytes, std::string flag, ArenaMemory memory)
    : MemoryPool(capacity_bytes, std::move(flag)),
      arena_bytes_(capacity_bytes),
      memory_(std::move(memory)) {
  if (capacity_bytes > 0) AddGap(0, capacity_bytes);
}

ArenaPool::~ArenaPool() {
  if (memory_.data != nullptr) memory_.release(memory_.data);
}

int64_t ArenaPool::BlockBytes(int64_t bytes) const { return RoundUp(bytes); }

std::byte* ArenaPool::Obtain(int64_t block_bytes) {
  const auto best = gaps_by_size_.lower_bound({block_bytes, 0});
  if (best == gaps_by_size_.end()) return nullptr;
  const auto [gap_bytes, start] = *best;
  RemoveGap(gaps_.find(start));
  // The last gap of the arena may be shorter than the rounding; the block then takes all of it.
  const int64_t taken = std::min(gap_bytes, RoundUp(block_bytes));
  if (taken < gap_bytes) AddGap(start + taken, gap_bytes - taken);
  return memory_.data + start;
}

void ArenaPool::Release(std::byte* data, int64_t block_bytes) {
  int64_t start = data - memory_.data;
  int64_t end = std::min(start + RoundUp(block_bytes), arena_bytes_);
  if (const auto after = gaps_.find(end); after != gaps_.end()) {
    end += after->second;
    RemoveGap(after);
  }
  if (const auto next = gaps_.lower_bound(start); next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      start = before->first;
      RemoveGap(before);
    }
  }
  AddGap(start, end - start);
}

void ArenaPool::AddGap(int64_t start, int64_t bytes) {
  gaps_.emplace(start, bytes);
  gaps_by_size_.emplace(bytes, start);
}

void ArenaPool::RemoveGap(std::map<int64_t, int64_t>::iterator gap) {
  gaps_by_size_.erase({gap->second, gap->first});
  gaps_.erase(gap);
}

}  // namespace attnd
