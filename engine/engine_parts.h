// Chooses the backends and takes the pools: the one place that names concrete ones.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/memory/memory_pool.h"

namespace attnd {

struct EngineOptions {
  bool use_gpu = true;        // Where one can be used; else the CPU serves.
  bool require_gpu = false;   // Or nothing.
  bool cpu_fallback = false;  // The CPU computes what the GPU does not.
  int threads = 0;            // CPU threads; 0: one for each hardware thread.
  int64_t queue_bytes = 0;
  int64_t host_pool_bytes = 0;    // Cap of the host memory where the CPU serves;
  int64_t pinned_pool_bytes = 0;  // and what is pinned, at once, where a GPU does.
  PoolSize device_pool;           // A share is one of the device memory that is free.
};

struct ChosenParts {
  EngineParts parts;
  std::string why;  // Why the first backend is what it is, in one line.
};

// UNAVAILABLE, in one line, where a GPU is required and cannot be used.
absl::StatusOr<ChosenParts> MakeEngineParts(const EngineOptions& options);

}  // namespace attnd
