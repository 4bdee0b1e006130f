#include "engine/cuda_loader.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr const char* kModule = "libattnd_cuda.so";

absl::Status Unavailable(const std::string& why) {
  return MakeError(absl::StatusCode::kUnavailable, reason::kNotSupported, "", why);
}

std::string ModulePath() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path beside = program.parent_path().parent_path() / "lib" / kModule;
  // Where /proc is missing there is no such path, and never one that hangs on the current folder.
  return beside.is_absolute() && std::filesystem::exists(beside, error) ? beside.string() : kModule;
}

}  // namespace

absl::StatusOr<CudaParts> LoadCuda(const CudaOptions& options) {
  // Never closed: the parts run its code until the process ends.
  void* const module = dlopen(ModulePath().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr)
    return Unavailable(absl::StrCat("cannot open the CUDA module: ", dlerror()));
  auto* const open = reinterpret_cast<decltype(&AttndOpenCuda)>(dlsym(module, "AttndOpenCuda"));
  if (open == nullptr) return Unavailable(absl::StrCat("not a CUDA module of attnd: ", dlerror()));
  CudaParts parts;
  std::string why_not;
  if (!open(options, &parts, &why_not)) return Unavailable(why_not);
  return parts;
}

}  // namespace attnd
