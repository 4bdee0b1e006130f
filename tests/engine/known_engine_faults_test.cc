// Faults that public projects for fused attention have shipped, where the whole engine takes part:
// the sizes of their reports, and several devices. tests/engine/cpu has the others.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/core/status.h"
#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/random_elements.h"
#include "tests/engine/engine_requests.h"
#include "tests/engine/fake_device.h"

namespace attnd {
namespace {

constexpr DType kDtype = DType::kBFloat16;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kFewer = 8;  // Sanitizers make everything many times slower.
#else
constexpr int64_t kFewer = 1;
#endif

std::unique_ptr<Engine> MakeEngine(int64_t pool_bytes, int threads) {
  EngineParts parts;
  parts.host_pool = MakeHostPool(pool_bytes, "--pinned-pool");
  parts.queue_bytes = pool_bytes;
  parts.targets.push_back({.backend = std::make_unique<CpuBackend>(threads)});
  return *Engine::Make(std::move(parts));
}

struct Sizes {
  int64_t b, s, h, d;
};

CallDescription SelfAttention(const Sizes& n) {
  CallDescription call;
  call.spec.layout = Layout::kBs3hd;
  call.spec.dtype = kDtype;
  call.inputs.buffers[static_cast<int>(Buffer::kQkv)] = TensorDesc{kDtype, {n.b, n.s, 3, n.h, n.d}};
  return call;
}

// With O, LSE and dO of the shapes that such a Forward returns.
CallDescription BackwardOf(CallDescription call, const Sizes& n) {
  const TensorDesc out{kDtype, {n.b, n.s, n.h, n.d}};
  call.pass = Pass::kBackward;
  call.backward = {out, TensorDesc{DType::kFloat32, {n.b, n.h, n.s}}, out};
  return call;
}

// The same million numbers of unit variance again and again.
void Fill(std::span<std::byte> bytes, uint64_t seed) {
  const auto pattern = testing::Narrow(kDtype, testing::Random(1'000'003, seed));
  for (size_t at = 0; at < bytes.size(); at += pattern.size()) {
    std::memcpy(&bytes[at], pattern.data(), std::min(pattern.size(), bytes.size() - at));
  }
}

// The name that it was retained under.
std::string RunForward(Engine& engine, CallDescription call) {
  call.retain = absl::Hours(1);
  absl::StatusOr<PreparedCall> prepared = TryPrepare(engine, call);
  EXPECT_TRUE(prepared.ok()) << prepared.status();
  Fill(prepared->input(Piece::kQkv), 1);
  const auto result = RunPrepared(engine, *std::move(prepared));
  EXPECT_TRUE(result.ok()) << result.status();
  return result->context;
}

absl::StatusOr<CallResult> RunBackward(Engine& engine, const std::string& context, const Sizes& n) {
  CallDescription call;
  call.pass = Pass::kBackward;
  call.context = context;
  call.backward.d_out = TensorDesc{kDtype, {n.b, n.s, n.h, n.d}};
  absl::StatusOr<PreparedCall> prepared = TryPrepare(engine, call);
  if (!prepared.ok()) return prepared.status();
  Fill(prepared->input(Piece::kOutGradient), 2);
  return RunPrepared(engine, *std::move(prepared));
}

TEST(KnownEngineFaults, D9_GradientsHaveTheSameBitsInEveryRun) {
  const Sizes sizes{8, 512 / kFewer, 8, 64};
  CallDescription call = SelfAttention(sizes);
  call.spec.deterministic = true;
  std::vector<std::byte> want;
  for (const int threads : {2, 1, 3}) {
    const auto engine = MakeEngine(int64_t{1} << 30, threads);
    const std::string context = RunForward(*engine, call);
    for (int run = threads == 2 ? 0 : 4; run < 5; ++run) {
      const auto result = RunBackward(*engine, context, sizes);
      ASSERT_TRUE(result.ok()) << result.status();
      const std::span<const std::byte> got = result->bytes(Piece::kQkv);
      if (want.empty()) want.assign(got.begin(), got.end());
      EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end())) << threads;
    }
  }
}

