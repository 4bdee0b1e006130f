// Small requests to an engine, and waiting for what it answers.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <random>
#include <utility>

#include "engine/engine.h"
#include "engine/engine_parts.h"

namespace attnd {

// Self attention of 2 sequences with 2 heads of 8.
inline CallDescription Bs3hd(int64_t s, DType dtype = DType::kFloat32) {
  CallDescription d;
  d.spec.layout = Layout::kBs3hd;
  d.spec.dtype = dtype;
  d.inputs.buffers[static_cast<int>(Buffer::kQkv)] = TensorDesc{dtype, {2, s, 3, 2, 8}};
  d.return_lse = true;
  return d;
}

// One query row against 6 keys on pages of 4.
inline CallDescription Paged() {
  CallDescription d;
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

// Bs3hd with a learnable sink for each of the 2 heads.
inline CallDescription WithSinks(int64_t s) {
  CallDescription d = Bs3hd(s);
  d.spec.softmax_kind = SoftmaxKind::kLearnable;
  d.inputs.softmax_offset = TensorDesc{DType::kFloat32, {2}};
  return d;
}

// What no sink may be.
inline constexpr float kNoSinks[] = {std::numeric_limits<float>::infinity(),
                                     std::numeric_limits<float>::quiet_NaN()};

inline void SetSinks(PreparedCall& prepared, const std::array<float, 2>& sinks) {
  const auto bytes = prepared.input(Piece::kSoftmaxOffset);
  ASSERT_EQ(bytes.size(), sizeof(sinks));
  std::memcpy(bytes.data(), sinks.data(), sizeof(sinks));
}

inline std::unique_ptr<Engine> MakeCpuEngine() {
  auto chosen = MakeEngineParts(
      {.use_gpu = false, .threads = 2, .queue_bytes = 32 << 20, .host_pool_bytes = 64 << 20});
  return *Engine::Make(std::move(chosen->parts));
}

inline absl::StatusOr<PreparedCall> TryPrepare(Engine& engine, const CallDescription& d,
                                               RequestContext context = {}) {
  absl::StatusOr<CheckedCall> call = engine.Check(d);
  if (!call.ok()) return call.status();
  std::promise<absl::StatusOr<PreparedCall>> promise;
  engine.Prepare(*std::move(call), std::move(context), [&](absl::StatusOr<PreparedCall> prepared) {
    promise.set_value(std::move(prepared));
  });
  return promise.get_future().get();
}

inline absl::StatusOr<PlanReport> PlanOf(Engine& engine, const CallDescription& d) {
  std::promise<absl::StatusOr<PlanReport>> promise;
  engine.Plan(d, [&](absl::StatusOr<PlanReport> report) { promise.set_value(std::move(report)); });
  return promise.get_future().get();
}

// FLOAT32 inputs of unit variance; other dtypes get the same values' bits.
inline void FillWithNoise(PreparedCall& prepared) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    const auto bytes = prepared.input(static_cast<Piece>(i));
    auto* values = reinterpret_cast<float*>(bytes.data());
    for (size_t j = 0; j < bytes.size() / sizeof(float); ++j) values[j] = normal(random);
  }
}

inline absl::StatusOr<CallResult> RunPrepared(Engine& engine, PreparedCall prepared) {
  std::promise<absl::StatusOr<CallResult>> promise;
  engine.Submit(std::move(prepared),
                [&](absl::StatusOr<CallResult> r) { promise.set_value(std::move(r)); });
  return promise.get_future().get();
}

}  // namespace attnd
