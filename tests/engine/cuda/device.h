// The module, opened as the server opens it, for tests that run on a machine with a GPU.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

#include "engine/cuda/cuda_module.h"

namespace attnd::testing {

// A function of the module. Ends the program where the module or the function is missing.
template <typename Function>
Function* FromModule(const char* name) {
  static void* const module = dlopen("libattnd_cuda.so", RTLD_NOW | RTLD_LOCAL);
  void* const function = module == nullptr ? nullptr : dlsym(module, name);
  if (function == nullptr) {
    std::cerr << dlerror() << std::endl;
    std::abort();
  }
  return reinterpret_cast<Function*>(function);
}

inline std::unique_ptr<AttentionBackend> MakeBackend() {
  std::string why_not;
  auto* make = FromModule<decltype(AttndMakeCudaBackend)>("AttndMakeCudaBackend");
  std::unique_ptr<AttentionBackend> backend(make(0, &why_not));
  if (backend == nullptr) {
    std::cerr << why_not << std::endl;
    std::abort();
  }
  return backend;
}

}  // namespace attnd::testing
