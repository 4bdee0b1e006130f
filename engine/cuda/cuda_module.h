// What libattnd_cuda.so exports. A program opens it with dlopen and looks these up by name, so that
// one that runs on a machine without CUDA needs none of it.
//
// All return null (or false) and say in one line why not, where the driver, the device, cuDNN or
// the memory is not there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/backend/attention_backend.h"
#include "engine/memory/memory_pool.h"

extern "C" {

// The caller deletes it.
attnd::AttentionBackend* AttndMakeCudaBackend(int device, std::string* why_not);

// Arenas of that many bytes, taken now: device memory, and pinned host memory for its copies. The
// flags name the settings for messages.
bool AttndMakeDevicePool(int device, int64_t bytes, const std::string& flag,
                         std::shared_ptr<attnd::MemoryPool>* pool, std::string* why_not);
bool AttndMakePinnedPool(int64_t bytes, const std::string& flag,
                         std::shared_ptr<attnd::MemoryPool>* pool, std::string* why_not);

// Between host and device in either direction; done when it returns.
bool AttndCudaCopy(int device, std::byte* to, const std::byte* from, int64_t bytes,
                   std::string* why_not);

}  // extern "C"
