// The tiled kernels: attention and its gradients in float32 arithmetic, for every type, layout and
// parameter, with one order of every sum. Each launcher enqueues on a stream and returns the first
// launch's error; all pointers are device pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/core/attention_spec.h"
#include "engine/core/dtype.h"
#include "engine/core/tensor_view.h"
#include "engine/cuda/tiled_dropout.h"
#include "engine/cuda/tiled_tasks.h"

namespace attnd::tiled {

inline constexpr int64_t kMaxHeadDim = 256;

// A tensor as TensorView has it, at `data`. Real values are `factor` times what is stored.
struct Matrix {
  const std::byte* data = nullptr;
  Strides strides;
  int64_t start_multiplier = 0;
  int64_t group_heads = 0;  // 0: no groups.
  int64_t group_stride = 0;
  DType dtype = DType::kUnspecified;
  float factor = 1;
};

// Where a tensor is written that lies as some Matrix does: `factor` times the real values.
struct Target {
  std::byte* data = nullptr;
  DType dtype = DType::kUnspecified;
  float factor = 1;
  float* amax = nullptr;  // Raised to the largest finite magnitude of real values, unless null.
};

// Passed to every kernel by value.
struct Problem {
  const Sequence* sequences = nullptr;  // [batch]
  int64_t batch = 0;
  TaskCounts tasks;
  Heads heads;
  int head_dim_qk = 0;
  int head_dim_v = 0;
  Matrix q, k, v;
  Matrix out;   // Of the forward pass.
  Strides lse;  // batch is 0 where Q is THD.

  // Null unless paged: INT32 [batch, pages_per_sequence].
  const int32_t* pages_k = nullptr;
  const int32_t* pages_v = nullptr;
  int64_t page_size = 0;
  int64_t pages_per_sequence = 0;

  Band band;
  float scale = 1;
  float softcap = 0;  // 0: none.
  // The same as the request has them, for cells in double.
  double exact_scale = 1;
  double exact_softcap = 0;
  BiasKind bias_kind = BiasKind::kNone;
  const std::byte* bias = nullptr;  // In the type of Q.
  Strides bias_strides;
  const float* alibi_slopes = nullptr;  // [heads]
  SoftmaxKind softmax_kind = SoftmaxKind::kVanilla;
  const float* softmax_offset = nullptr;  // [heads]
  DropoutCall dropout;
};

struct ForwardTargets {
  Target out;
  float* lse = nullptr;     // Null: not wanted.
  float* amax_s = nullptr;  // Null: not wanted.
};

// O and LSE of every row of a sequence, and of no other.
cudaError_t LaunchForward(const Problem& problem, const ForwardTargets& targets,
                          cudaStream_t stream);

// lse[0 .. count - 1] = -inf
cudaError_t FillLse(float* lse, int64_t count, cudaStream_t stream);

// What backward starts from in a row: P = exp(logit - shift) * inverse_sum.
struct RowStatistics {
  double shift;  // -inf: the row has no gradients.
  double d;      // sum of dO * O
  float inverse_sum;
  bool is_exact;  // Float32 does not hold the row's logits: its cells are computed in double.
};

struct Gradients {
  Matrix d_out;  // Lies as Problem::out.
  const float* lse = nullptr;
  RowStatistics* rows = nullptr;  // Scratch of LSE's shape.
  Target dq, dk, dv;
  std::byte* d_bias = nullptr;        // Null: not wanted.
  int64_t bias_shape[4] = {};         // Of d_bias.
  float* d_softmax_offset = nullptr;  // [heads]; null: not wanted.
  float* amax_dp = nullptr;           // Null: not wanted.
};

// dQ of rows that see a key, dK and dV of every key of a sequence, all of d_bias and
// d_softmax_offset. Nothing is paged.
cudaError_t LaunchBackward(const Problem& problem, const Gradients& gradients, cudaStream_t stream);

}  // namespace attnd::tiled
