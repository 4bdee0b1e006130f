#include "engine/cuda/tiled_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "engine/cuda/device_context.h"
#include "engine/cuda/tiled_kernels.h"
#include "engine/cuda/workspace.h"

namespace attnd {
namespace {

TiledWorkspace LayOut(const AttentionProblem& p, bool backward) {
  TiledWorkspace w;
  WorkspaceLayout layout;
  w.sequences = layout.Take(p.batch * static_cast<int64_t>(sizeof(tiled::Sequence)));
  w.alibi_slopes = layout.Take(static_cast<int64_t>(p.alibi_slopes.size()) *
                               static_cast<int64_t>(sizeof(float)));
  w.arrays_end = layout.Take(0);
  if (backward) {
    w.rows = layout.Take(*NumElements(p.lse_desc.shape) *
                         static_cast<int64_t>(sizeof(tiled::RowStatistics)));
  }
  w.bytes = layout.bytes();
  return w;
}

absl::Status Internal(std::string message) {
  return MakeError(absl::StatusCode::kInternal, reason::kInternal, "", std::move(message));
}

float* ElementOf(float* values, int n) { return values == nullptr ? nullptr : values + n; }

// What the kernels of both passes are told. The arrays lie in the workspace.
tiled::Problem Describe(const AttentionProblem& p, const TiledWorkspace& w,
                        const Workspace& workspace) {
  tiled::Problem t;
  t.sequences = workspace.At<const tiled::Sequence>(w.sequences);
  t.batch = p.batch;
  t.heads = {p.num_heads, p.num_kv_heads};
  t.head_dim_qk = static_cast<int>(p.head_dim_qk);
  t.head_dim_v = static_cast<int>(p.head_dim_v);
  t.lse = p.lse;
  if (p.q_is_thd) t.lse.batch = 0;
  t.band = tiled::BandOf(p.mask);
  t.scale = static_cast<float>(p.scale);
  t.exact_scale = p.scale;
  t.exact_softcap = p.logit_softcap.value_or(0);
  // Float32 tells no wider cap from none, and would lose bits of what it is divided by.
  constexpr double kWidest = 1e30, kNarrowest = std::numeric_limits<float>::min();
  if (p.logit_softcap && *p.logit_softcap <= kWidest) {
    t.softcap = static_cast<float>(std::max(*p.logit_softcap, kNarrowest));
  }
  t.bias_kind = p.bias_kind;
  t.bias_strides = p.bias_strides;
  t.alibi_slopes = workspace.At<const float>(w.alibi_slopes);
  t.softmax_kind = p.softmax_kind;
  t.dropout = tiled::DropoutCallOf(p.dropout);
  return t;
}

// A tensor that lies as `view` does, in the buffer at `data`.
tiled::Matrix MatrixOf(const TensorView& view, const std::byte* data, DType dtype, float factor) {
  // Buffers without elements are null.
  const std::byte* first = data == nullptr ? nullptr : data + view.byte_offset;
  return {first, view.strides, view.start_multiplier, view.group_heads, view.group_stride,
          dtype, factor};
}

// Q, K and V of ForwardBuffers or BackwardBuffers, and what else both have.
template <typename Buffers>
void AddInputs(const AttentionProblem& p, const Buffers& b, tiled::Problem& t) {
  auto input = [&](const TensorView& view, float factor) {
    return MatrixOf(view, b.inputs[static_cast<size_t>(view.buffer)], p.dtype, factor);
  };
  t.q = input(p.q, p.fp8.descale_q);
  t.k = input(p.k, p.fp8.descale_k);
  t.v = input(p.v, p.fp8.descale_v);
  t.bias = b.bias;
  t.softmax_offset = b.softmax_offset;
}

// Sends the arrays of the problem to the workspace, and checks what a call brings.
template <typename Buffers>
absl::Status SendArrays(const AttentionProblem& p, const Buffers& buffers, const TiledWorkspace& w,
                        tiled::Problem& t) {
  if (static_cast<int64_t>(buffers.workspace.size()) < w.bytes) {
    return Internal("the workspace is smaller than the plan's");
  }
  auto* const context = static_cast<DeviceContext*>(buffers.queue);
  ATTND_RETURN_IF_ERROR(context->Use());
  ATTND_ASSIGN_OR_RETURN(std::span<std::byte> block,
                         context->Staging(static_cast<size_t>(w.arrays_end)));
  auto* const sequences = reinterpret_cast<tiled::Sequence*>(block.data() + w.sequences);
  t.tasks = tiled::FillSequences(p, {sequences, static_cast<size_t>(p.batch)});
  auto* const slopes = reinterpret_cast<float*>(block.data() + w.alibi_slopes);
  std::transform(p.alibi_slopes.begin(), p.alibi_slopes.end(), slopes,
                 [](double slope) { return static_cast<float>(slope); });
  std::byte* const to = Workspace(buffers.workspace).At<std::byte>(0);
  return context->Copy(to, block.data(), w.arrays_end);
}

constexpr int64_t kFloatBytes = sizeof(float);

// Rows of nobody, and what the kernels raise.
absl::Status ClearOutputs(const AttentionProblem& p, const ForwardBuffers& b,
                          DeviceContext& context) {
  if (b.amax != nullptr) ATTND_RETURN_IF_ERROR(context.Clear(b.amax, 2 * kFloatBytes));
  ATTND_RETURN_IF_ERROR(context.Clear(b.out, *NumBytes(p.out_desc)));
  if (b.lse == nullptr) return absl::OkStatus();
  return CudaStatus(tiled::FillLse(b.lse, *NumElements(p.lse_desc.shape), context.stream()),
                    "the LSE kernel");
}

// Slots of a packed gradient interleave, and some rows belong to nobody: all bytes at once.
absl::Status ClearGradients(const AttentionProblem& p, const BackwardBuffers& b,
                            DeviceContext& context) {
  if (b.amax != nullptr) ATTND_RETURN_IF_ERROR(context.Clear(b.amax, 4 * kFloatBytes));
  for (size_t k = 0; k < b.grads.size(); ++k) {
    if (b.grads[k] == nullptr) continue;
    ATTND_RETURN_IF_ERROR(context.Clear(b.grads[k], *NumBytes(*p.inputs[k])));
  }
  return absl::OkStatus();
}

tiled::Gradients GradientsOf(const AttentionProblem& p, const BackwardBuffers& b,
                             tiled::RowStatistics* rows) {
  auto target = [&](const TensorView& view, float factor, int amax) {
    std::byte* const data = b.grads[static_cast<size_t>(view.buffer)];
    return tiled::Target{data == nullptr ? nullptr : data + view.byte_offset, p.dtype, factor,
                         ElementOf(b.amax, amax)};
  };
  tiled::Gradients g;
  g.d_out = MatrixOf(p.out, b.d_out, p.out_dtype, p.d_out_descale());
  g.lse = b.lse;
  g.rows = rows;
  g.dq = target(p.q, p.fp8.scale_d_q, 1);
  g.dk = target(p.k, p.fp8.scale_d_k, 2);
  g.dv = target(p.v, p.fp8.scale_d_v, 3);
  if (p.bias) {
    g.d_bias = b.d_bias;
    std::copy_n(p.bias->shape.begin(), 4, g.bias_shape);
  }
  g.d_softmax_offset = b.d_softmax_offset;
  g.amax_dp = b.amax;
  return g;
}

}  // namespace

absl::Status CheckTiled(const AttentionProblem& p) {
  const std::pair<std::string_view, int64_t> dims[] = {{"spec.head_dim_qk", p.head_dim_qk},
                                                       {"spec.head_dim_v", p.head_dim_v}};
  for (const auto& [field, dim] : dims) {
    if (dim <= tiled::kMaxHeadDim) continue;
    return UnimplementedField(
        reason::kNotSupported, field,
        absl::StrCat("is ", dim, "; the GPU computes up to ", tiled::kMaxHeadDim));
  }
  if (IsFloat8(p.dtype) && p.bias) {  // Whose elements no scale makes real.
    return UnimplementedField(reason::kNotSupported, "spec.bias_kind",
                              "adds a bias, which FP8 is not computed with; NONE and ALIBI work");
  }
  return absl::OkStatus();
}

TiledPlan::TiledPlan(const AttentionProblem& problem) : workspace_(LayOut(problem, false)) {}

absl::Status TiledPlan::Forward(const AttentionProblem& problem, const ForwardBuffers& b) {
  ATTND_RETURN_IF_ERROR(CheckTiled(problem));
  if (LayOut(problem, false) != workspace_) {
    return Internal("the plan was built for another geometry");
  }
  tiled::Problem t = Describe(problem, workspace_, Workspace(b.workspace));
  AddInputs(problem, b, t);
  t.out = MatrixOf(problem.out, b.out, problem.out_dtype, 1);
  if (problem.is_paged) {
    t.pages_k = b.page_table_k;
    t.pages_v = b.page_table_v;
    t.page_size = problem.page_size;
    t.pages_per_sequence = problem.pages_per_sequence;
  }
  ATTND_RETURN_IF_ERROR(SendArrays(problem, b, workspace_, t));
  auto& context = *static_cast<DeviceContext*>(b.queue);
  ATTND_RETURN_IF_ERROR(ClearOutputs(problem, b, context));
  tiled::ForwardTargets targets;
  targets.out = {b.out == nullptr ? nullptr : b.out + problem.out.byte_offset, problem.out_dtype,
                 problem.out_scale(), ElementOf(b.amax, 1)};
  targets.lse = b.lse;
  targets.amax_s = b.amax;
  return CudaStatus(tiled::LaunchForward(t, targets, context.stream()), "the tiled forward kernel");
}

TiledBackwardPlan::TiledBackwardPlan(const AttentionProblem& problem)
    : workspace_(LayOut(problem, true)) {}

absl::Status TiledBackwardPlan::Backward(const AttentionProblem& problem,
                                         const BackwardBuffers& b) {
  ATTND_RETURN_IF_ERROR(CheckTiled(problem));
  if (LayOut(problem, true) != workspace_ || problem.is_paged) {
    return Internal("the plan was built for another geometry");
  }
  const Workspace workspace(b.workspace);
  tiled::Problem t = Describe(problem, workspace_, workspace);
  AddInputs(problem, b, t);
  t.out = MatrixOf(problem.out, b.out, problem.out_dtype, problem.out_descale());
  ATTND_RETURN_IF_ERROR(SendArrays(problem, b, workspace_, t));
  auto& context = *static_cast<DeviceContext*>(b.queue);
  ATTND_RETURN_IF_ERROR(ClearGradients(problem, b, context));
  const tiled::Gradients g =
      GradientsOf(problem, b, workspace.At<tiled::RowStatistics>(workspace_.rows));
  return CudaStatus(tiled::LaunchBackward(t, g, context.stream()), "the tiled backward kernels");
}

}  // namespace attnd