// Refused by its true size, and before anything is allocated; in 32 bits it would fit.
void ExpectTooLarge(const CallDescription& call, int64_t bytes) {
  const auto engine = MakeEngine(int64_t{1} << 30, 1);
  const absl::Status status = TryPrepare(*engine, call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(engine->host_pool().stats().high_water_bytes, 0);
  if (call.pass == Pass::kBackward) return;  // Plan takes no backward tensors.
  const absl::StatusOr<PlanReport> report = PlanOf(*engine, call);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->support.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GE(report->device_bytes, bytes);
}

TEST(KnownEngineFaults, D10_HugeBiasIsRefusedByItsSize) {
  const Sizes sizes{2, 33'280, 1, 8};
  CallDescription call = SelfAttention(sizes);
  call.spec.bias_kind = BiasKind::kPostScale;
  call.inputs.bias = TensorDesc{kDtype, {2, 1, 33'280, 33'280}};
  const int64_t bias_bytes = int64_t{2} * 33'280 * 33'280 * 2;
  ExpectTooLarge(call, bias_bytes);
  ExpectTooLarge(BackwardOf(call, sizes), bias_bytes);
}

TEST(KnownEngineFaults, D12_ManyHeadsAreRefusedByTheirSize) {
  const Sizes sizes{1600, 16, 729, 72};
  const int64_t out_bytes = int64_t{1600} * 16 * 729 * 72 * 2;
  ExpectTooLarge(SelfAttention(sizes), 4 * out_bytes);
  ExpectTooLarge(BackwardOf(SelfAttention(sizes), sizes), 8 * out_bytes);
}

// Of one query and one key each: O = V, dV = dO, dQ = dK = 0.
TEST(KnownEngineFaults, D12_ManySequencesHaveGradients) {
  const Sizes sizes{8300 / (kFewer * kFewer), 1, 16, 128};
  const auto engine = MakeEngine(int64_t{1} << 30, 2);
  const std::string context = RunForward(*engine, SelfAttention(sizes));
  const auto result = RunBackward(*engine, context, sizes);
  ASSERT_TRUE(result.ok()) << result.status();
  const std::byte* grads = result->bytes(Piece::kQkv).data();
  const int64_t row = sizes.h * sizes.d;
  std::vector<std::byte> d_out(static_cast<size_t>(sizes.b * row * SizeOf(kDtype)));
  Fill(d_out, 2);
  const auto row_bytes = static_cast<size_t>(row * SizeOf(kDtype));
  for (int64_t i = 0; i < sizes.b; ++i) {
    const std::byte* of_sequence = grads + static_cast<size_t>(i) * 3 * row_bytes;
    const std::byte* want = &d_out[static_cast<size_t>(i) * row_bytes];
    ASSERT_EQ(std::memcmp(of_sequence + 2 * row_bytes, want, row_bytes), 0) << i;
    for (int64_t k = i % 37; k < 2 * row; k += 37) {
      ASSERT_LT(std::abs(LoadElement(kDtype, of_sequence, k)), 1e-3) << i;
    }
  }
}

// FakeDevice fails the test where a plan gets memory of another device.
TEST(KnownEngineFaults, E8_EachDeviceHasItsOwnPlans) {
  std::vector<std::unique_ptr<FakeDevice>> devices;
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<int> builds(2);
  for (size_t i = 0; i < 2; ++i) {
    devices.push_back(std::make_unique<FakeDevice>(1 << 20));
    devices[i]->before_build = [&builds, i] { ++builds[i]; };
    EngineParts parts;
    parts.host_pool = MakeHostPool(1 << 20, "--pinned-pool");
    parts.queue_bytes = 1 << 20;
    parts.targets.push_back({.backend = std::make_unique<FakeDeviceBackend>(*devices[i]),
                             .device_pool = devices[i]->MakePool()});
    engines.push_back(*Engine::Make(std::move(parts)));
  }
  devices[1]->is_wrong = true;
  for (int run = 0; run < 3; ++run) {
    std::vector<float> first;
    for (const auto& engine : engines) {
      absl::StatusOr<PreparedCall> prepared = TryPrepare(*engine, Bs3hd(5));
      ASSERT_TRUE(prepared.ok()) << prepared.status();
      FillWithNoise(*prepared);
      const auto result = RunPrepared(*engine, *std::move(prepared));
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->report.plan_cache_hit, run > 0);
      first.push_back(*reinterpret_cast<const float*>(result->bytes(Piece::kOut).data()));
    }
    EXPECT_NEAR(first[1] - first[0], 1000, 1e-2);  // By which the second device is wrong.
  }
  EXPECT_EQ(builds, std::vector<int>({1, 1}));
}

}  // namespace
}  // namespace attnd
