// The queue of a device with memory of its own: what is enqueued runs in order, later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/core/status.h"

namespace attnd {

struct CopyStep {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
};

// Used by one thread at a time. Memory that an enqueued step uses must live until Wait returns.
// Errors are INTERNAL.
class DeviceQueue {
 public:
  virtual ~DeviceQueue() = default;

  // Enqueues a copy between host and device, in either direction. Host memory that is not pinned
  // works, slower.
  virtual absl::Status Copy(std::byte* to, const std::byte* from, int64_t bytes) = 0;

  // Enqueues copies in one direction, which may overlap one another, in one submission where the
  // device can.
  virtual absl::Status CopyAll(std::span<const CopyStep> steps) {
    for (const CopyStep& step : steps) {
      ATTND_RETURN_IF_ERROR(Copy(step.to, step.from, step.bytes));
    }
    return absl::OkStatus();
  }

  // Enqueues a time stamp into slot 0 .. kStamps - 1.
  static constexpr int kStamps = 4;
  virtual absl::Status Stamp(int slot) = 0;

  // Blocks until everything enqueued is done, and says what of it failed.
  virtual absl::Status Wait() = 0;

  // Device time between two stamps that a Wait has seen.
  virtual absl::Duration Between(int first, int second) const = 0;
};

}  // namespace attnd
