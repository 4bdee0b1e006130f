#include "engine/cpu/cpu_backend.h"

#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/core/gradient_views.h"
#include "engine/core/status.h"
#include "engine/cpu/reference_attention.h"
#include "engine/cpu/tiled_attention.h"
#include "engine/cpu/tiled_backward.h"

namespace attnd {
namespace {

std::string CpuModelName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line)) {
    const size_t colon = line.find(':');
    if (absl::StartsWith(line, "model name") && colon != std::string::npos) {
      return std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
    }
  }
  return "CPU";
}

BackendInfo MakeInfo(const char* engine) {
  DeviceInfo device;
  device.name = CpuModelName();
  device.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  device.compute_units = std::thread::hardware_concurrency();

  BackendInfo info;
  info.name = "cpu";
  info.engines = {engine};
  info.devices = {device};
  info.dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                 DType::kFloat8E5M2};
  info.features = {"causal",       "window",  "logit_softcap", "bias_kind",     "alibi",
                   "softmax_kind", "dropout", "page_size",     "deterministic", "batch_invariant",
                   "fp8"};
  return info;
}

absl::Status CheckSupport(const AttentionProblem& problem) {
  if (!IsFloat8(problem.dtype) || !problem.bias) return absl::OkStatus();
  return UnimplementedField(
      reason::kNotSupported, "spec.bias_kind",
      absl::StrCat("is ", problem.bias_kind == BiasKind::kPreScale ? "PRE_SCALE" : "POST_SCALE",
                   ", which FP8 is not computed with; NONE and ALIBI work"));
}

class TiledPlan : public AttentionPlan {
 public:
  TiledPlan(const AttentionProblem& problem, ThreadTeam& team)
      : team_(team), workspace_bytes_(TiledWorkspaceBytes(problem, team.size())) {}

  std::string_view engine() const override { return "tiled"; }
  int64_t workspace_bytes() const override { return workspace_bytes_; }
  absl::Status Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) override {
    return TiledForward(problem, buffers, team_);
  }

 private:
  ThreadTeam& team_;
  const int64_t workspace_bytes_;
};

class TiledBackwardPlan : public BackwardPlan {
 public:
  TiledBackwardPlan(const AttentionProblem& problem, ThreadTeam& team)
      : team_(team), workspace_bytes_(TiledBackwardWorkspaceBytes(problem, team.size())) {}

  std::string_view engine() const override { return "tiled"; }
  int64_t workspace_bytes() const override { return workspace_bytes_; }
  absl::Status Backward(const AttentionProblem& problem, const BackwardBuffers& buffers) override {
    return TiledBackward(problem, buffers, team_);
  }

 private:
  ThreadTeam& team_;
  const int64_t workspace_bytes_;
};

class ReferencePlan : public AttentionPlan {
 public:
  std::string_view engine() const override { return "reference"; }
  int64_t workspace_bytes() const override { return 0; }
  absl::Status Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) override {
    return ReferenceForward(problem, buffers);
  }
};

class ReferenceBackwardPlan : public BackwardPlan {
 public:
  std::string_view engine() const override { return "reference"; }
  int64_t workspace_bytes() const override { return 0; }
  absl::Status Backward(const AttentionProblem& problem, const BackwardBuffers& buffers) override {
    return ReferenceBackward(problem, buffers);
  }
};

}  // namespace

CpuBackend::CpuBackend(int threads) : info_(MakeInfo("tiled")), team_(threads) {}

absl::StatusOr<std::unique_ptr<AttentionPlan>> CpuBackend::BuildPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckSupport(problem));
  return std::make_unique<TiledPlan>(problem, team_);
}

absl::StatusOr<std::unique_ptr<BackwardPlan>> CpuBackend::BuildBackwardPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckSupport(problem));
  ATTND_RETURN_IF_ERROR(CheckGradientViews(problem));
  return std::make_unique<TiledBackwardPlan>(problem, team_);
}

ReferenceBackend::ReferenceBackend() : info_(MakeInfo("reference")) {}

absl::StatusOr<std::unique_ptr<AttentionPlan>> ReferenceBackend::BuildPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckSupport(problem));
  return std::make_unique<ReferencePlan>();
}

absl::StatusOr<std::unique_ptr<BackwardPlan>> ReferenceBackend::BuildBackwardPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckSupport(problem));
  ATTND_RETURN_IF_ERROR(CheckGradientViews(problem));
  return std::make_unique<ReferenceBackwardPlan>();
}

}  // namespace attnd
