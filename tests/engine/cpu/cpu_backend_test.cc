#include "engine/cpu/cpu_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/core/status.h"
#include "tests/engine/cpu/attention_case.h"

namespace attnd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CpuBackend, DescribesItself) {
  CpuBackend backend(2);
  EXPECT_EQ(backend.info().name, "cpu");
  EXPECT_THAT(backend.info().engines, ElementsAre("tiled"));
  EXPECT_THAT(ReferenceBackend().info().engines, ElementsAre("reference"));
  ASSERT_EQ(backend.info().devices.size(), 1u);
  const DeviceInfo& device = backend.info().devices[0];
  EXPECT_FALSE(device.name.empty());
  EXPECT_GT(device.memory_bytes, int64_t{64} << 20);
  EXPECT_EQ(device.compute_units, static_cast<int64_t>(std::thread::hardware_concurrency()));
}

TEST(CpuBackend, RefusesByFieldWhatItDoesNotCompute) {
  struct Refusal {
    std::function<void(AttentionProblem&)> change;
    std::string field;
    std::string alternative;
  };
  const auto biased = [](DType dtype, BiasKind kind) {
    return [=](AttentionProblem& p) {
      p.dtype = dtype;
      p.bias_kind = kind;
      p.bias = TensorDesc{dtype, {1, 1, p.max_seqlen_q, p.max_seqlen_kv}};
    };
  };
  const Refusal refusals[] = {
      {biased(DType::kFloat8E4M3, BiasKind::kPreScale), "spec.bias_kind", "ALIBI"},
      {biased(DType::kFloat8E5M2, BiasKind::kPostScale), "spec.bias_kind", "ALIBI"},
  };
  CpuBackend cpu(1);
  ReferenceBackend reference;
  for (AttentionBackend* backend : std::vector<AttentionBackend*>{&cpu, &reference}) {
    for (const Refusal& refusal : refusals) {
      AttentionProblem problem = AttentionCase(CaseOptions()).problem();
      EXPECT_TRUE(backend->BuildPlan(problem).ok());
      refusal.change(problem);
      const absl::Status status = backend->BuildPlan(problem).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
      EXPECT_EQ(ErrorField(status), refusal.field);
      EXPECT_EQ(ErrorReason(status), reason::kNotSupported);
      EXPECT_THAT(std::string(status.message()), HasSubstr(refusal.field));
      EXPECT_THAT(std::string(status.message()), HasSubstr(refusal.alternative));
      EXPECT_EQ(backend->BuildBackwardPlan(problem).status(), status);
    }
  }
}

TEST(CpuBackend, RefusesAWorkspaceThatIsTooSmall) {
  CpuBackend backend(1);
  AttentionCase test{CaseOptions()};
  auto plan = backend.BuildPlan(test.problem());
  ASSERT_TRUE(plan.ok());
  EXPECT_GT((*plan)->workspace_bytes(), 0);
  EXPECT_EQ((*plan)->Forward(test.problem(), {}).code(), absl::StatusCode::kInternal);
}

TEST(CpuBackend, RunsPlansOfSeveralThreadsAtOnce) {
  CpuBackend backend(2);
  CaseOptions options;
  options.lengths = {{70, 90}};
  options.heads = options.kv_heads = 3;
  const AttentionCase test(options);
  const Output expected = test.Run(backend);
  std::vector<Output> outputs(4);
  std::vector<std::thread> threads;
  for (Output& output : outputs) {
    threads.emplace_back([&] {
      for (int k = 0; k < 5; ++k) output = test.Run(backend);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Output& output : outputs) {
    EXPECT_EQ(output.out, expected.out);
    EXPECT_EQ(output.lse, expected.lse);
  }
}

// A plan answers for other lengths within its geometry, and other scales.
TEST(CpuBackend, ReusesAPlanForOtherLengths) {
  CpuBackend backend(3);
  CaseOptions options;
  options.lengths = {{300, 2000}};
  options.heads = 2;
  options.d_qk = options.d_v = 4;
  AttentionCase largest(options);
  auto plan = backend.BuildPlan(largest.problem());
  ASSERT_TRUE(plan.ok());
  for (const int64_t q_len : {0, 1, 40, 257, 300}) {
    for (const int64_t kv_len : {0, 1, 513, 1999}) {
      AttentionCase other = largest;
      other.problem().sequences[0].q_len = q_len;
      other.problem().sequences[0].kv_len = kv_len;
      auto own = backend.BuildPlan(other.problem());
      ASSERT_TRUE(own.ok());
      EXPECT_EQ((*own)->workspace_bytes(), (*plan)->workspace_bytes());
      EXPECT_LT(RelativeRms(other.Run(backend).out,
                            [&] {
                              ReferenceBackend reference;
                              return other.Run(reference).out;
                            }()),
                1e-5);
    }
  }
}

}  // namespace
}  // namespace attnd::testing
