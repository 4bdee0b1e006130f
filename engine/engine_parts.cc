#include "engine/engine_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/cpu/cpu_backend.h"
#include "engine/cuda_loader.h"

namespace attnd {
namespace {

constexpr const char* kDevicePool = "--device-pool";
constexpr const char* kPinnedPool = "--pinned-pool";
// One copies while the other computes.
constexpr int kGpuWorkers = 2;

ComputeTarget Cpu(int threads) { return {.backend = std::make_unique<CpuBackend>(threads)}; }

}  // namespace

absl::StatusOr<ChosenParts> MakeEngineParts(const EngineOptions& options) {
  ChosenParts chosen;
  chosen.parts.queue_bytes = options.queue_bytes;
  absl::StatusOr<CudaParts> cuda = absl::UnavailableError("--backend=cpu");
  if (options.use_gpu) {
    cuda = LoadCuda({.device = 0,
                     .device_pool = options.device_pool,
                     .pinned_pool_bytes = options.pinned_pool_bytes,
                     .device_pool_flag = kDevicePool,
                     .pinned_pool_flag = kPinnedPool});
  }
  if (!cuda.ok()) {
    if (options.require_gpu) return cuda.status();
    chosen.why = std::string(cuda.status().message());
    chosen.parts.host_pool = MakeHostPool(options.host_pool_bytes, kPinnedPool);
    chosen.parts.targets.push_back(Cpu(options.threads));
    return chosen;
  }
  chosen.why = absl::StrCat("GPU 0: ", cuda->backend->info().devices.front().name);
  chosen.parts.host_pool = cuda->pinned_pool;
  chosen.parts.targets.push_back({.backend = std::move(cuda->backend),
                                  .device_pool = cuda->device_pool,
                                  .workers = kGpuWorkers});
  if (options.cpu_fallback) chosen.parts.targets.push_back(Cpu(options.threads));
  return chosen;
}

}  // namespace attnd
