// The conformance suite on the GPU, through the module. Needs a device.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "engine/core/layout.h"
#include "tests/conformance/conformance.h"
#include "tests/engine/cuda/device.h"
#include "tests/engine/cuda/on_device.h"

namespace attnd::testing {

void PrintTo(const Arrangement& arrangement, std::ostream* out) { *out << arrangement.name; }

namespace {

AttentionBackend& Instance() {
  static const std::unique_ptr<AttentionBackend> instance = MakeBackend();
  return *instance;
}

const GoldenCase& CaseNamed(const std::string& name) {
  for (const GoldenCase& c : GoldenCases()) {
    if (c.name == name) return c;
  }
  ADD_FAILURE() << "no golden case " << name;
  return GoldenCases().front();
}

class CudaConformance : public ::testing::TestWithParam<std::tuple<Arrangement, const char*>> {};

TEST_P(CudaConformance, AgreesWithTheOracle) {
  const auto& [arrangement, group] = GetParam();
  RunConformance(OnDevice(), Instance(), arrangement, group);
}

TEST_P(CudaConformance, GradientsAgreeWithTheOracle) {
  const auto& [arrangement, group] = GetParam();
  RunBackwardConformance(OnDevice(), Instance(), arrangement, group);
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaConformance,
                         ::testing::Combine(::testing::ValuesIn(AllArrangements().begin(),
                                                                AllArrangements().end()),
                                            ::testing::ValuesIn(kConformanceGroups)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_" +
                                  std::get<1>(param.param);
                         });

struct PlannedRequest {
  PackedRequest request;
  AttentionProblem problem;
  std::unique_ptr<AttentionPlan> plan;

  ForwardResult Forward(bool want_lse = true) const {
    auto result = RunForward(OnDevice(), *plan, problem, request, want_lse);
    if (!result.ok()) ADD_FAILURE() << result.status();
    return *std::move(result);
  }
};

PlannedRequest Planned(PackedRequest request) {
  auto problem = Resolve(request.spec, request.sequences, request.inputs);
  if (!problem.ok()) ADD_FAILURE() << problem.status();
  auto plan = Instance().BuildPlan(*problem);
  if (!plan.ok()) ADD_FAILURE() << plan.status();
  return {std::move(request), *std::move(problem), *std::move(plan)};
}

PlannedRequest Planned(Layout layout, const std::string& name) {
  return Planned(MakeRequest(ArrangementOf(layout), CaseNamed(name)));
}

TEST(CudaPlan, GivesTheSameOutWithoutLse) {
  for (Layout layout : {Layout::kThdThdThd, Layout::kBshdBshdBshd, Layout::kPagedKvBshdBshdBshd}) {
    for (const char* dtype : {"f16", "bf16"}) {
      const PlannedRequest run = Planned(layout, std::string("none.gqa.lengths.cross.") + dtype);
      const ForwardResult with = run.Forward(), without = run.Forward(false);
      EXPECT_EQ(with.out, without.out);
      EXPECT_EQ(without.lse, std::vector<std::byte>(with.lse.size(), std::byte{0xFF}));
    }
  }
}

TEST(CudaPlan, GivesTheSameBitsAgain) {
  const PlannedRequest run = Planned(Layout::kSbhdBshdBshd, "300.self.bf16");
  const ForwardResult first = run.Forward(), second = run.Forward();
  EXPECT_EQ(first.out, second.out);
  EXPECT_EQ(first.lse, second.lse);
}

TEST(CudaPlan, ServesOtherScalesAndLengths) {
  PlannedRequest run = Planned(Layout::kBshdBshdBshd, "causal_br.mha.lengths.cross.bf16");
  run.Forward();
  run.request.spec.scale = 1.25;
  run.request.sequences.cu_seqlens_q = {0, 0, 7, 8};
  run.request.sequences.cu_seqlens_kv = {0, 9, 10, 12};
  run.problem = *Resolve(run.request.spec, run.request.sequences, run.request.inputs);
  const PlannedRequest own = Planned(run.request);
  EXPECT_EQ(run.Forward().out, own.Forward().out);
}

TEST(CudaPlan, ThreadsShareAPlansGraphAndGetTheSameBits) {
  const ForwardResult want = Planned(Layout::kThdThdThd, "causal_br.gqa.gaps.cross.bf16").Forward();
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        const ForwardResult got =
            Planned(Layout::kThdThdThd, "causal_br.gqa.gaps.cross.bf16").Forward();
        wrong += got.out != want.out || got.lse != want.lse;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Prints what this process ran of the suite.
class Coverage : public ::testing::Environment {
 public:
  void TearDown() override {
    for (const std::string& pass : {OnDevice().name, BackwardName(OnDevice())}) {
      const Tally& tally = TallyOf(pass);
      for (const auto& [name, count] : tally.ran) {
        std::cout << "ran\t" << count << "\t" << pass << ": " << name << "\n";
      }
      for (const auto& [reason, count] : tally.refused) {
        std::cout << "refused\t" << count << "\t" << pass << ": " << reason << "\n";
      }
    }
  }
};
[[maybe_unused]] const auto* const kCoverage = ::testing::AddGlobalTestEnvironment(new Coverage);

}  // namespace
}  // namespace attnd::testing
