// The engine as the server uses it: check, prepare, fill, submit, drain.

#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <limits>

#include "absl/time/clock.h"
#include "engine/core/status.h"
#include "engine/cpu/reference_attention.h"
#include "tests/engine/engine_requests.h"

namespace attnd {
namespace {

class EngineTest : public ::testing::Test {
 protected:
  PreparedCall Prepare(const CallDescription& d, RequestContext context = {}) {
    absl::StatusOr<PreparedCall> prepared = TryPrepare(*engine_, d, std::move(context));
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    FillWithNoise(*prepared);
    return *std::move(prepared);
  }

  absl::StatusOr<CallResult> Run(PreparedCall prepared) {
    return RunPrepared(*engine_, std::move(prepared));
  }

  const std::unique_ptr<Engine> engine_ = MakeCpuEngine();
};

TEST_F(EngineTest, ForwardEqualsTheReferenceLoop) {
  const CallDescription d = Bs3hd(33);
  PreparedCall prepared = Prepare(d);
  const AttentionProblem problem = prepared.problem();
  std::vector<std::byte> qkv(prepared.input(Piece::kQkv).begin(),
                             prepared.input(Piece::kQkv).end());
  absl::StatusOr<CallResult> result = Run(std::move(prepared));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->layout.desc(Piece::kOut)->shape, (std::vector<int64_t>{2, 33, 2, 8}));
  EXPECT_EQ(result->layout.desc(Piece::kLse)->shape, (std::vector<int64_t>{2, 2, 33}));

  std::vector<float> out(2 * 33 * 2 * 8), lse(2 * 2 * 33);
  ForwardBuffers buffers;
  buffers.inputs[static_cast<int>(Buffer::kQkv)] = qkv.data();
  buffers.out = reinterpret_cast<std::byte*>(out.data());
  buffers.lse = lse.data();
  ASSERT_TRUE(ReferenceForward(problem, buffers).ok());
  const auto* got = reinterpret_cast<const float*>(result->bytes(Piece::kOut).data());
  for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(got[i], out[i], 1e-5) << i;
  const auto* got_lse = reinterpret_cast<const float*>(result->bytes(Piece::kLse).data());
  for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(got_lse[i], lse[i], 1e-5) << i;
}

TEST_F(EngineTest, MemoryGoesBackToThePool) {
  { auto result = Run(Prepare(Bs3hd(16))); }
  EXPECT_EQ(engine_->host_pool().stats().in_use_bytes, 0);
  EXPECT_GT(engine_->host_pool().stats().high_water_bytes, 0);
}

TEST_F(EngineTest, APageOutsideThePoolIsRefusedBeforeAnythingRuns) {
  for (int32_t bad : {-1, 3}) {
    for (bool in_v : {false, true}) {
      PreparedCall prepared = Prepare(Paged());
      for (auto table :
           {prepared.page_table(Piece::kPageTableK), prepared.page_table(Piece::kPageTableV)}) {
        table[0] = 2;
        table[1] = 0;
      }
      (in_v ? prepared.page_table(Piece::kPageTableV)
            : prepared.page_table(Piece::kPageTableK))[1] = bad;
      const absl::Status status = Run(std::move(prepared)).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorField(status), in_v ? "sequences.page_table_v" : "sequences.page_table_k");
    }
  }
}

TEST_F(EngineTest, ASinkThatIsNoNumberIsRefusedBeforeAnythingRuns) {
  for (float bad : kNoSinks) {
    PreparedCall prepared = Prepare(WithSinks(4));
    SetSinks(prepared, {0.5f, bad});
    const absl::Status status = Run(std::move(prepared)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorField(status), "softmax_offset");
  }
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.succeeded + stats.failed, 0);
}

TEST_F(EngineTest, ASinkOfMinusInfinityIsNone) {
  PreparedCall prepared = Prepare(WithSinks(4));
  const float none = -std::numeric_limits<float>::infinity();
  SetSinks(prepared, {none, none});
  const auto got = Run(std::move(prepared));
  const auto want = Run(Prepare(Bs3hd(4)));
  ASSERT_TRUE(got.ok() && want.ok()) << got.status() << want.status();
  for (Piece piece : {Piece::kOut, Piece::kLse}) {
    EXPECT_TRUE(std::ranges::equal(got->bytes(piece), want->bytes(piece)));
  }
}

TEST_F(EngineTest, EntriesPastASequenceAreNotRead) {
  CallDescription d = Paged();
  d.sequences.cu_seqlens_kv = {0, 4};
  PreparedCall prepared = Prepare(d);
  for (auto table :
       {prepared.page_table(Piece::kPageTableK), prepared.page_table(Piece::kPageTableV)}) {
    table[0] = 2;
    table[1] = -7;
  }
  EXPECT_TRUE(Run(std::move(prepared)).ok());
}

