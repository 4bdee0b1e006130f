#include "engine/cpu/tiled_backward.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine/core/status.h"
#include "engine/cpu/backward_plan.h"
#include "engine/cpu/gradient_passes.h"
#include "engine/cpu/row_statistics.h"
#include "engine/cpu/team_call.h"

namespace attnd {
namespace {

constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kBytesPerTask = int64_t{1} << 20;

// Products of Q, K or V with something else, against the two of forward.
constexpr double kProducts = 3.5;

// Tasks that clear the gradients of Q, K and V. Slots of a packed gradient interleave, and some
// rows belong to nobody: all bytes at once.
class Clearing {
 public:
  Clearing(const AttentionProblem& problem, const BackwardBuffers& buffers) : buffers_(buffers) {
    for (size_t k = 0; k < buffers.grads.size(); ++k) {
      if (buffers.grads[k] != nullptr) bytes_[k] = *NumBytes(*problem.inputs[k]);
      tasks_ += TasksOf(k);
    }
  }

  int64_t num_tasks() const { return tasks_; }

  void Run(int64_t task) const {
    for (size_t k = 0; k < bytes_.size(); task -= TasksOf(k++)) {
      if (task >= TasksOf(k)) continue;
      const int64_t first = task * kBytesPerTask;
      std::memset(buffers_.grads[k] + first, 0,
                  static_cast<size_t>(std::min(kBytesPerTask, bytes_[k] - first)));
      return;
    }
  }

 private:
  int64_t TasksOf(size_t k) const { return (bytes_[k] + kBytesPerTask - 1) / kBytesPerTask; }

  const BackwardBuffers& buffers_;
  std::array<int64_t, kNumInputBuffers> bytes_{};
  int64_t tasks_ = 0;
};

ForwardBuffers InputsOf(const BackwardBuffers& buffers) {
  ForwardBuffers inputs;
  inputs.inputs = buffers.inputs;
  inputs.bias = buffers.bias;
  inputs.softmax_offset = buffers.softmax_offset;
  return inputs;
}

// Clears the gradients, and computes what the tasks of ComputeGradients read.
absl::Status Prepare(const BackwardContext& context, const BackwardPlanner& plan, ThreadTeam& team,
                     int threads) {
  const Clearing clearing(context.problem, context.buffers);
  const int64_t blocks = (LongestQuery(context.problem) + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t row_tasks = context.problem.batch * blocks;
  std::atomic<bool> are_complete = true;
  team.ParallelFor(row_tasks + clearing.num_tasks(), threads, [&](int64_t task, int thread) {
    if (task >= row_tasks) return clearing.Run(task - row_tasks);
    const RowBlock rows = {task / blocks, task % blocks * kRowsPerTask, kRowsPerTask};
    if (!StartRows(context, rows, plan.ScratchOf(thread))) are_complete = false;
  });
  if (are_complete) return absl::OkStatus();
  SharedStatus status;
  team.ParallelFor(plan.num_query_tiles(), threads, [&](int64_t task, int thread) {
    status.Update(NormalizeRows(context, plan.QueryTileAt(task), plan.ScratchOf(thread)));
  });
  return status.Get();
}

absl::Status ComputeGradients(const BackwardContext& context, const BackwardPlanner& plan,
                              ThreadTeam& team, int threads) {
  const BackwardBuffers& b = context.buffers;
  const int64_t keys = plan.num_key_blocks();
  const int64_t queries = keys + plan.num_query_tiles();
  const int64_t biases = queries + (b.d_bias == nullptr ? 0 : plan.num_bias_blocks());
  const bool has_sink = context.problem.softmax_offset && b.d_softmax_offset != nullptr;
  SharedStatus status;
  team.ParallelFor(
      biases + (has_sink ? context.problem.num_heads : 0), threads, [&](int64_t task, int thread) {
        const GradientScratch scratch = plan.ScratchOf(thread);
        if (task < keys) {
          status.Update(ComputeKeyGradients(context, plan.KeyBlockAt(task), scratch));
        } else if (task < queries) {
          status.Update(ComputeQueryGradients(context, plan.QueryTileAt(task - keys), scratch));
        } else if (task < biases) {
          status.Update(ComputeBiasGradients(context, plan.BiasBlockAt(task - queries), scratch));
        } else {
          ComputeSinkGradient(context, task - biases);
        }
      });
  return status.Get();
}

}  // namespace

int64_t TiledBackwardWorkspaceBytes(const AttentionProblem& problem, int threads) {
  return BackwardPlanner(problem, threads).workspace_bytes();
}

absl::Status TiledBackward(const AttentionProblem& problem, const BackwardBuffers& buffers,
                           ThreadTeam& team) {
  BackwardPlanner plan(problem, team.size());
  if (static_cast<int64_t>(buffers.workspace.size()) < plan.workspace_bytes()) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the workspace is smaller than the plan asked for");
  }
  plan.Bind(buffers.workspace);
  if (buffers.amax != nullptr) std::fill_n(buffers.amax, 4, 0.0f);
  const BackwardContext context = {problem, buffers, InputsOf(buffers), plan.rows()};
  const int threads = WorthwhileThreads(problem, kProducts, team.size());
  ATTND_RETURN_IF_ERROR(Prepare(context, plan, team, threads));
  return ComputeGradients(context, plan, team, threads);
}

}  // namespace attnd
