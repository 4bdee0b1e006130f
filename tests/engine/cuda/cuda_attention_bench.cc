// Times the CUDA backend against the same cuDNN graph without it, in one process, and writes a
// table to stdout and JSON to a file. Needs a device.
//   cuda_attention_bench FILE.json
//
// Every figure is the median of interleaved repeats. A repeat times a number of calls, one after
// another, each waited for, as a worker of the server makes them; "bare" waits as well.
#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine/cuda/bench_tools.h"

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

std::function<void()> Through(Request& request) {
  return [&request] { request.Run(); };
}

void BenchDense(CudnnBackend& backend, DeviceContext& context, Report& report) {
  for (const Shape& s : SixShapes()) {
    const auto separate = MakeRequest(backend, AskDense(s, Layout::kBshdBshdBshd));
    const bool same_dim = s.d_qk == s.d_v;
    const auto kv_packed =
        same_dim ? MakeRequest(backend, AskDense(s, Layout::kBshdBs2hd)) : nullptr;
    const auto packed =
        s.h == s.g && same_dim ? MakeRequest(backend, AskDense(s, Layout::kBs3hd)) : nullptr;
    auto graph = SdpaGraph::Build(BareDescription(s), context.handle());
    Must(graph.status());
    SdpaPointers pointers;
    pointers.q = separate->buffers.inputs[static_cast<int>(Buffer::kQ)];
    pointers.k = separate->buffers.inputs[static_cast<int>(Buffer::kK)];
    pointers.v = separate->buffers.inputs[static_cast<int>(Buffer::kV)];
    const std::unique_ptr<Memory> out =
        std::make_unique<Memory>(*NumBytes(separate->problem.out_desc));
    const std::unique_ptr<Memory> lse =
        std::make_unique<Memory>(*NumBytes(separate->problem.lse_desc));
    const Memory workspace((*graph)->workspace_bytes());
    pointers.out = out->get();
    pointers.lse = reinterpret_cast<float*>(lse->get());
    pointers.scale = static_cast<float>(separate->problem.scale);
    auto bare = [&] {
      Must((*graph)->Enqueue(context.handle(), pointers, workspace.get()));
      Must(cudaStreamSynchronize(context.stream()));
    };
    std::vector<std::function<void()>> contenders{bare, Through(*separate)};
    if (kv_packed) contenders.push_back(Through(*kv_packed));
    if (packed) contenders.push_back(Through(*packed));
    const std::vector<double> us = Time(contenders, 40'000);
    report.Add(s.name, "bare cuDNN, us", us[0]);
    report.Add(s.name, "bare cuDNN, TFLOP/s", Flops(s) / us[0] * 1e-6);
    report.Add(s.name, "engine, us", us[1]);
    report.Add(s.name, "engine / bare", us[1] / us[0]);
    if (kv_packed) report.Add(s.name, "BSHD_BS2HD / separate", us[2] / us[1]);
    if (packed) report.Add(s.name, "BS3HD / separate", us[3] / us[1]);
  }
}

// Median device time of a call, in microseconds: what a reply calls compute_us.
double DeviceTime(Request& request) {
  std::vector<double> times;
  for (int i = 0; i < 101; ++i) {
    Must(request.queue->Stamp(0));
    Must(request.plan->Forward(request.problem, request.buffers));
    Must(request.queue->Stamp(1));
    Must(request.queue->Wait());
    times.push_back(absl::ToDoubleMicroseconds(request.queue->Between(0, 1)));
  }
  std::nth_element(times.begin(), times.begin() + 50, times.end());
  return times[50];
}

// 64 sequences of 8,192 tokens on shuffled pages of 64 rows.
std::unique_ptr<Request> MakePagedDecode(CudnnBackend& backend) {
  constexpr int64_t kBatch = 64, kTokens = 8192, kPage = 64, kHeads = 64, kKvHeads = 8, kDim = 128;
  constexpr int64_t kPages = kTokens / kPage;
  Asked asked;
  asked.spec.layout = Layout::kPagedKvBshdBshdBshd;
  asked.spec.dtype = DType::kBFloat16;
  Sequences& sequences = asked.sequences;
  for (int64_t i = 0; i <= kBatch; ++i) {
    sequences.cu_seqlens_q.push_back(i);
    sequences.cu_seqlens_kv.push_back(i * kTokens);
  }
  const TensorDesc table{DType::kInt32, {kBatch, kPages}};
  sequences.page_table_k = sequences.page_table_v = table;
  InputDescs& inputs = asked.inputs;
  const TensorDesc pool{DType::kBFloat16, {kBatch * kPages, kPage, kKvHeads, kDim}};
  inputs.buffers[static_cast<int>(Buffer::kQ)] =
      TensorDesc{DType::kBFloat16, {kBatch, 1, kHeads, kDim}};
  inputs.buffers[static_cast<int>(Buffer::kK)] = pool;
  inputs.buffers[static_cast<int>(Buffer::kV)] = pool;
  auto request = MakeRequest(backend, asked);
  std::vector<int32_t> pages(kBatch * kPages);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937_64(3));
  std::byte* device_table = request->New(*NumBytes(table), false);
  Must(cudaMemcpy(device_table, pages.data(), *NumBytes(table), cudaMemcpyHostToDevice));
  request->buffers.page_table_k = request->buffers.page_table_v =
      reinterpret_cast<const int32_t*>(device_table);
  Must(cudaDeviceSynchronize());
  return request;
}

