#include <cudnn.h>

#include <utility>

#include "tests/engine/cuda/bench_tools.h"

namespace attnd::bench {
namespace {

// A backward request on the device, with random O, LSE and dO: the kernels' time is not theirs.
struct Backward {
  std::unique_ptr<Request> forward;  // Owns all memory.
  std::unique_ptr<BackwardPlan> plan;
  BackwardBuffers buffers;

  void Run() {
    Must(plan->Backward(forward->problem, buffers));
    Must(forward->queue->Wait());
  }
};

std::unique_ptr<Backward> MakeBackward(CudnnBackend& backend, const Asked& asked) {
  auto made = std::make_unique<Backward>();
  made->forward = MakeRequest(backend, asked);
  Request& f = *made->forward;
  f.Run();
  auto plan = backend.BuildBackwardPlan(f.problem);
  Must(plan.status());
  made->plan = *std::move(plan);
  BackwardBuffers& b = made->buffers;
  b.inputs = f.buffers.inputs;
  b.out = f.buffers.out;
  b.lse = f.buffers.lse;
  b.d_out = f.New(*NumBytes(f.problem.out_desc), true);
  for (size_t i = 0; i < b.grads.size(); ++i) {
    if (f.problem.inputs[i]) b.grads[i] = f.New(*NumBytes(*f.problem.inputs[i]), false);
  }
  const int64_t workspace = made->plan->workspace_bytes();
  b.workspace = {f.New(workspace, false), static_cast<size_t>(workspace)};
  b.queue = f.queue.get();
  Must(cudaDeviceSynchronize());
  return made;
}

// The bare graph on the buffers of `request`, which is BSHD_BSHD_BSHD.
struct Bare {
  Bare(const Shape& s, const Backward& request, DeviceContext& queue) : context(queue) {
    SdpaDescription d = BareDescription(s);
    d.is_backward = true;
    auto built = SdpaGraph::Build(d, context.handle());
    Must(built.status());
    graph = *std::move(built);
    workspace = std::make_unique<Memory>(graph->workspace_bytes());
    const BackwardBuffers& b = request.buffers;
    constexpr auto kQ = static_cast<size_t>(Buffer::kQ), kK = static_cast<size_t>(Buffer::kK),
                   kV = static_cast<size_t>(Buffer::kV);
    pointers.q = b.inputs[kQ];
    pointers.k = b.inputs[kK];
    pointers.v = b.inputs[kV];
    pointers.out = const_cast<std::byte*>(b.out);
    pointers.lse = const_cast<float*>(b.lse);
    pointers.d_out = b.d_out;
    pointers.dq = b.grads[kQ];
    pointers.dk = b.grads[kK];
    pointers.dv = b.grads[kV];
    pointers.scale = static_cast<float>(request.forward->problem.scale);
  }

  void Run() const {
    Must(graph->Enqueue(context.handle(), pointers, workspace->get()));
    Must(cudaStreamSynchronize(context.stream()));
  }

  DeviceContext& context;
  std::unique_ptr<SdpaGraph> graph;
  std::unique_ptr<Memory> workspace;
  SdpaPointers pointers;
};

void BenchSix(CudnnBackend& backend, DeviceContext& context, Report& report) {
  for (const Shape& s : SixShapes()) {
    const bool same_dim = s.d_qk == s.d_v;
    const auto separate = MakeBackward(backend, AskDense(s, Layout::kBshdBshdBshd));
    const auto kv_packed =
        same_dim ? MakeBackward(backend, AskDense(s, Layout::kBshdBs2hd)) : nullptr;
    const auto packed =
        same_dim && s.h == s.g ? MakeBackward(backend, AskDense(s, Layout::kBs3hd)) : nullptr;
    const Bare bare(s, *separate, context);
    std::vector<std::function<void()>> contenders{[&] { bare.Run(); }, [&] { separate->Run(); }};
    if (kv_packed) contenders.emplace_back([&] { kv_packed->Run(); });
    if (packed) contenders.emplace_back([&] { packed->Run(); });
    const std::vector<double> us = Time(contenders, 40'000);
    const std::string name = s.name + " backward";
    report.Add(name, "bare cuDNN, us", us[0]);
    report.Add(name, "bare cuDNN, TFLOP/s", 2.5 * Flops(s) / us[0] * 1e-6);
    report.Add(name, "engine, us", us[1]);
    report.Add(name, "engine / bare", us[1] / us[0]);
    if (kv_packed) report.Add(name, "BSHD_BS2HD / separate", us[2] / us[1]);
    if (packed) report.Add(name, "BS3HD / separate", us[3] / us[1]);
  }
}

// What each parameter costs, on one shape, against the plain passes.
void BenchParameters(CudnnBackend& backend, Report& report) {
  const Shape s{"4,16/16,4096,128 causal", 4, 16, 16, 4096, 128, 128, true};
  const std::pair<std::string, std::function<void(Asked&)>> cases[] = {
      {"plain", [](Asked&) {}},
      {"deterministic", [](Asked& a) { a.spec.deterministic = true; }},
      {"ALiBi", [](Asked& a) { a.spec.bias_kind = BiasKind::kAlibi; }},
      {"off by one", [](Asked& a) { a.spec.softmax_kind = SoftmaxKind::kOffByOne; }},
      {"lengths",
       [&](Asked& a) {
         for (int64_t i = 0; i <= s.b; ++i) {
           a.sequences.cu_seqlens_q.push_back(i * (s.s - 1));
         }
         a.sequences.cu_seqlens_kv = a.sequences.cu_seqlens_q;
       }},
      {"soft cap", [](Asked& a) { a.spec.logit_softcap = 30; }},
      {"dropout",
       [](Asked& a) {
         a.spec.dropout = Dropout{0.1, 1, 2};
       }},
  };
  for (const auto& [name, change] : cases) {
    Asked asked = AskDense(s, Layout::kBshdBshdBshd);
    change(asked);
    const auto request = MakeBackward(backend, asked);
    const std::vector<double> us =
        Time({[&] { request->forward->Run(); }, [&] { request->Run(); }}, 20'000);
    const std::string forward(request->forward->plan->engine());
    const std::string backward(request->plan->engine());
    report.Add(s.name + " " + name, "forward, TFLOP/s, " + forward, Flops(s) / us[0] * 1e-6);
    report.Add(s.name + " " + name, "backward, TFLOP/s, " + backward,
               2.5 * Flops(s) / us[1] * 1e-6);
  }
}

}  // namespace

void BenchBackward(CudnnBackend& backend, DeviceContext& context, Report& report) {
  BenchSix(backend, context, report);
  BenchParameters(backend, report);
}

}  // namespace attnd::bench
