#include "engine/cpu/tiled_attention.h"

#include <algorithm>
#include <mutex>

#include "engine/core/status.h"
#include "engine/cpu/tile_output.h"
#include "engine/cpu/tile_plan.h"
#include "engine/cpu/tile_worker.h"

namespace attnd {
namespace {

// The first error of any thread.
class SharedStatus {
 public:
  void Update(const absl::Status& status) {
    if (status.ok()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    status_.Update(status);
  }
  absl::Status Get() const { return status_; }

 private:
  std::mutex mutex_;
  absl::Status status_;
};

// So many operations take one thread some 30 us; waking another was measured to take 4 to 10 us.
constexpr double kFlopsPerThread = 4e6;

// Threads that the call is worth: it depends on the request alone.
int WorthwhileThreads(const AttentionProblem& problem, int threads) {
  double pairs = 0;
  for (const SequenceExtent& extent : problem.sequences) {
    pairs += static_cast<double>(extent.q_len) * static_cast<double>(extent.kv_len);
  }
  const double flops = 2 * pairs * static_cast<double>(problem.num_heads) *
                       static_cast<double>(problem.head_dim_qk + problem.head_dim_v);
  return static_cast<int>(std::clamp(flops / kFlopsPerThread, 1.0, static_cast<double>(threads)));
}

}  // namespace

int64_t TiledWorkspaceBytes(const AttentionProblem& problem, int threads) {
  return TilePlan(problem, threads).workspace_bytes();
}

absl::Status TiledForward(const AttentionProblem& problem, const ForwardBuffers& buffers,
                          ThreadTeam& team) {
  TilePlan plan(problem, team.size());
  if (static_cast<int64_t>(buffers.workspace.size()) < plan.workspace_bytes()) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the workspace is smaller than the plan asked for");
  }
  plan.Bind(buffers.workspace);

  const TileContext context = {problem, buffers};
  const int64_t tasks = plan.num_tasks();
  const int threads = WorthwhileThreads(problem, team.size());
  SharedStatus status;
  team.ParallelFor(tasks + plan.num_unowned_blocks(), threads, [&](int64_t task, int thread) {
    if (task < tasks) {
      status.Update(ComputeTile(context, plan.TaskAt(task), plan.ScratchOf(thread)));
    } else {
      ClearRows(context, plan.UnownedAt(task - tasks));
    }
  });
  ATTND_RETURN_IF_ERROR(status.Get());
  if (plan.has_partials()) {
    team.ParallelFor(tasks, threads, [&](int64_t task, int) {
      const Tile tile = plan.TaskAt(task);
      if (tile.num_chunks > 1 && tile.chunk == 0) MergeChunks(context, tile);
    });
  }
  return absl::OkStatus();
}

}  // namespace attnd
