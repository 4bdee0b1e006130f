// What travels with a request besides its tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace attnd {

// Shared by the transport, which cancels, and the engine, which looks before it launches.
class CancellationToken {
 public:
  enum class Cause : uint8_t { kNone, kClient, kShutdown };

  // The first cause stays.
  void Cancel(Cause cause) {
    Cause none = Cause::kNone;
    cause_.compare_exchange_strong(none, cause, std::memory_order_relaxed);
  }
  bool IsCancelled() const { return cause() != Cause::kNone; }
  Cause cause() const { return cause_.load(std::memory_order_relaxed); }

 private:
  std::atomic<Cause> cause_{Cause::kNone};
};

struct RequestContext {
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<CancellationToken> cancellation = std::make_shared<CancellationToken>();
  std::string tenant;
};

}  // namespace attnd
