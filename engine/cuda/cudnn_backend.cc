#include "engine/cuda/cudnn_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/gradient_views.h"
#include "engine/core/status.h"
#include "engine/cuda/cudnn_backward_plan.h"
#include "engine/cuda/cudnn_plan.h"
#include "engine/cuda/joint_description.h"
#include "engine/cuda/tiled_plan.h"

namespace attnd {
namespace {

constexpr size_t kMaxPlans = 512;
// Of a graph whose scratch grows with s_q * s_kv: above it the tiled kernels, which need none.
constexpr int64_t kMaxScoreScratch = int64_t{16} << 30;
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
  info.engines = {"cudnn_dense", "cudnn_ragged", "cudnn_paged", std::string(kTiledEngine)};
  info.devices = {{properties.name, static_cast<int64_t>(properties.totalGlobalMem),
                   properties.multiProcessorCount}};
  info.dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                 DType::kFloat8E5M2};
  info.features = {"causal",       "window",  "page_size",     "logit_softcap",  "bias_kind",
                   "softmax_kind", "dropout", "deterministic", "batch_invariant"};
  return info;
}

}  // namespace

CudnnBackend::CudnnBackend(int device, BackendInfo info, std::unique_ptr<DeviceContext> builder)
    : device_(device), info_(std::move(info)), graphs_(kMaxPlans), builder_(std::move(builder)) {}

absl::StatusOr<std::unique_ptr<CudnnBackend>> CudnnBackend::Make(int device) {
  ATTND_ASSIGN_OR_RETURN(BackendInfo info, Probe(device));
  // The first context shows whether cuDNN works here.
  absl::StatusOr<std::unique_ptr<DeviceContext>> builder = DeviceContext::Make(device);
  if (!builder.ok()) return Unavailable(std::string(builder.status().message()));
  return std::unique_ptr<CudnnBackend>(
      new CudnnBackend(device, std::move(info), *std::move(builder)));
}

CudnnBackend::GraphCache::Result CudnnBackend::GraphFor(const SdpaDescription& d) {
  return graphs_.GetOrBuild(d, [&]() -> GraphCache::Result {
    std::lock_guard lock(builder_mutex_);
    ATTND_RETURN_IF_ERROR(builder_->Use());
    ATTND_ASSIGN_OR_RETURN(std::shared_ptr<const SdpaGraph> graph,
                           SdpaGraph::Build(d, builder_->handle()));
    return graph;
  });
}

absl::StatusOr<JointGraph> CudnnBackend::JointGraphFor(const AttentionProblem& problem, Pass pass) {
  ATTND_ASSIGN_OR_RETURN(const SdpaDescription d, DescribeJoint(problem, pass == Pass::kBackward));
  ATTND_ASSIGN_OR_RETURN(std::shared_ptr<const SdpaGraph> graph, GraphFor(d));
  return JointGraph{d, std::move(graph)};
}

absl::StatusOr<std::unique_ptr<AttentionPlan>> CudnnBackend::BuildCudnnPlan(
    const AttentionProblem& problem) {
  if (absl::StatusOr<JointGraph> joint = JointGraphFor(problem, Pass::kForward); joint.ok()) {
    return std::make_unique<JointForwardPlan>(problem, *std::move(joint));
  } else if (!absl::IsUnimplemented(joint.status())) {
    return joint.status();
  }
  ATTND_ASSIGN_OR_RETURN(SdpaDescription d, DescribeSdpa(problem));
  GraphCache::Result graph = GraphFor(d);
  if (d.out_dtype != d.dtype && absl::IsUnimplemented(graph.status())) {
    // Some kernels write no FLOAT32: the plan then widens what they write.
    d.out_dtype = d.dtype;
    graph = GraphFor(d);
  }
  if (!graph.ok()) return graph.status();
  return std::make_unique<CudnnPlan>(problem, d, *std::move(graph));
}

absl::StatusOr<std::unique_ptr<BackwardPlan>> CudnnBackend::BuildCudnnBackwardPlan(
    const AttentionProblem& problem) {
  if (absl::StatusOr<JointGraph> joint = JointGraphFor(problem, Pass::kBackward); joint.ok()) {
    return std::make_unique<JointBackwardPlan>(problem, *std::move(joint));
  } else if (!absl::IsUnimplemented(joint.status())) {
    return joint.status();
  }
  ATTND_ASSIGN_OR_RETURN(const SdpaDescription d, DescribeSdpaBackward(problem));
  ATTND_ASSIGN_OR_RETURN(std::shared_ptr<const SdpaGraph> graph, GraphFor(d));
  if ((d.deterministic || d.bias_kind == BiasKind::kPostScale) &&
      graph->workspace_bytes() > kMaxScoreScratch) {
    return UnimplementedField(reason::kNotSupported, "spec.max_seqlen_kv",
                              absl::StrCat("makes cuDNN's scratch ", graph->workspace_bytes(),
                                           " bytes; ", kMaxScoreScratch, " are the most here"));
  }
  return std::make_unique<CudnnBackwardPlan>(problem, d, std::move(graph));
}

absl::StatusOr<std::unique_ptr<AttentionPlan>> CudnnBackend::BuildPlan(
    const AttentionProblem& problem) {
  absl::StatusOr<std::unique_ptr<AttentionPlan>> plan = BuildCudnnPlan(problem);
  if (!absl::IsUnimplemented(plan.status())) return plan;
  ATTND_RETURN_IF_ERROR(CheckTiled(problem));
  return std::make_unique<TiledPlan>(problem);
}

absl::StatusOr<std::unique_ptr<BackwardPlan>> CudnnBackend::BuildBackwardPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckGradientViews(problem));
  absl::StatusOr<std::unique_ptr<BackwardPlan>> plan = BuildCudnnBackwardPlan(problem);
  if (!absl::IsUnimplemented(plan.status())) return plan;
  ATTND_RETURN_IF_ERROR(CheckTiled(problem));
  return std::make_unique<TiledBackwardPlan>(problem);
}

bool CudnnBackend::PlanIsReady(const AttentionProblem& problem, Pass pass) const {
  if (const absl::StatusOr<SdpaDescription> d = DescribeJoint(problem, pass == Pass::kBackward);
      d.ok()) {
    const std::optional<GraphCache::Result> graph = graphs_.Find(*d);
    if (!graph || !absl::IsUnimplemented(graph->status())) return graph.has_value();
  }
  if (pass == Pass::kBackward) {
    if (!CheckGradientViews(problem).ok()) return true;
    const absl::StatusOr<SdpaDescription> d = DescribeSdpaBackward(problem);
    return !d.ok() || graphs_.Find(*d).has_value();
  }
  absl::StatusOr<SdpaDescription> d = DescribeSdpa(problem);
  if (!d.ok()) return true;
  std::optional<GraphCache::Result> graph = graphs_.Find(*d);
  if (graph && d->out_dtype != d->dtype && absl::IsUnimplemented(graph->status())) {
    d->out_dtype = d->dtype;
    graph = graphs_.Find(*d);
  }
  return graph.has_value();
}

PlanStats CudnnBackend::plan_stats() const {
  return {.built = graphs_.builds(),
          .hits = graphs_.hits(),
          .held = static_cast<int64_t>(graphs_.size())};
}

absl::StatusOr<std::unique_ptr<DeviceQueue>> CudnnBackend::MakeQueue() {
  return DeviceContext::Make(device_);
}

}  // namespace attnd
