#include "engine/cuda/cudnn_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "engine/cuda/cudnn_plan.h"

namespace attnd {
namespace {

constexpr size_t kMaxPlans = 512;
constexpr int kOldestMajor = 9;  // Compute capability; the kernels are built for Hopper.

absl::Status Unavailable(std::string why) {
  return MakeError(absl::StatusCode::kUnavailable, reason::kNotSupported, "", std::move(why));
}

absl::StatusOr<BackendInfo> Probe(int device) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    return Unavailable(absl::StrCat("no usable NVIDIA driver: ", cudaGetErrorString(error)));
  }
  if (device < 0 || device >= count) {
    return Unavailable(absl::StrCat("there is no GPU ", device, "; this machine has ", count));
  }
  cudaDeviceProp properties;
  ATTND_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties"));
  if (properties.major < kOldestMajor) {
    return Unavailable(absl::StrCat("GPU ", device, " (", properties.name,
                                    ") has compute capability ", properties.major, ".",
                                    properties.minor, "; 9.0 or newer is needed"));
  }
  BackendInfo info;
  info.name = "cuda";
  info.engines = {"cudnn_dense", "cudnn_ragged", "cudnn_paged"};
  info.devices = {{properties.name, static_cast<int64_t>(properties.totalGlobalMem),
                   properties.multiProcessorCount}};
  info.dtypes = {DType::kFloat16, DType::kBFloat16};
  info.features = {"causal", "window", "page_size"};
  return info;
}

}  // namespace

CudnnBackend::CudnnBackend(int device, BackendInfo info)
    : info_(std::move(info)), contexts_(device), graphs_(kMaxPlans) {}

absl::StatusOr<std::unique_ptr<CudnnBackend>> CudnnBackend::Make(int device) {
  ATTND_ASSIGN_OR_RETURN(BackendInfo info, Probe(device));
  std::unique_ptr<CudnnBackend> backend(new CudnnBackend(device, std::move(info)));
  // The first context shows whether cuDNN works here.
  if (const auto lease = backend->contexts_.Take(); !lease.ok()) {
    return Unavailable(std::string(lease.status().message()));
  }
  return backend;
}

CudnnBackend::GraphCache::Result CudnnBackend::GraphFor(const SdpaDescription& d) const {
  return graphs_.GetOrBuild(d, [&]() -> GraphCache::Result {
    ATTND_ASSIGN_OR_RETURN(const DeviceContexts::Lease lease, contexts_.Take());
    ATTND_ASSIGN_OR_RETURN(std::shared_ptr<const SdpaGraph> graph,
                           SdpaGraph::Build(d, lease->handle()));
    return graph;
  });
}

CudnnBackend::GraphCache::Result CudnnBackend::GraphFor(const AttentionProblem& problem,
                                                        SdpaDescription& d) const {
  ATTND_ASSIGN_OR_RETURN(d, DescribeSdpa(problem));
  const GraphCache::Result graph = GraphFor(d);
  if (d.out_dtype == d.dtype || graph.status().code() != absl::StatusCode::kUnimplemented) {
    return graph;
  }
  // Some kernels write no FLOAT32: the plan then widens what they write.
  d.out_dtype = d.dtype;
  return GraphFor(d);
}

absl::Status CudnnBackend::CheckSupport(const AttentionProblem& problem) const {
  SdpaDescription description;
  return GraphFor(problem, description).status();
}

absl::StatusOr<std::unique_ptr<AttentionPlan>> CudnnBackend::BuildPlan(
    const AttentionProblem& problem) {
  SdpaDescription description;
  ATTND_ASSIGN_OR_RETURN(std::shared_ptr<const SdpaGraph> graph, GraphFor(problem, description));
  return std::make_unique<CudnnPlan>(problem, description, std::move(graph), contexts_);
}

}  // namespace attnd
