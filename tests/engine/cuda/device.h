// The module, opened as the server opens it, for tests that run on a machine with a GPU.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

#include "engine/cuda/cuda_module.h"

namespace attnd::testing {

// False, with the reason in `why_not`, where the module says no.
inline bool Open(const CudaOptions& options, CudaParts& parts, std::string& why_not) {
  static void* const module = dlopen("libattnd_cuda.so", RTLD_NOW | RTLD_LOCAL);
  void* const open = module == nullptr ? nullptr : dlsym(module, "AttndOpenCuda");
  if (open == nullptr) {
    std::cerr << dlerror() << std::endl;
    std::abort();
  }
  return reinterpret_cast<decltype(&AttndOpenCuda)>(open)(options, &parts, &why_not);
}

// A backend without pools.
inline std::unique_ptr<AttentionBackend> MakeBackend() {
  CudaParts parts;
  std::string why_not;
  if (!Open({}, parts, why_not)) {
    std::cerr << why_not << std::endl;
    std::abort();
  }
  return std::move(parts.backend);
}

}  // namespace attnd::testing
