// What libattnd_cuda.so exports: one function. A program opens the library with dlopen and looks
// the function up by name, so that one that runs on a machine without CUDA needs none of it. Once
// it has been called, the library must stay open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/backend/attention_backend.h"
#include "engine/memory/memory_pool.h"

namespace attnd {

struct CudaOptions {
  int device = 0;
  // Arenas that are taken now; none where a size is 0. A share is one of the free device memory.
  PoolSize device_pool;
  int64_t pinned_pool_bytes = 0;
  // The settings behind the sizes, for messages.
  std::string device_pool_flag;
  std::string pinned_pool_flag;
};

struct CudaParts {
  std::unique_ptr<AttentionBackend> backend;
  std::shared_ptr<MemoryPool> device_pool;
  std::shared_ptr<MemoryPool> pinned_pool;  // Host memory that the device copies from and to.
};

}  // namespace attnd

// False, and in one line why not, where the driver, the device, cuDNN or the memory is not there.
extern "C" bool AttndOpenCuda(const attnd::CudaOptions& options, attnd::CudaParts* parts,
                              std::string* why_not);
