// Pooled memory with one cap and one set of counters per pool.
//
// A pool refuses at once when its cap would be passed; it never waits and never takes memory from
// anywhere else. Thread-safe. Blocks hold a reference to their pool, so a reply that is still being
// sent may outlive the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace attnd {

class MemoryPool;

// How large a pool is to be: bytes, or a share (1 to 100) of a memory that its maker knows.
struct PoolSize {
  int64_t bytes = 0;
  int percent = 0;

  bool operator==(const PoolSize&) const = default;
};

// A block of a pool; move-only, returned on destruction. Contents are undefined when allocated.
class PoolBuffer {
 public:
  PoolBuffer() = default;
  PoolBuffer(PoolBuffer&& other) noexcept;
  PoolBuffer& operator=(PoolBuffer&& other) noexcept;
  ~PoolBuffer();

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  friend class MemoryPool;
  PoolBuffer(std::shared_ptr<MemoryPool> pool, std::byte* data, int64_t size, int64_t block_bytes)
      : pool_(std::move(pool)), data_(data), size_(size), block_bytes_(block_bytes) {}

  std::shared_ptr<MemoryPool> pool_;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  int64_t block_bytes_ = 0;
};

struct PoolStats {
  int64_t capacity_bytes = 0;
  int64_t in_use_bytes = 0;  // Blocks handed out.
  int64_t cached_bytes = 0;  // Blocks kept for the next allocation.
  int64_t high_water_bytes = 0;
  int64_t allocations = 0;
  int64_t refusals = 0;
};

enum class Fit : uint8_t {
  kReusable,  // Blocks of few sizes, so that a freed one serves the next request of about its size.
  kTight,     // No larger than alignment asks for: where every byte counts.
};

class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  // `flag` names the setting that caps the pool, for messages ("--pinned-pool").
  MemoryPool(int64_t capacity_bytes, std::string flag);
  virtual ~MemoryPool() = default;

  // At least `bytes` bytes, 64-byte aligned. 0 bytes: an empty buffer with null data.
  // RESOURCE_EXHAUSTED with need and have where the cap would be passed; it carries a retry-after
  // unless the block could never fit.
  absl::StatusOr<PoolBuffer> Allocate(int64_t bytes, Fit fit = Fit::kReusable);

  // RESOURCE_EXHAUSTED, without a retry hint, where `bytes` in all pass the cap whatever is free.
  absl::Status CheckCanEverHold(int64_t bytes) const;

  PoolStats stats() const;

 protected:
  // The size of the block for so many bytes, where it need not be tight.
  virtual int64_t BlockBytes(int64_t bytes) const;
  // Backing memory. Obtain may return null; Release gets what Obtain returned.
  virtual std::byte* Obtain(int64_t block_bytes) = 0;
  virtual void Release(std::byte* data, int64_t block_bytes) = 0;
  // Frees cached blocks until at most `keep_bytes` are cached.
  virtual void Trim(int64_t keep_bytes) = 0;
  // Bytes that Release kept. Called with the lock held.
  virtual int64_t CachedBytes() const = 0;

 private:
  friend class PoolBuffer;
  absl::Status Refusal(int64_t need, int64_t have) const;
  void Return(std::byte* data, int64_t block_bytes);
  // Cached blocks make the pool no larger than what was lately in use together.
  void TrimToRecentPeak();

  const int64_t capacity_;
  const std::string flag_;
  mutable std::mutex mutex_;
  PoolStats stats_;
  int64_t peak_ = 0;           // Most bytes in use in this window of allocations,
  int64_t previous_peak_ = 0;  // and in the one before.
};

// Host memory in size classes an eighth apart; freed blocks are kept for reuse, because fresh pages
// cost more than the copy into them.
std::shared_ptr<MemoryPool> MakeHostPool(int64_t capacity_bytes, std::string flag);

}  // namespace attnd
