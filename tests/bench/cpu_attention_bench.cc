// Times forward attention of the CPU backend. GFLOP/s counts the two products of the visible
// (query, key) pairs, 2 (d_qk + d_v) each, per second of wall time.
//   cpu_attention_bench [--benchmark_filter=FLOAT32] [--benchmark_format=json] [THREADS]
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/attention_case.h"

namespace attnd::testing {
namespace {

struct Shape {
  std::string name;
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;
  int64_t s_q;
  int64_t s_kv;
  int64_t dim;
};

struct FreeBytes {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<std::byte, FreeBytes>;

AlignedBytes Allocate(int64_t size) {
  const auto rounded = static_cast<size_t>((size + 63) / 64 * 64);
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
}

int64_t VisiblePairs(const AttentionProblem& problem) {
  int64_t pairs = 0;
  for (const SequenceExtent& extent : problem.sequences) {
    for (int64_t i = 0; i < extent.q_len; ++i) {
      const KeyRange keys = problem.mask.VisibleKeys(i, extent.q_len, extent.kv_len);
      pairs += keys.last - keys.first;
    }
  }
  return pairs * problem.num_heads;
}

void Forward(benchmark::State& state, CpuBackend& backend, const CaseOptions& options) {
  const AttentionCase test(options);
  const AttentionProblem& problem = test.problem();
  auto plan = backend.BuildPlan(problem);
  if (!plan.ok()) {
    state.SkipWithError(plan.status().ToString().c_str());
    return;
  }
  const AlignedBytes out = Allocate(*NumBytes(problem.out_desc));
  const AlignedBytes lse = Allocate(*NumBytes(problem.lse_desc));
  const AlignedBytes workspace = Allocate((*plan)->workspace_bytes());
  ForwardBuffers buffers = test.Inputs();
  buffers.out = out.get();
  buffers.lse = reinterpret_cast<float*>(lse.get());
  buffers.workspace = {workspace.get(), static_cast<size_t>((*plan)->workspace_bytes())};
  for (auto _ : state) {
    const absl::Status status = (*plan)->Forward(problem, buffers);
    if (!status.ok()) state.SkipWithError(status.ToString().c_str());
  }
  const double flops = 2.0 * static_cast<double>(options.d_qk + options.d_v) *
                       static_cast<double>(VisiblePairs(problem));
  state.counters["GFLOP/s"] = benchmark::Counter(
      flops * 1e-9 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void Register(CpuBackend& backend, const Shape& shape) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool causal : {false, true}) {
      CaseOptions options;
      options.dtype = dtype;
      options.lengths.assign(static_cast<size_t>(shape.batch), {shape.s_q, shape.s_kv});
      options.heads = shape.heads;
      options.kv_heads = shape.kv_heads;
      options.d_qk = options.d_v = shape.dim;
      if (causal) options.mask = {std::nullopt, 0, true};
      const std::string name =
          shape.name + "/" + std::string(Name(dtype)) + (causal ? "/causal" : "/full");
      benchmark::RegisterBenchmark(
          name.c_str(), [&backend, options](benchmark::State& s) { Forward(s, backend, options); })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
}

}  // namespace
}  // namespace attnd::testing

int main(int argc, char** argv) {
  using attnd::testing::Shape;
  benchmark::Initialize(&argc, argv);
  attnd::CpuBackend backend(argc > 1 ? std::atoi(argv[1]) : 0);
  for (const Shape& shape : {Shape{"b1_h8_s1024_d64", 1, 8, 8, 1024, 1024, 64},
                             Shape{"b4_h12_s128_d32", 4, 12, 12, 128, 128, 32},
                             Shape{"b1_h8_s4096_d128", 1, 8, 8, 4096, 4096, 128},
                             Shape{"b16_h16_s512_d64", 16, 16, 16, 512, 512, 64},
                             Shape{"decode_b8_h32_g8_kv2048_d128", 8, 32, 8, 1, 2048, 128},
                             Shape{"decode_b1_h8_kv8192_d64", 1, 8, 8, 1, 8192, 64}}) {
    attnd::testing::Register(backend, shape);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
