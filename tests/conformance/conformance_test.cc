// Runs the conformance suite on the CPU backends.

#include "tests/conformance/conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <new>
#include <set>
#include <tuple>

#include "engine/core/layout.h"
#include "engine/cpu/cpu_backend.h"
#include "tests/conformance/golden.h"

namespace attnd::testing {

// Names what failed in GoogleTest's output.
void PrintTo(const BackendUnderTest& backend, std::ostream* out) { *out << backend.name; }
void PrintTo(const Arrangement& arrangement, std::ostream* out) { *out << arrangement.name; }

namespace {

BackendUnderTest OnHost(std::string name, std::function<std::unique_ptr<AttentionBackend>()> make) {
  constexpr std::align_val_t kAlignment{64};
  return {
      .name = std::move(name),
      .make = std::move(make),
      .allocate =
          [](size_t size) { return static_cast<std::byte*>(operator new(size, kAlignment)); },
      .release = [](std::byte* memory) { operator delete(memory, kAlignment); },
      .copy = [](std::byte* to, const std::byte* from,
                 size_t size) { std::memcpy(to, from, size); },
      .runs_everything = true,
  };
}

std::vector<BackendUnderTest> Backends() {
  return {
      OnHost("cpu", [] { return std::make_unique<CpuBackend>(1); }),
      OnHost("cpu_3_threads", [] { return std::make_unique<CpuBackend>(3); }),
      OnHost("reference", [] { return std::make_unique<ReferenceBackend>(); }),
  };
}

AttentionBackend& InstanceOf(const BackendUnderTest& backend) {
  static std::map<std::string, std::unique_ptr<AttentionBackend>> instances;
  std::unique_ptr<AttentionBackend>& instance = instances[backend.name];
  if (instance == nullptr) instance = backend.make();
  return *instance;
}

const GoldenCase& CaseNamed(const std::string& group, const std::string& name) {
  for (const GoldenCase& c : GoldenCases()) {
    if (c.group == group && c.name == name) return c;
  }
  ADD_FAILURE() << "no golden case " << group << "/" << name;
  return GoldenCases().front();
}

TEST(Golden, EveryCaseIsInAGroupThatRuns) {
  const std::set<std::string> groups(std::begin(kConformanceGroups), std::end(kConformanceGroups));
  for (const GoldenCase& c : GoldenCases()) EXPECT_TRUE(groups.count(c.group) == 1) << c.group;
}

class Conformance
    : public ::testing::TestWithParam<std::tuple<BackendUnderTest, Arrangement, const char*>> {};

TEST_P(Conformance, AgreesWithTheOracle) {
  const auto& [backend, arrangement, group] = GetParam();
  RunConformance(backend, InstanceOf(backend), arrangement, group);
}

class BackwardConformance : public Conformance {};

TEST_P(BackwardConformance, AgreesWithTheOracle) {
  const auto& [backend, arrangement, group] = GetParam();
  RunBackwardConformance(backend, InstanceOf(backend), arrangement, group);
}

std::string CellName(const ::testing::TestParamInfo<Conformance::ParamType>& info) {
  const auto& [backend, arrangement, group] = info.param;
  return backend.name + "_" + std::string(arrangement.name) + "_" + group;
}

auto Cells(const std::vector<BackendUnderTest>& backends) {
  const std::span<const Arrangement> all = AllArrangements();
  return ::testing::Combine(::testing::ValuesIn(backends),
                            ::testing::ValuesIn(all.begin(), all.end()),
                            ::testing::ValuesIn(kConformanceGroups));
}

INSTANTIATE_TEST_SUITE_P(Cpu, Conformance, Cells(Backends()), CellName);
INSTANTIATE_TEST_SUITE_P(Cpu, BackwardConformance, Cells(Backends()), CellName);

class ConformancePlan : public ::testing::TestWithParam<BackendUnderTest> {
 protected:
  // The outputs of `request` by `plan`, or by a plan of its own.
  ForwardResult Run(const PackedRequest& request, AttentionPlan* plan = nullptr,
                    bool want_lse = true) {
    const auto problem = Resolve(request.spec, request.sequences, request.inputs);
    if (!problem.ok()) ADD_FAILURE() << problem.status();
    const auto own = InstanceOf(GetParam()).BuildPlan(*problem);
    if (!own.ok()) ADD_FAILURE() << own.status();
    auto result = RunForward(GetParam(), plan ? *plan : **own, *problem, request, want_lse);
    if (!result.ok()) ADD_FAILURE() << result.status();
    return *std::move(result);
  }

