// Small requests to an engine, and waiting for what it answers.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <random>
#include <utility>

#include "engine/engine.h"
#include "engine/engine_parts.h"

namespace attnd {

// Self attention of 2 sequences with 2 heads of 8.
inline ForwardDescription Bs3hd(int64_t s, DType dtype = DType::kFloat32) {
  ForwardDescription d;
  d.spec.layout = Layout::kBs3hd;
  d.spec.dtype = dtype;
  d.inputs.buffers[static_cast<int>(Buffer::kQkv)] = TensorDesc{dtype, {2, s, 3, 2, 8}};
  d.return_lse = true;
  return d;
}

// One query row against 6 keys on pages of 4.
inline ForwardDescription Paged() {
  ForwardDescription d;
  d.spec.layout = Layout::kPagedKvThdBshdBshd;
  d.spec.dtype = DType::kFloat32;
  d.inputs.buffers[static_cast<int>(Buffer::kQ)] = TensorDesc{DType::kFloat32, {1, 2, 8}};
  d.inputs.buffers[static_cast<int>(Buffer::kK)] = TensorDesc{DType::kFloat32, {3, 4, 1, 8}};
  d.inputs.buffers[static_cast<int>(Buffer::kV)] = TensorDesc{DType::kFloat32, {3, 4, 1, 8}};
  d.sequences.cu_seqlens_q = {0, 1};
  d.sequences.cu_seqlens_kv = {0, 6};
  d.sequences.page_table_k = TensorDesc{DType::kInt32, {1, 2}};
  d.sequences.page_table_v = TensorDesc{DType::kInt32, {1, 2}};
  return d;
}

inline std::unique_ptr<Engine> MakeCpuEngine() {
  auto chosen = MakeEngineParts(
      {.use_gpu = false, .threads = 2, .queue_bytes = 32 << 20, .host_pool_bytes = 64 << 20});
  return *Engine::Make(std::move(chosen->parts));
}

inline absl::StatusOr<PreparedForward> TryPrepare(Engine& engine, const ForwardDescription& d,
                                                  RequestContext context = {}) {
  absl::StatusOr<AttentionProblem> problem = engine.Check(d);
  if (!problem.ok()) return problem.status();
  std::promise<absl::StatusOr<PreparedForward>> promise;
  engine.Prepare(
      *std::move(problem), d.return_lse, std::move(context),
      [&](absl::StatusOr<PreparedForward> prepared) { promise.set_value(std::move(prepared)); });
  return promise.get_future().get();
}

inline absl::StatusOr<PlanReport> PlanOf(Engine& engine, const ForwardDescription& d) {
  std::promise<absl::StatusOr<PlanReport>> promise;
  engine.Plan(d, [&](absl::StatusOr<PlanReport> report) { promise.set_value(std::move(report)); });
  return promise.get_future().get();
}

// FLOAT32 inputs of unit variance; other dtypes get the same values' bits.
inline void FillWithNoise(PreparedForward& prepared) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    const auto bytes = prepared.input(static_cast<Buffer>(i));
    auto* values = reinterpret_cast<float*>(bytes.data());
    for (size_t j = 0; j < bytes.size() / sizeof(float); ++j) values[j] = normal(random);
  }
}

inline absl::StatusOr<ForwardResult> RunPrepared(Engine& engine, PreparedForward prepared) {
  std::promise<absl::StatusOr<ForwardResult>> promise;
  engine.Submit(std::move(prepared),
                [&](absl::StatusOr<ForwardResult> r) { promise.set_value(std::move(r)); });
  return promise.get_future().get();
}

}  // namespace attnd
