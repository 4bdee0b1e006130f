#include "engine/memory/memory_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr int64_t kSmallestBlock = 4096;
constexpr int64_t kAlignment = 64;
constexpr int64_t kPeakWindow = 256;  // Allocations.
constexpr absl::Duration kRetryAfter = absl::Milliseconds(50);

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

PoolBuffer::PoolBuffer(PoolBuffer&& other) noexcept
    : pool_(std::move(other.pool_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      block_bytes_(std::exchange(other.block_bytes_, 0)) {}

PoolBuffer& PoolBuffer::operator=(PoolBuffer&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(block_bytes_, other.block_bytes_);
  return *this;
}

PoolBuffer::~PoolBuffer() {
  if (data_ != nullptr) pool_->Return(data_, block_bytes_);
}

MemoryPool::MemoryPool(int64_t capacity_bytes, std::string flag)
    : capacity_(capacity_bytes), flag_(std::move(flag)) {
  stats_.capacity_bytes = capacity_bytes;
}

// Rounds up to an eighth of the power of two below, so that a freed block fits the next request of
// nearly its size and at most an eighth is unused.
int64_t MemoryPool::BlockBytes(int64_t bytes) const {
  if (bytes <= kSmallestBlock) return kSmallestBlock;
  const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes))) / 8;
  return (bytes + step - 1) / step * step;
}

absl::StatusOr<PoolBuffer> MemoryPool::Allocate(int64_t bytes, Fit fit) {
  if (bytes == 0) return PoolBuffer();
  std::lock_guard lock(mutex_);
  const int64_t have = capacity_ - stats_.in_use_bytes;
  // Near the cap a block is as tight as its alignment allows.
  int64_t block = bytes;
  if (bytes <= have) {
    block = fit == Fit::kTight ? Aligned(bytes) : BlockBytes(bytes);
    if (block > have) block = std::min(have, Aligned(bytes));
  }
  std::byte* data = nullptr;
  if (block <= have) {
    data = Obtain(block);
  }
  if (data == nullptr) {
    ++stats_.refusals;
    absl::Status status = Refusal(block, have);
    return block > capacity_ ? status : WithRetryAfter(std::move(status), kRetryAfter);
  }
  ++stats_.allocations;
  stats_.in_use_bytes += block;
  stats_.high_water_bytes = std::max(stats_.high_water_bytes, stats_.in_use_bytes);
  if (stats_.allocations % kPeakWindow == 0) previous_peak_ = std::exchange(peak_, 0);
  peak_ = std::max(peak_, stats_.in_use_bytes);
  TrimToRecentPeak();
  return PoolBuffer(shared_from_this(), data, bytes, block);
}

absl::Status MemoryPool::CheckCanEverHold(int64_t bytes) const {
  return bytes <= capacity_ ? absl::OkStatus() : Refusal(bytes, capacity_);
}

absl::Status MemoryPool::Refusal(int64_t need, int64_t have) const {
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kPoolExhausted, "",
                   absl::StrCat("the memory pool (", flag_, ") cannot hold the request: need ",
                                need, " bytes, have ", have, " of ", capacity_));
}

void MemoryPool::Return(std::byte* data, int64_t block_bytes) {
  std::lock_guard lock(mutex_);
  stats_.in_use_bytes -= block_bytes;
  Release(data, block_bytes);
  TrimToRecentPeak();
}

void MemoryPool::TrimToRecentPeak() { Trim(std::max(peak_, previous_peak_) - stats_.in_use_bytes); }

PoolStats MemoryPool::stats() const {
  std::lock_guard lock(mutex_);
  PoolStats stats = stats_;
  stats.cached_bytes = CachedBytes();
  return stats;
}

}  // namespace attnd
