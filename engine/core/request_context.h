// What travels with a request besides its tensors.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace attnd {

// Shared by the transport, which cancels, and the engine, which looks before it launches.
class CancellationToken {
 public:
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool IsCancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> cancelled_{false};
};

struct RequestContext {
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<CancellationToken> cancellation;  // May be null: never cancelled.
  std::string tenant;

  bool IsCancelled() const { return cancellation != nullptr && cancellation->IsCancelled(); }
};

}  // namespace attnd
