// Gradients through the engine: everything sent again, or a context that the engine kept.

#include <gtest/gtest.h>

#include <cstring>

#include "absl/time/clock.h"
#include "engine/core/status.h"
#include "engine/cpu/cpu_backend.h"
#include "engine/cpu/reference_attention.h"
#include "tests/engine/engine_requests.h"

namespace attnd {
namespace {

CallDescription BackwardOf(const CallDescription& forward, const CallResult& result) {
  CallDescription d = forward;
  d.pass = Pass::kBackward;
  d.return_lse = false;
  d.backward = {*result.layout.desc(Piece::kOut), *result.layout.desc(Piece::kLse),
                *result.layout.desc(Piece::kOut)};
  return d;
}

void Copy(std::span<const std::byte> from, std::span<std::byte> to) {
  ASSERT_EQ(from.size(), to.size());
  std::memcpy(to.data(), from.data(), from.size());
}

std::vector<std::byte> Bytes(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

class EngineBackwardTest : public ::testing::Test {
 protected:
  EngineBackwardTest() {
    absl::StatusOr<PreparedCall> prepared = TryPrepare(*engine_, forward_);
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    FillWithNoise(*prepared);
    qkv_ = Bytes(prepared->input(Piece::kQkv));
    problem_ = prepared->problem();
    result_ = *RunPrepared(*engine_, *std::move(prepared));
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    d_out_.resize(result_.bytes(Piece::kOut).size() / sizeof(float));
    for (float& x : d_out_) x = normal(random);
  }

  std::vector<std::byte> Resent() {
    absl::StatusOr<PreparedCall> prepared = TryPrepare(*engine_, BackwardOf(forward_, result_));
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    Copy(qkv_, prepared->input(Piece::kQkv));
    Copy(result_.bytes(Piece::kOut), prepared->input(Piece::kOut));
    Copy(result_.bytes(Piece::kLse), prepared->input(Piece::kLse));
    Copy(std::as_bytes(std::span(d_out_)), prepared->input(Piece::kOutGradient));
    const auto result = RunPrepared(*engine_, *std::move(prepared));
    EXPECT_TRUE(result.ok()) << result.status();
    return Bytes(result->bytes(Piece::kQkv));
  }

  const CallDescription forward_ = Bs3hd(33);
  const std::unique_ptr<Engine> engine_ = MakeCpuEngine();
  AttentionProblem problem_;
  std::vector<std::byte> qkv_;
  CallResult result_;
  std::vector<float> d_out_;
};

TEST_F(EngineBackwardTest, ResentTensorsGiveTheReferenceLoopsGradients) {
  std::vector<std::byte> want(qkv_.size());
  BackwardBuffers buffers;
  buffers.inputs[static_cast<int>(Buffer::kQkv)] = qkv_.data();
  buffers.out = result_.bytes(Piece::kOut).data();
  buffers.lse = reinterpret_cast<const float*>(result_.bytes(Piece::kLse).data());
  buffers.d_out = reinterpret_cast<const std::byte*>(d_out_.data());
  buffers.grads[static_cast<int>(Buffer::kQkv)] = want.data();
  ASSERT_TRUE(ReferenceBackward(problem_, buffers).ok());
  const std::vector<std::byte> got = Resent();
  ASSERT_EQ(got.size(), want.size());
  const auto* a = reinterpret_cast<const float*>(got.data());
  const auto* b = reinterpret_cast<const float*>(want.data());
  for (size_t i = 0; i < got.size() / sizeof(float); ++i) ASSERT_NEAR(a[i], b[i], 2e-5) << i;
}

TEST_F(EngineBackwardTest, AContextNeedsNothingButTheGradientOfO) {
  CallDescription forward = forward_;
  forward.return_lse = false;
  forward.retain = absl::Seconds(60);
  absl::StatusOr<PreparedCall> prepared = TryPrepare(*engine_, forward);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  Copy(qkv_, prepared->input(Piece::kQkv));
  std::string context;
  {
    const auto result = RunPrepared(*engine_, *std::move(prepared));
    ASSERT_TRUE(result.ok()) << result.status();
    context = result->context;
  }
  ASSERT_FALSE(context.empty());
  CallDescription backward;
  backward.pass = Pass::kBackward;
  backward.context = context;
  backward.backward.d_out = *result_.layout.desc(Piece::kOut);
  for (int i = 0; i < 2; ++i) {
    absl::StatusOr<PreparedCall> call = TryPrepare(*engine_, backward);
    ASSERT_TRUE(call.ok()) << call.status();
    Copy(std::as_bytes(std::span(d_out_)), call->input(Piece::kOutGradient));
    const auto result = RunPrepared(*engine_, *std::move(call));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(Bytes(result->bytes(Piece::kQkv)), Resent());
  }
  backward.context += "0";
  EXPECT_FALSE(TryPrepare(*engine_, backward).ok());
}

TEST_F(EngineBackwardTest, AnExpiredContextIsAFailedPreconditionAndGivesItsMemoryBack) {
  result_ = CallResult();
  CallDescription forward = forward_;
  forward.retain = absl::Nanoseconds(1);
  absl::StatusOr<PreparedCall> prepared = TryPrepare(*engine_, forward);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  Copy(qkv_, prepared->input(Piece::kQkv));
  CallDescription backward;
  backward.pass = Pass::kBackward;
  backward.context = RunPrepared(*engine_, *std::move(prepared))->context;
  EXPECT_EQ(TryPrepare(*engine_, backward).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->host_pool().stats().in_use_bytes, 0);
}

TEST_F(EngineBackwardTest, AnIdleEngineGivesExpiredContextsBack) {
  result_ = CallResult();
  CallDescription forward = forward_;
  forward.retain = absl::Seconds(60);
  absl::StatusOr<PreparedCall> prepared = TryPrepare(*engine_, forward);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  Copy(qkv_, prepared->input(Piece::kQkv));
  ASSERT_TRUE(RunPrepared(*engine_, *std::move(prepared)).ok());
  engine_->DropExpired(absl::Now() + absl::Seconds(30));
  EXPECT_GT(engine_->host_pool().stats().in_use_bytes, 0);
  engine_->DropExpired(absl::Now() + absl::Seconds(61));
  EXPECT_EQ(engine_->host_pool().stats().in_use_bytes, 0);
}

TEST(EngineLeases, AreNoLongerThanTheServerAllows) {
  EngineParts parts;
  parts.host_pool = MakeHostPool(1 << 20, "--pinned-pool");
  parts.queue_bytes = 1 << 20;
  parts.max_lease = absl::Hours(1);
  parts.targets.push_back({.backend = std::make_unique<ReferenceBackend>()});
  const std::unique_ptr<Engine> engine = *Engine::Make(std::move(parts));
  CallDescription forward = Bs3hd(3);
  forward.retain = absl::Hours(1);
  EXPECT_TRUE(engine->Check(forward).ok());
  for (const absl::Duration lease :
       {absl::Hours(1) + absl::Nanoseconds(1), absl::InfiniteDuration()}) {
    forward.retain = lease;
    const absl::Status status = engine->Check(forward).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorField(status), "retain_for_backward.seconds");
    EXPECT_NE(status.message().find("3600"), std::string::npos) << status;
  }
}

TEST_F(EngineBackwardTest, ASinkThatIsNoNumberIsRefused) {
  for (float bad : kNoSinks) {
    absl::StatusOr<PreparedCall> prepared =
        TryPrepare(*engine_, BackwardOf(WithSinks(33), result_));
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    SetSinks(*prepared, {bad, 0.5f});
    const absl::Status status = RunPrepared(*engine_, *std::move(prepared)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorField(status), "softmax_offset");
  }
}

TEST_F(EngineBackwardTest, TensorsThatForwardDidNotReturnAreNamed) {
  const CallDescription good = BackwardOf(forward_, result_);
  const struct {
    std::optional<TensorDesc> BackwardDescs::*tensor;
    const char* field;
  } cases[] = {
      {&BackwardDescs::out, "out"}, {&BackwardDescs::lse, "lse"}, {&BackwardDescs::d_out, "d_out"}};
  for (const auto& [tensor, field] : cases) {
    CallDescription d = good;
    (d.backward.*tensor)->shape.back() += 1;
    EXPECT_EQ(ErrorField(engine_->Check(d).status()), field);
    d = good;
    (d.backward.*tensor)->dtype = DType::kBFloat16;
    EXPECT_EQ(ErrorField(engine_->Check(d).status()), std::string(field) + ".dtype");
    d = good;
    (d.backward.*tensor).reset();
    const absl::Status status = engine_->Check(d).status();
    EXPECT_EQ(ErrorField(status), field);
    EXPECT_EQ(ErrorReason(status), reason::kMissingField);
  }
}

}  // namespace
}  // namespace attnd
