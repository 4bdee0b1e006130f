#include "tests/engine/cuda/bench_tools.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <utility>

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void Die(const std::string& why) {
  std::cerr << why << std::endl;
  std::exit(1);
}

}  // namespace

void Must(cudaError_t error) {
  if (error != cudaSuccess) Die(cudaGetErrorString(error));
}

void Must(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

Memory::Memory(int64_t bytes) {
  void* memory = nullptr;
  Must(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
  data_ = static_cast<std::byte*>(memory);
}

void Memory::FillRandom(int64_t elements) {
  static const std::vector<uint16_t> numbers = [] {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<uint16_t> values((1 << 22) + 1);
    for (uint16_t& value : values) value = FloatToBFloat16(uniform(random));
    return values;
  }();
  for (int64_t at = 0; at < elements; at += numbers.size()) {
    const auto count = std::min<int64_t>(numbers.size(), elements - at);
    Must(cudaMemcpy(data_ + at * 2, numbers.data(), count * 2, cudaMemcpyHostToDevice));
  }
}

std::vector<Shape> SixShapes() {
  return {
      {"4,16/16,4096,128", 4, 16, 16, 4096, 128, 128, false},
      {"4,16/16,4096,128 causal", 4, 16, 16, 4096, 128, 128, true},
      {"1,64/8,16384,128", 1, 64, 8, 16384, 128, 128, false},
      {"1,64/8,16384,128 causal", 1, 64, 8, 16384, 128, 128, true},
      {"1,64/8,2048,128 causal", 1, 64, 8, 2048, 128, 128, true},
      {"2,128/128,4096,192/128 causal", 2, 128, 128, 4096, 192, 128, true},
  };
}

double Flops(const Shape& s) {
  const double all = 2.0 * s.b * s.h * s.s * s.s * (s.d_qk + s.d_v);
  return s.causal ? all / 2 : all;
}

Asked AskDense(const Shape& s, Layout layout) {
  Asked asked;
  AttentionSpec& spec = asked.spec;
  spec.layout = layout;
  spec.dtype = DType::kBFloat16;
  if (s.causal) spec.causal = Causal::kTopLeft;
  auto set = [&](Buffer buffer, std::vector<int64_t> shape) {
    asked.inputs.buffers[static_cast<int>(buffer)] = TensorDesc{DType::kBFloat16, std::move(shape)};
  };
  if (layout == Layout::kBs3hd) {
    set(Buffer::kQkv, {s.b, s.s, 3, s.h, s.d_qk});
  } else if (layout == Layout::kBshdBs2hd) {
    set(Buffer::kQ, {s.b, s.s, s.h, s.d_qk});
    set(Buffer::kKv, {s.b, s.s, 2, s.g, s.d_qk});
  } else {
    set(Buffer::kQ, {s.b, s.s, s.h, s.d_qk});
    set(Buffer::kK, {s.b, s.s, s.g, s.d_qk});
    set(Buffer::kV, {s.b, s.s, s.g, s.d_v});
  }
  return asked;
}

std::byte* Request::New(int64_t bytes, bool random) {
  memory.push_back(std::make_unique<Memory>(bytes));
  if (random) memory.back()->FillRandom(bytes / 2);
  return memory.back()->get();
}

void Request::Run() {
  Must(plan->Forward(problem, buffers));
  Must(queue->Wait());
}

std::unique_ptr<Request> MakeRequest(CudnnBackend& backend, const Asked& asked) {
  auto request = std::make_unique<Request>();
  auto problem = Resolve(asked.spec, asked.sequences, asked.inputs);
  Must(problem.status());
  request->problem = *std::move(problem);
  auto plan = backend.BuildPlan(request->problem);
  Must(plan.status());
  request->plan = *std::move(plan);
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (!asked.inputs.buffers[i]) continue;
    request->buffers.inputs[i] = request->New(*NumBytes(*asked.inputs.buffers[i]), true);
  }
  request->buffers.out = request->New(*NumBytes(request->problem.out_desc), false);
  request->buffers.lse =
      reinterpret_cast<float*>(request->New(*NumBytes(request->problem.lse_desc), false));
  const int64_t workspace = request->plan->workspace_bytes();
  request->buffers.workspace = {request->New(workspace, false), static_cast<size_t>(workspace)};
  auto queue = backend.MakeQueue();
  Must(queue.status());
  request->queue = *std::move(queue);
  request->buffers.queue = request->queue.get();
  Must(cudaDeviceSynchronize());
  return request;
}

SdpaDescription BareDescription(const Shape& s) {
  SdpaDescription d;
  d.dtype = d.out_dtype = DType::kBFloat16;
  d.batch = s.b;
  d.s_q = d.s_kv = s.s;
  d.num_heads = s.h;
  d.num_kv_heads = s.g;
  d.head_dim_qk = s.d_qk;
  d.head_dim_v = s.d_v;
  if (s.causal) d.right = 0;
  d.q = {s.s * s.h * s.d_qk, s.h * s.d_qk, s.d_qk, 1};
  d.k = {s.s * s.g * s.d_qk, s.g * s.d_qk, s.d_qk, 1};
  d.v = {s.s * s.g * s.d_v, s.g * s.d_v, s.d_v, 1};
  d.out = {s.s * s.h * s.d_v, s.h * s.d_v, s.d_v, 1};
  d.lse = {s.h * s.s, 1, s.s, 1};
  return d;
}

std::vector<double> Time(const std::vector<std::function<void()>>& contenders, double budget_us) {
  std::vector<int> calls;
  for (const auto& call : contenders) {
    call();
    call();
    const auto start = Clock::now();
    call();
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    calls.push_back(std::clamp(static_cast<int>(budget_us / us), 1, 1000));
  }
  std::vector<std::vector<double>> times(contenders.size());
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      const auto start = Clock::now();
      for (int n = 0; n < calls[i]; ++n) contenders[i]();
      const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      times[i].push_back(us / calls[i]);
    }
  }
  std::vector<double> medians;
  for (auto& t : times) {
    std::nth_element(t.begin(), t.begin() + t.size() / 2, t.end());
    medians.push_back(t[t.size() / 2]);
  }
  return medians;
}

void Report::Add(const std::string& what, const std::string& figure, double value) {
  std::printf("| %s | %s | %.4g |\n", what.c_str(), figure.c_str(), value);
  std::fflush(stdout);
  json_ << (first_ ? "\n" : ",\n") << R"( {"what": ")" << what << R"(", "figure": ")" << figure
        << R"(", "value": )" << value << "}";
  first_ = false;
}

}  // namespace attnd::bench