  std::unique_ptr<AttentionPlan> PlanFor(const PackedRequest& request) {
    const auto problem = Resolve(request.spec, request.sequences, request.inputs);
    if (!problem.ok()) ADD_FAILURE() << problem.status();
    auto plan = InstanceOf(GetParam()).BuildPlan(*problem);
    if (!plan.ok()) ADD_FAILURE() << plan.status();
    return *std::move(plan);
  }
};

TEST_P(ConformancePlan, GivesTheSameOutWithoutLse) {
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    const GoldenCase& c = CaseNamed("none", std::string("none.gqa.gaps.cross.") + dtype);
    const PackedRequest request = MakeRequest(ArrangementOf(Layout::kThdThdThd), c);
    const ForwardResult with = Run(request), without = Run(request, nullptr, false);
    EXPECT_EQ(with.out, without.out);
    EXPECT_EQ(without.lse, std::vector<std::byte>(with.lse.size(), std::byte{0xFF}));
  }
}

TEST_P(ConformancePlan, GivesTheSameBitsAgain) {
  const GoldenCase& c = CaseNamed("tiles", "causal_br.257.cross.bf16");
  const PackedRequest request = MakeRequest(ArrangementOf(Layout::kSbhdBshdBshd), c);
  const auto plan = PlanFor(request);
  const ForwardResult first = Run(request, plan.get()), second = Run(request, plan.get());
  EXPECT_EQ(first.out, second.out);
  EXPECT_EQ(first.lse, second.lse);
}

TEST_P(ConformancePlan, ServesOtherScalesAndLengths) {
  const GoldenCase& c = CaseNamed("causal_br", "causal_br.mha.lengths.cross.f32");
  const Arrangement& arrangement = ArrangementOf(Layout::kBshdBshdBshd);
  PackedRequest request = MakeRequest(arrangement, c);
  const auto plan = PlanFor(request);
  Run(request, plan.get());
  request.spec.scale = -1.25;
  request.sequences.cu_seqlens_q = {0, 0, 7, 8};     // Of 5, 12 and 1.
  request.sequences.cu_seqlens_kv = {0, 9, 10, 12};  // Of 9, 2 and 7.
  const ForwardResult other = Run(request, plan.get()), own = Run(request);
  ASSERT_EQ(other.out.size(), own.out.size());
  for (size_t i = 0; i < own.out.size() / 4; ++i) {
    EXPECT_NEAR(LoadElement(DType::kFloat32, other.out.data(), i),
                LoadElement(DType::kFloat32, own.out.data(), i), 1e-5)
        << i;
  }
}

TEST_P(ConformancePlan, ListsTheDtypesThatItRan) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                      DType::kFloat8E5M2}) {
    const auto& dtypes = InstanceOf(GetParam()).info().dtypes;
    EXPECT_EQ(std::count(dtypes.begin(), dtypes.end(), dtype), 1) << Name(dtype);
  }
  EXPECT_FALSE(InstanceOf(GetParam()).info().name.empty());
}

INSTANTIATE_TEST_SUITE_P(Cpu, ConformancePlan, ::testing::ValuesIn(Backends()),
                         [](const auto& param) { return param.param.name; });

// Runs last: GoogleTest runs suites in the order in which they are written. Needs all of the above.
class ConformanceCoverage : public ::testing::TestWithParam<BackendUnderTest> {};

// Prints what ran and what was refused.
void CheckTally(const std::string& name, bool runs_pages) {
  const Tally& tally = TallyOf(name);
  int cells = 0;
  for (const Arrangement& arrangement : AllArrangements()) {
    const auto ran = tally.ran.find(std::string(arrangement.name));
    const int count = ran == tally.ran.end() ? 0 : ran->second;
    EXPECT_EQ(count > 0, runs_pages || !arrangement.IsPaged()) << arrangement.name;
    std::cout << name << " " << arrangement.name << ": " << count << " cells\n";
    cells += count;
  }
  std::cout << name << ": " << cells << " cells, " << tally.refused.size()
            << " reasons to refuse\n";
  for (const auto& [reason, count] : tally.refused) {
    std::cout << name << " refused " << count << " cells: " << reason << "\n";
  }
}

TEST_P(ConformanceCoverage, EveryArrangementRan) {
  CheckTally(GetParam().name, true);
  if (GetParam().runs_everything) {
    EXPECT_TRUE(TallyOf(GetParam().name).refused.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, ConformanceCoverage, ::testing::ValuesIn(Backends()),
                         [](const auto& param) { return param.param.name; });

class BackwardCoverage : public ::testing::TestWithParam<BackendUnderTest> {};

TEST_P(BackwardCoverage, EveryArrangementWithoutPagesRan) {
  CheckTally(BackwardName(GetParam()), false);
}

INSTANTIATE_TEST_SUITE_P(Cpu, BackwardCoverage, ::testing::ValuesIn(Backends()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace attnd::testing
