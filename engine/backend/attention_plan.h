// A plan: everything compiled for one spec and geometry. Pointers and numbers come at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/backend/device_queue.h"
#include "engine/core/attention_problem.h"
#include "engine/core/request_context.h"

namespace attnd {

// Memory of one forward call, in the backend's address space. Nothing here is owned.
struct ForwardBuffers {
  // Indexed by Buffer; null where the problem has no such buffer, or it has no elements.
  std::array<const std::byte*, kNumInputBuffers> inputs{};
  const std::byte* bias = nullptr;        // By the problem's bias_strides.
  const float* softmax_offset = nullptr;  // [h]
  // INT32 [b, pages_per_sequence], checked by CheckPageTable; null unless paged.
  const int32_t* page_table_k = nullptr;
  const int32_t* page_table_v = nullptr;
  // Shaped as the problem's out_desc and lse_desc. lse may be null: not wanted.
  std::byte* out = nullptr;
  float* lse = nullptr;
  // Largest |P| (before dropout) and |O| (before scale_o) of finite ones in rows of a sequence; 0
  // where there are none. Null: not wanted.
  float* amax = nullptr;
  // At least AttentionPlan::workspace_bytes() bytes, 64-byte aligned; contents undefined.
  std::span<std::byte> workspace;
  // May be null. Once it is cancelled, Forward may end early with CANCELLED and the outputs
  // undefined.
  const CancellationToken* cancellation = nullptr;
  // One of the backend's queues; null where AttentionBackend::MakeQueue gives none.
  DeviceQueue* queue = nullptr;
};

// Memory of one backward call, as in ForwardBuffers.
struct BackwardBuffers {
  std::array<const std::byte*, kNumInputBuffers> inputs{};
  const std::byte* bias = nullptr;
  const float* softmax_offset = nullptr;
  // What forward returned, and the gradient of its O: shaped as out_desc and lse_desc. Rows outside
  // the sequences may hold anything.
  const std::byte* out = nullptr;
  const float* lse = nullptr;
  const std::byte* d_out = nullptr;
  // Shaped as the inputs, indexed by Buffer: gradients lie exactly as Q, K and V do.
  std::array<std::byte*, kNumInputBuffers> grads{};
  std::byte* d_bias = nullptr;        // Shaped as the bias, in dtype.
  float* d_softmax_offset = nullptr;  // [h]
  // As in ForwardBuffers: of the gradient of q.k (scale * P * (dP - D), through a soft cap), and of
  // dQ, dK and dV before their scales.
  float* amax = nullptr;
  std::span<std::byte> workspace;
  const CancellationToken* cancellation = nullptr;
  DeviceQueue* queue = nullptr;
};

// Which calls may run as one: those of equal keys, as long as their slots together are at most
// max_slots.
struct JoinTerms {
  std::string key;  // Everything that the joint run bakes in. Empty: the call runs alone.
  int64_t slots = 1;
  int64_t max_slots = 1;
};

// A call as a joint run takes it: what its plan's Forward or Backward would be given. The problem
// must outlive the run.
struct ForwardCall {
  const AttentionProblem* problem = nullptr;
  ForwardBuffers buffers;
};
struct BackwardCall {
  const AttentionProblem* problem = nullptr;
  BackwardBuffers buffers;
};

// Calls that run as one, each with the bits that it has alone. Made for one run.
class JointRun {
 public:
  virtual ~JointRun() = default;

  // What the run needs beside the calls' own workspaces, in the backend's address space.
  virtual int64_t workspace_bytes() const = 0;

  // As Forward or Backward of each call. After an error the outputs of all are undefined, and the
  // calls may run alone.
  virtual absl::Status Run(std::span<std::byte> workspace, DeviceQueue* queue) = 0;
};

// Used by one thread at a time.
class CallPlan {
 public:
  virtual ~CallPlan() = default;

  // Kernel family, for ExecutionInfo.engine.
  virtual std::string_view engine() const = 0;

  virtual int64_t workspace_bytes() const = 0;

  virtual JoinTerms join_terms() const { return {}; }
};

class BackwardPlan : public CallPlan {
 public:
  // Writes every element of the gradients: 0 in rows outside the sequences, in fully masked rows
  // and in bias cells that no pair of a query and a key uses, whatever the inputs hold there.
  // Otherwise as AttentionPlan::Forward.
  virtual absl::Status Backward(const AttentionProblem& problem,
                                const BackwardBuffers& buffers) = 0;

  // As AttentionPlan::Join.
  virtual std::unique_ptr<JointRun> Join(std::span<const BackwardCall>) { return nullptr; }
};

class AttentionPlan : public CallPlan {
 public:
  // Writes every element of out (and lse): rows outside the sequences and fully masked rows get
  // O = 0 and LSE = -inf, whatever the inputs hold there. `problem` is the one the plan was built
  // for, or one that differs in what a plan does not bake in (scale, lengths within the geometry).
  // With a queue it enqueues all that, and it is done when the queue's Wait returns.
  virtual absl::Status Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) = 0;

  // Two calls or more, of plans with this plan's key, within max_slots. Null: they run alone.
  virtual std::unique_ptr<JointRun> Join(std::span<const ForwardCall>) { return nullptr; }
};

}  // namespace attnd
