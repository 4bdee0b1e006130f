#include "engine/cpu/tiled_attention.h"

#include <algorithm>

#include "engine/core/status.h"
#include "engine/cpu/team_call.h"
#include "engine/cpu/tile_output.h"
#include "engine/cpu/tile_plan.h"
#include "engine/cpu/tile_worker.h"

namespace attnd {
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

  if (buffers.amax != nullptr) std::fill_n(buffers.amax, 2, 0.0f);
  const TileContext context = {problem, buffers};
  const int64_t tasks = plan.num_tasks();
  const int threads = WorthwhileThreads(problem, 1, team.size());
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
