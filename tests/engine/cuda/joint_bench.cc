// Small requests that run as one against one at a time, device-resident.
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/cuda/bench_tools.h"

namespace attnd::bench {
namespace {

constexpr int kCalls = 64;

struct Small {
  std::unique_ptr<Request> forward;
  std::unique_ptr<BackwardPlan> backward;
  BackwardBuffers buffers;
};

Small MakeSmall(CudnnBackend& backend, int64_t rows) {
  const Shape shape{"small", 1, 16, 16, rows, 64, 64, true};
  Small small;
  small.forward = MakeRequest(backend, AskDense(shape, Layout::kBshdBshdBshd));
  Request& f = *small.forward;
  f.Run();
  absl::StatusOr<std::unique_ptr<BackwardPlan>> plan = backend.BuildBackwardPlan(f.problem);
  Must(plan.status());
  small.backward = *std::move(plan);
  BackwardBuffers& b = small.buffers;
  b.inputs = f.buffers.inputs;
  b.out = f.buffers.out;
  b.lse = f.buffers.lse;
  b.d_out = f.New(*NumBytes(f.problem.out_desc), true);
  for (size_t i = 0; i < b.grads.size(); ++i) {
    if (f.problem.inputs[i]) b.grads[i] = f.New(*NumBytes(*f.problem.inputs[i]), false);
  }
  const int64_t workspace = small.backward->workspace_bytes();
  b.workspace = {f.New(workspace, false), static_cast<size_t>(workspace)};
  b.queue = f.queue.get();
  return small;
}

// The calls `calls`, whose plans are `plan`'s, in launches of as many as fit.
template <typename Plan, typename Call>
void RunTogether(Plan& plan, const std::vector<Call>& calls, std::span<std::byte> workspace,
                 DeviceQueue& queue) {
  const JoinTerms terms = plan.join_terms();
  const auto most = static_cast<size_t>(terms.max_slots / terms.slots);
  for (size_t first = 0; first < calls.size(); first += most) {
    const size_t count = std::min(most, calls.size() - first);
    const auto run = plan.Join(std::span(calls).subspan(first, count));
    if (run->workspace_bytes() > static_cast<int64_t>(workspace.size())) std::abort();
    Must(run->Run(workspace, &queue));
    Must(queue.Wait());
  }
}

void Rates(Report& report, const std::string& what, double alone, double together, double tokens) {
  report.Add(what, "one at a time, us", alone);
  report.Add(what, "together, us", together);
  report.Add(what, "times", alone / together);
  report.Add(what, "tokens/us together", tokens / together);
}

void BenchCalls(CudnnBackend& backend, Report& report, const std::string& what,
                const std::vector<int64_t>& rows) {
  std::vector<Small> calls;
  std::vector<ForwardCall> forward;
  std::vector<BackwardCall> backward;
  double tokens = 0;
  for (int64_t r : rows) {
    calls.push_back(MakeSmall(backend, r));
    tokens += static_cast<double>(r);
  }
  DeviceQueue& queue = *calls[0].forward->queue;
  for (Small& call : calls) {
    call.forward->buffers.queue = call.buffers.queue = &queue;
    forward.push_back({&call.forward->problem, call.forward->buffers});
    backward.push_back({&call.forward->problem, call.buffers});
  }
  const Memory scratch(int64_t{4} << 30);
  const std::span<std::byte> workspace(scratch.get(), size_t{4} << 30);
  const std::vector<double> f =
      Time({[&] {
              for (Small& call : calls) {
                Must(call.forward->plan->Forward(call.forward->problem, call.forward->buffers));
                Must(queue.Wait());
              }
            },
            [&] { RunTogether(*calls[0].forward->plan, forward, workspace, queue); }},
           20000);
  Rates(report, what + " forward", f[0], f[1], tokens);
  const std::vector<double> b =
      Time({[&] {
              for (Small& call : calls) {
                Must(call.backward->Backward(call.forward->problem, call.buffers));
                Must(queue.Wait());
              }
            },
            [&] { RunTogether(*calls[0].backward, backward, workspace, queue); }},
           20000);
  Rates(report, what + " backward", b[0], b[1], tokens);
}

// A lone small request against a dense graph of its own shape: what the shared graph costs it.
void BenchLone(CudnnBackend& backend, DeviceContext& context, Report& report) {
  const Small small = MakeSmall(backend, 128);
  Request& f = *small.forward;
  const BackwardBuffers& b = small.buffers;
  const auto in = [&](Buffer buffer) { return b.inputs[static_cast<size_t>(buffer)]; };
  const auto grad = [&](Buffer buffer) { return b.grads[static_cast<size_t>(buffer)]; };
  SdpaPointers pointers;
  pointers.q = in(Buffer::kQ);
  pointers.k = in(Buffer::kK);
  pointers.v = in(Buffer::kV);
  pointers.out = f.buffers.out;
  pointers.lse = f.buffers.lse;
  pointers.d_out = b.d_out;
  pointers.dq = grad(Buffer::kQ);
  pointers.dk = grad(Buffer::kK);
  pointers.dv = grad(Buffer::kV);
  pointers.scale = static_cast<float>(f.problem.scale);
  for (const bool is_backward : {false, true}) {
    SdpaDescription d = BareDescription({"small", 1, 16, 16, 128, 64, 64, true});
    d.is_backward = is_backward;
    auto graph = SdpaGraph::Build(d, context.handle());
    Must(graph.status());
    const Memory workspace((*graph)->workspace_bytes() + 1);
    const std::vector<double> us =
        Time({[&] {
                Must((*graph)->Enqueue(context.handle(), pointers, workspace.get()));
                Must(context.Wait());
              },
              [&] {
                Must(is_backward ? small.backward->Backward(f.problem, b)
                                 : f.plan->Forward(f.problem, f.buffers));
                Must(f.queue->Wait());
              }},
             20000);
    const std::string what =
        std::string("1,16/16,128,64 causal") + (is_backward ? " backward" : "");
    report.Add(what, "bare dense graph, us", us[0]);
    report.Add(what, "plan, us", us[1]);
  }
}

}  // namespace

void BenchJoint(CudnnBackend& backend, DeviceContext& context, Report& report) {
  BenchLone(backend, context, report);
  BenchCalls(backend, report, "64 of 128 rows", std::vector<int64_t>(kCalls, 128));
  std::vector<int64_t> mixed;
  for (int i = 0; i < kCalls; ++i) mixed.push_back(1 + (i * 97) % 256);
  BenchCalls(backend, report, "64 of 1 to 256 rows", mixed);
}

}  // namespace attnd::bench