void BenchPagedDecode(CudnnBackend& backend, Report& report) {
  const auto first = MakePagedDecode(backend), second = MakePagedDecode(backend);
  const double bytes = 2.0 * *NumBytes(*first->problem.inputs[static_cast<int>(Buffer::kK)]);
  const std::string what = "paged decode, 64 x 8192, 64/8, 128, page 64";
  const double us = Time({Through(*first)}, 40'000)[0];
  report.Add(what, "engine, one caller, us", us);
  report.Add(what, "engine, one caller, TB/s of KV", bytes / us * 1e-6);
  const double device_us = DeviceTime(*first);
  report.Add(what, "engine, device time, us", device_us);
  report.Add(what, "engine, device time, TB/s of KV", bytes / device_us * 1e-6);
  constexpr int kCalls = 40;
  auto both = [&] {
    auto many = [](Request& request) {
      for (int i = 0; i < kCalls; ++i) Through(request)();
    };
    std::thread other(many, std::ref(*second));
    many(*first);
    other.join();
  };
  report.Add(what, "engine, two callers, TB/s of KV",
             2 * kCalls * bytes / Time({both}, 1)[0] * 1e-6);
}

// One request after another against growing kv lengths, twice over.
void CountPlans(CudnnBackend& backend, Report& report) {
  for (bool decode : {true, false}) {
    const std::string what = decode ? "decode, kv length 1..300" : "self attention, length 1..300";
    for (const char* pass : {"first", "second"}) {
      const int64_t before = backend.plans_built();
      const auto start = Clock::now();
      for (int64_t n = 1; n <= 300; ++n) {
        Asked asked;
        asked.spec.layout = Layout::kBshdBshdBshd;
        asked.spec.dtype = DType::kBFloat16;
        InputDescs& inputs = asked.inputs;
        inputs.buffers[static_cast<int>(Buffer::kQ)] =
            TensorDesc{DType::kBFloat16, {1, decode ? 1 : n, 8, 64}};
        inputs.buffers[static_cast<int>(Buffer::kK)] = TensorDesc{DType::kBFloat16, {1, n, 8, 64}};
        inputs.buffers[static_cast<int>(Buffer::kV)] = TensorDesc{DType::kBFloat16, {1, n, 8, 64}};
        const auto request = MakeRequest(backend, asked);
        request->Run();
      }
      report.Add(what, std::string(pass) + " pass, plans built",
                 static_cast<double>(backend.plans_built() - before));
      report.Add(what, std::string(pass) + " pass, ms",
                 std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
  }
}

// A small request, where what surrounds the kernel shows.
void BenchSmall(CudnnBackend& backend, Report& report) {
  for (int64_t s : {128, 100}) {
    const Shape shape{"1,16/16," + std::to_string(s) + ",64 causal", 1, 16, 16, s, 64, 64, true};
    const auto request = MakeRequest(backend, AskDense(shape, Layout::kBshdBshdBshd));
    report.Add(shape.name, std::string(request->plan->engine()) + ", us",
               Time({Through(*request)}, 20'000)[0]);
  }
}

int Main(const char* path) {
  auto backend = CudnnBackend::Make(0);
  Must(backend.status());
  auto context = DeviceContext::Make(0);
  Must(context.status());
  std::printf("| %s, cuDNN %zu | figure | median of %d |\n|---|---|---|\n",
              (*backend)->info().devices[0].name.c_str(), cudnnGetVersion(), kRepeats);
  Report report(path);
  BenchJoint(**backend, **context, report);
  BenchDense(**backend, **context, report);
  BenchBackward(**backend, **context, report);
  BenchPagedDecode(**backend, report);
  CountPlans(**backend, report);
  BenchSmall(**backend, report);
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: cuda_attention_bench FILE.json" << std::endl;
    return 2;
  }
  return attnd::bench::Main(argv[1]);
}
