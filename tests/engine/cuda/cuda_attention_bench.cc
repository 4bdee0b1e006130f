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

#include "engine/core/layout.h"
#include "engine/cuda/cudnn_backend.h"

namespace attnd {
namespace {

constexpr int kRepeats = 11;

[[noreturn]] void Die(const std::string& why) {
  std::cerr << why << std::endl;
  std::exit(1);
}

void Must(cudaError_t error) {
  if (error != cudaSuccess) Die(cudaGetErrorString(error));
}

void Must(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

// Device memory; random bf16 numbers in -1 .. 1, or integers.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    void* memory = nullptr;
    Must(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
    data_ = static_cast<std::byte*>(memory);
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  void FillRandom(int64_t elements) {
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

  std::byte* get() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

struct Shape {
  std::string name;
  int64_t b, h, g, s, d_qk, d_v;
  bool causal;
};

// Floating-point operations, causal counted at half.
double Flops(const Shape& s) {
  const double all = 2.0 * s.b * s.h * s.s * s.s * (s.d_qk + s.d_v);
  return s.causal ? all / 2 : all;
}

// A request on the device, and its plan.
struct Request {
  AttentionProblem problem;
  std::unique_ptr<AttentionPlan> plan;
  std::vector<std::unique_ptr<Memory>> memory;
  ForwardBuffers buffers;
  std::unique_ptr<DeviceQueue> queue;

  std::byte* New(int64_t bytes, bool random) {
    memory.push_back(std::make_unique<Memory>(bytes));
    if (random) memory.back()->FillRandom(bytes / 2);
    return memory.back()->get();
  }
};

std::unique_ptr<Request> MakeRequest(CudnnBackend& backend, const AttentionSpec& spec,
                                     const Sequences& sequences, const InputDescs& inputs) {
  auto request = std::make_unique<Request>();
  auto problem = Resolve(spec, sequences, inputs);
  Must(problem.status());
  request->problem = *std::move(problem);
  auto plan = backend.BuildPlan(request->problem);
  Must(plan.status());
  request->plan = *std::move(plan);
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (!inputs.buffers[i]) continue;
    request->buffers.inputs[i] = request->New(*NumBytes(*inputs.buffers[i]), true);
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

std::unique_ptr<Request> MakeDense(CudnnBackend& backend, const Shape& s, Layout layout) {
  AttentionSpec spec;
  spec.layout = layout;
  spec.dtype = DType::kBFloat16;
  if (s.causal) spec.causal = Causal::kTopLeft;
  InputDescs inputs;
  auto set = [&](Buffer buffer, std::vector<int64_t> shape) {
    inputs.buffers[static_cast<int>(buffer)] = TensorDesc{DType::kBFloat16, std::move(shape)};
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
  return MakeRequest(backend, spec, {}, inputs);
}

// The graph of BSHD_BSHD_BSHD, written down by hand.
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

using Clock = std::chrono::steady_clock;

// Medians of each contender's microseconds a call; the contenders take turns.
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

std::function<void()> Through(Request& request) {
  return [&request] {
    Must(request.plan->Forward(request.problem, request.buffers));
    Must(request.queue->Wait());
  };
}

class Report {
 public:
  explicit Report(const char* path) : json_(path) { json_ << "["; }
  ~Report() { json_ << "\n]\n"; }

  void Add(const std::string& what, const std::string& figure, double value) {
    std::printf("| %s | %s | %.4g |\n", what.c_str(), figure.c_str(), value);
    std::fflush(stdout);
    json_ << (first_ ? "\n" : ",\n") << R"( {"what": ")" << what << R"(", "figure": ")" << figure
          << R"(", "value": )" << value << "}";
    first_ = false;
  }

 private:
  std::ofstream json_;
  bool first_ = true;
};

void BenchDense(CudnnBackend& backend, DeviceContext& context, Report& report) {
  const Shape shapes[] = {
      {"4,16/16,4096,128", 4, 16, 16, 4096, 128, 128, false},
      {"4,16/16,4096,128 causal", 4, 16, 16, 4096, 128, 128, true},
      {"1,64/8,16384,128", 1, 64, 8, 16384, 128, 128, false},
      {"1,64/8,16384,128 causal", 1, 64, 8, 16384, 128, 128, true},
      {"1,64/8,2048,128 causal", 1, 64, 8, 2048, 128, 128, true},
      {"2,128/128,4096,192/128 causal", 2, 128, 128, 4096, 192, 128, true},
  };
  for (const Shape& s : shapes) {
    const auto separate = MakeDense(backend, s, Layout::kBshdBshdBshd);
    const bool same_dim = s.d_qk == s.d_v;
    const auto kv_packed = same_dim ? MakeDense(backend, s, Layout::kBshdBs2hd) : nullptr;
    const auto packed = s.h == s.g && same_dim ? MakeDense(backend, s, Layout::kBs3hd) : nullptr;
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
  AttentionSpec spec;
  spec.layout = Layout::kPagedKvBshdBshdBshd;
  spec.dtype = DType::kBFloat16;
  Sequences sequences;
  for (int64_t i = 0; i <= kBatch; ++i) {
    sequences.cu_seqlens_q.push_back(i);
    sequences.cu_seqlens_kv.push_back(i * kTokens);
  }
  const TensorDesc table{DType::kInt32, {kBatch, kPages}};
  sequences.page_table_k = sequences.page_table_v = table;
  InputDescs inputs;
  const TensorDesc pool{DType::kBFloat16, {kBatch * kPages, kPage, kKvHeads, kDim}};
  inputs.buffers[static_cast<int>(Buffer::kQ)] =
      TensorDesc{DType::kBFloat16, {kBatch, 1, kHeads, kDim}};
  inputs.buffers[static_cast<int>(Buffer::kK)] = pool;
  inputs.buffers[static_cast<int>(Buffer::kV)] = pool;
  auto request = MakeRequest(backend, spec, sequences, inputs);
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
        AttentionSpec spec;
        spec.layout = Layout::kBshdBshdBshd;
        spec.dtype = DType::kBFloat16;
        InputDescs inputs;
        inputs.buffers[static_cast<int>(Buffer::kQ)] =
            TensorDesc{DType::kBFloat16, {1, decode ? 1 : n, 8, 64}};
        inputs.buffers[static_cast<int>(Buffer::kK)] = TensorDesc{DType::kBFloat16, {1, n, 8, 64}};
        inputs.buffers[static_cast<int>(Buffer::kV)] = TensorDesc{DType::kBFloat16, {1, n, 8, 64}};
        const auto request = MakeRequest(backend, spec, {}, inputs);
        Through (*request)();
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
    const auto request = MakeDense(backend, shape, Layout::kBshdBshdBshd);
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
  BenchDense(**backend, **context, report);
  BenchPagedDecode(**backend, report);
  CountPlans(**backend, report);
  BenchSmall(**backend, report);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: cuda_attention_bench FILE.json" << std::endl;
    return 2;
  }
  return attnd::Main(argv[1]);
}