TEST_F(EngineTest, DeadAndCancelledRequestsDoNotRun) {
  EXPECT_EQ(
      TryPrepare(*engine_, Bs3hd(4), {.deadline = absl::Now() - absl::Seconds(1)}).status().code(),
      absl::StatusCode::kDeadlineExceeded);
  auto token = std::make_shared<CancellationToken>();
  PreparedCall prepared = Prepare(Bs3hd(4), {.cancellation = token});
  token->Cancel(CancellationToken::Cause::kClient);
  EXPECT_EQ(Run(std::move(prepared)).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(engine_->host_pool().stats().in_use_bytes, 0);
}

// Page tables count, and what a dead request in the queue holds makes room.
TEST_F(EngineTest, EverythingARequestHoldsIsThePools) {
  const CallDescription d = Paged();
  const PreparedCall prepared = Prepare(d);
  const int64_t with_tables = engine_->host_pool().stats().in_use_bytes;
  EXPECT_EQ(prepared.page_table(Piece::kPageTableK).size(), 2u);
  EXPECT_EQ(prepared.page_table(Piece::kPageTableV).size(), 2u);
  EXPECT_GE(with_tables, PlanOf(*engine_, d)->device_bytes);
}

TEST_F(EngineTest, DeadWorkInTheQueueMakesRoomInThePool) {
  // Busy, then half of the pool in the queue, dead; then more than what is left.
  CallDescription busy;
  busy.spec.layout = Layout::kBshdBshdBshd;
  busy.spec.dtype = DType::kFloat32;
  for (Buffer b : {Buffer::kQ, Buffer::kK, Buffer::kV}) {
    busy.inputs.buffers[static_cast<int>(b)] = TensorDesc{DType::kFloat32, {1, 40'000, 2, 8}};
  }
  auto token = std::make_shared<CancellationToken>();
  auto dead = std::make_shared<CancellationToken>();
  PreparedCall running = Prepare(busy, {.cancellation = token});
  PreparedCall queued = Prepare(Bs3hd(60'000), {.cancellation = dead});
  engine_->Submit(std::move(running), [](absl::StatusOr<CallResult>) {});
  absl::SleepFor(absl::Milliseconds(20));
  std::promise<absl::Status> ended;
  engine_->Submit(std::move(queued),
                  [&](absl::StatusOr<CallResult> r) { ended.set_value(r.status()); });
  const CallDescription next = Bs3hd(60'000);
  EXPECT_EQ(TryPrepare(*engine_, next).status().code(), absl::StatusCode::kResourceExhausted);
  dead->Cancel(CancellationToken::Cause::kClient);
  EXPECT_TRUE(TryPrepare(*engine_, next).ok());
  EXPECT_EQ(ended.get_future().get().code(), absl::StatusCode::kCancelled);
  token->Cancel(CancellationToken::Cause::kClient);
}

TEST_F(EngineTest, ADrainPastItsDeadlineEndsWhatIsRunning) {
  CallDescription d;
  d.spec.layout = Layout::kBshdBshdBshd;
  d.spec.dtype = DType::kFloat32;
  for (Buffer b : {Buffer::kQ, Buffer::kK, Buffer::kV}) {
    d.inputs.buffers[static_cast<int>(b)] = TensorDesc{DType::kFloat32, {1, 50'000, 4, 16}};
  }
  std::promise<absl::Status> ended;
  engine_->Submit(Prepare(d), [&](absl::StatusOr<CallResult> r) { ended.set_value(r.status()); });
  absl::SleepFor(absl::Milliseconds(50));
  engine_->Drain(absl::Now());
  EXPECT_EQ(ended.get_future().get().code(), absl::StatusCode::kUnavailable);
}

TEST_F(EngineTest, PlanSaysWhatCanNeverFit) {
  const absl::StatusOr<PlanReport> report = PlanOf(*engine_, Bs3hd(1 << 20));
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->support.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(EngineTest, ThePoolRefusesWhatItCannotHold) {
  CallDescription d = Bs3hd(1 << 20);
  const absl::Status status = TryPrepare(*engine_, d).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->host_pool().stats().in_use_bytes, 0);
}

TEST_F(EngineTest, PlanAcceptsWhatForwardRuns) {
  CallDescription d = Bs3hd(16);
  absl::StatusOr<PlanReport> report = PlanOf(*engine_, d);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->support.ok());
  EXPECT_EQ(report->backend, "cpu");
  EXPECT_EQ(report->engine, "tiled");
  const int64_t tensors = 2 * 16 * 3 * 2 * 8 * 4 + 2 * 16 * 2 * 8 * 4 + 2 * 2 * 16 * 4;
  EXPECT_EQ(report->device_bytes, tensors + report->workspace_bytes);
  EXPECT_EQ(report->problem.v.byte_offset, 2 * 2 * 8 * 4);
}

TEST_F(EngineTest, PlanSaysWhatIsNotSupported) {
  CallDescription d = Bs3hd(16, DType::kFloat8E4M3);
  d.spec.bias_kind = BiasKind::kPreScale;
  d.inputs.bias = TensorDesc{DType::kFloat8E4M3, {1, 1, 16, 16}};
  absl::StatusOr<PlanReport> report = PlanOf(*engine_, d);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->support.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ErrorField(report->support), "spec.bias_kind");
  EXPECT_EQ(TryPrepare(*engine_, d).status().code(), absl::StatusCode::kUnimplemented);
}

// A few bytes of shape must not make the engine hold or compute much.
TEST_F(EngineTest, PlansOfAbsurdSizesAreAnsweredWithoutMemory) {
  CallDescription d;
  d.spec.layout = Layout::kBshdBshdBshd;
  d.spec.dtype = DType::kFloat32;
  d.spec.batch = 1 << 20;
  d.spec.max_seqlen_q = d.spec.max_seqlen_kv = int64_t{1} << 20;
  d.spec.num_heads = d.spec.num_kv_heads = 1 << 10;
  d.spec.head_dim_qk = d.spec.head_dim_v = 1 << 9;
  EXPECT_TRUE(PlanOf(*engine_, d).ok());
  d.spec.max_seqlen_kv = int64_t{1} << 62;
  EXPECT_EQ(PlanOf(*engine_, d).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(EngineTest, ADrainedEngineRefusesWithUnavailable) {
  PreparedCall late = Prepare(Bs3hd(4));
  EXPECT_TRUE(Run(Prepare(Bs3hd(4))).ok());
  engine_->Drain(absl::Now() + absl::Seconds(5));
  engine_->Drain(absl::Now());  // Twice does no harm.
  EXPECT_EQ(Run(std::move(late)).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace attnd
