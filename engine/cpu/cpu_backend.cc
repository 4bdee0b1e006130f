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
  info.dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  info.features = {"causal",       "window",  "logit_softcap", "bias_kind",     "alibi",
                   "softmax_kind", "dropout", "page_size",     "deterministic", "batch_invariant"};
  return info;
}

absl::Status CheckDType(const AttentionProblem& problem) {
  const DType dtype = problem.dtype;
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    const std::string_view name = Name(dtype);
    return UnimplementedField(
        reason::kNotBuilt, "spec.dtype",
        absl::StrCat("is ", absl::string_view(name.data(), name.size()),
                     ", which the CPU does not compute; FLOAT32, FLOAT16 and BFLOAT16 work"));
  }
  return absl::OkStatus();
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
  ATTND_RETURN_IF_ERROR(CheckDType(problem));
  return std::make_unique<TiledPlan>(problem, team_);
}

absl::StatusOr<std::unique_ptr<BackwardPlan>> CpuBackend::BuildBackwardPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckDType(problem));
  ATTND_RETURN_IF_ERROR(CheckGradientViews(problem));
  return std::make_unique<TiledBackwardPlan>(problem, team_);
}

ReferenceBackend::ReferenceBackend() : info_(MakeInfo("reference")) {}

absl::StatusOr<std::unique_ptr<AttentionPlan>> ReferenceBackend::BuildPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckDType(problem));
  return std::make_unique<ReferencePlan>();
}

absl::StatusOr<std::unique_ptr<BackwardPlan>> ReferenceBackend::BuildBackwardPlan(
    const AttentionProblem& problem) {
  ATTND_RETURN_IF_ERROR(CheckDType(problem));
  ATTND_RETURN_IF_ERROR(CheckGradientViews(problem));
  return std::make_unique<ReferenceBackwardPlan>();
}

}  // namespace attnd
