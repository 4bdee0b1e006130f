// Opens the CUDA module at run time.
#pragma once

#include "absl/status/statusor.h"
#include "engine/cuda/cuda_module.h"

namespace attnd {

// The module is looked for in ../lib beside the program's folder, then where the system's loader
// looks. UNAVAILABLE, in one line, where it, the driver, the device or the memory is not there.
absl::StatusOr<CudaParts> LoadCuda(const CudaOptions& options);

}  // namespace attnd
