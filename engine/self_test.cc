#include "engine/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/dtype.h"
#include "engine/cpu/reference_attention.h"

namespace attnd {
namespace {

constexpr int64_t kSeqlen = 128, kHeads = 2, kKvHeads = 1, kHeadDim = 64, kPageSize = 64;

using Bytes = std::vector<std::byte>;

void Describe(CallDescription& d, Buffer buffer, std::vector<int64_t> shape) {
  d.inputs.buffers[static_cast<int>(buffer)] = TensorDesc{d.spec.dtype, std::move(shape)};
}

// For inputs of unit variance: what is stored in FP8 uses its range, and does not pass its end.
std::optional<Fp8Scales> ScalesOf(DType dtype) {
  if (!IsFloat8(dtype)) return std::nullopt;
  constexpr float kLarge = 16, kLargest = 256;  // P is at most 1.
  return Fp8Scales{.scale_s = kLargest,
                   .descale_s = 1 / kLargest,
                   .scale_o = kLarge,
                   .descale_o = 1 / kLarge,
                   .scale_d_p = kLarge,
                   .descale_d_p = 1 / kLarge,
                   .scale_d_q = kLarge,
                   .scale_d_k = kLarge,
                   .scale_d_v = kLarge};
}

// Two sequences of BSHD, causal; `lengths`: the first is shorter than the axis.
CallDescription Dense(DType dtype, bool lengths) {
  CallDescription d;
  d.spec.layout = Layout::kBshdBshdBshd;
  d.spec.dtype = dtype;
  d.spec.fp8 = ScalesOf(dtype);
  d.spec.causal = Causal::kTopLeft;
  d.return_lse = true;
  Describe(d, Buffer::kQ, {2, kSeqlen, kHeads, kHeadDim});
  Describe(d, Buffer::kK, {2, kSeqlen, kKvHeads, kHeadDim});
  Describe(d, Buffer::kV, {2, kSeqlen, kKvHeads, kHeadDim});
  if (lengths) d.sequences.cu_seqlens_q = d.sequences.cu_seqlens_kv = {0, 70, 70 + kSeqlen};
  return d;
}

// Beside a soft cap, which has kernels of its own on the GPU.
CallDescription Capped(DType dtype) {
  CallDescription d = Dense(dtype, /*lengths=*/true);
  d.spec.logit_softcap = 5;
  return d;
}

// Two decode steps on pages.
CallDescription Paged(DType dtype) {
  CallDescription d;
  d.spec.layout = Layout::kPagedKvBshdBshdBshd;
  d.spec.dtype = dtype;
  d.spec.fp8 = ScalesOf(dtype);
  d.return_lse = true;
  Describe(d, Buffer::kQ, {2, 1, kHeads, kHeadDim});
  Describe(d, Buffer::kK, {4, kPageSize, kKvHeads, kHeadDim});
  Describe(d, Buffer::kV, {4, kPageSize, kKvHeads, kHeadDim});
  d.sequences.cu_seqlens_q = {0, 1, 2};
  d.sequences.cu_seqlens_kv = {0, 100, 100 + kSeqlen};
  d.sequences.page_table_k = d.sequences.page_table_v = TensorDesc{DType::kInt32, {2, 2}};
  return d;
}

Bytes Noise(const TensorDesc& desc, unsigned seed) {
  Bytes bytes(static_cast<size_t>(*NumBytes(desc)));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < *NumElements(desc.shape); ++i) {
    StoreElement(desc.dtype, bytes.data(), i, normal(random));
  }
  return bytes;
}

// A call's tensors by Piece, as the engine got or gave them.
using Tensors = std::array<Bytes, kNumPieces>;

Bytes& At(Tensors& tensors, Piece piece) { return tensors[static_cast<size_t>(piece)]; }

struct Answer {
  absl::Status status;
  AttentionProblem problem;
  ExecutionReport report;
  Tensors outputs;
};

// Fills what `given` leaves empty with noise, and puts it there.
void FillInputs(const PreparedCall& prepared, Tensors& given) {
  for (int i = 0; i < kNumPieces; ++i) {
    const auto piece = static_cast<Piece>(i);
    const std::span<std::byte> target = prepared.input(piece);
    if (target.empty()) continue;
    if (piece == Piece::kPageTableK || piece == Piece::kPageTableV) {
      const std::array<int32_t, 4> pages = {3, 1, 0, 2};
      given[i].resize(sizeof(pages));
      std::memcpy(given[i].data(), pages.data(), sizeof(pages));
    } else if (given[i].empty()) {
      given[i] = Noise(*prepared.desc(piece), static_cast<unsigned>(i) + 1);
    }
    std::copy_n(given[i].begin(), target.size(), target.begin());
  }
}

Answer Run(Engine& engine, const CallDescription& description, Tensors& inputs) {
  absl::StatusOr<CheckedCall> call = engine.Check(description);
  if (!call.ok()) return {.status = call.status()};
  Answer answer{.problem = call->problem};
  std::promise<absl::StatusOr<CallResult>> promise;
  engine.Prepare(*std::move(call), {}, [&](absl::StatusOr<PreparedCall> prepared) {
    if (!prepared.ok()) return promise.set_value(prepared.status());
    FillInputs(*prepared, inputs);
    engine.Submit(*std::move(prepared),
                  [&](absl::StatusOr<CallResult> result) { promise.set_value(std::move(result)); });
  });
  const absl::StatusOr<CallResult> result = promise.get_future().get();
  answer.status = result.status();
  if (!result.ok()) return answer;
  answer.report = result->report;
  for (int i = 0; i < kNumPieces; ++i) {
    if (result->layout.desc(static_cast<Piece>(i)) == nullptr) continue;
    const auto bytes = result->bytes(static_cast<Piece>(i));
    answer.outputs[i].assign(bytes.begin(), bytes.end());
  }
  return answer;
}

// RMS of the difference over the larger of the RMS and 0.1, of elements that are finite numbers in
// `want`; infinite where one of the two is no number and the other is.
double RelativeError(DType dtype, const Bytes& got, const Bytes& want) {
  double difference = 0, square = 0;
  const auto count = static_cast<int64_t>(want.size()) / SizeOf(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const double a = LoadElement(dtype, got.data(), i), b = LoadElement(dtype, want.data(), i);
    if (a == b) {
      if (std::isfinite(b)) square += b * b;
      continue;
    }
    if (!std::isfinite(a) || !std::isfinite(b)) return INFINITY;
    difference += (a - b) * (a - b);
    square += b * b;
  }
  const double n = static_cast<double>(std::max<int64_t>(1, count));
  return std::sqrt(difference / n) / std::max(std::sqrt(square / n), 0.1);
}

double Bound(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 3e-5;
    case DType::kFloat16: return 8e-3;
    case DType::kBFloat16: return 3e-2;
    case DType::kFloat8E4M3: return 8e-2;
    default: return 1.6e-1;
  }
}

// The reference loop's outputs for the same inputs.
Tensors Reference(const AttentionProblem& p, Pass pass, Tensors& inputs) {
  const CallMemory memory =
      pass == Pass::kForward ? LayOutForward(p, /*with_lse=*/true) : LayOutBackward(p);
  Bytes in(static_cast<size_t>(memory.inputs.bytes()));
  Bytes out(static_cast<size_t>(memory.outputs.bytes()));
  for (int i = 0; i < kNumPieces; ++i) {
    std::copy(inputs[i].begin(), inputs[i].end(),
              memory.inputs.In(in.data(), static_cast<Piece>(i)).begin());
  }
  const absl::Status status =
      pass == Pass::kForward
          ? ReferenceForward(p, ForwardBuffersIn(memory, in.data(), out.data()))
          : ReferenceBackward(p, BackwardBuffersIn(memory, in.data(), out.data()));
  Tensors outputs;
  for (int i = 0; status.ok() && i < kNumPieces; ++i) {
    const auto bytes = memory.outputs.In(out.data(), static_cast<Piece>(i));
    outputs[i].assign(bytes.begin(), bytes.end());
  }
  return outputs;
}

// What is wrong with the answer; empty: nothing.
std::string Judge(Answer& answer, Pass pass, DType dtype, Tensors& inputs) {
  if (!answer.status.ok()) return std::string(answer.status.message());
  Tensors want = Reference(answer.problem, pass, inputs);
  for (int i = 0; i < kNumPieces; ++i) {
    const auto piece = static_cast<Piece>(i);
    const bool is_float = piece == Piece::kLse || piece == Piece::kAmax;
    const double error =
        RelativeError(is_float ? DType::kFloat32 : dtype, answer.outputs[i], want[i]);
    if (!(error <= Bound(dtype))) return absl::StrCat("relative error ", error);
  }
  return "";
}

class SelfTest {
 public:
  explicit SelfTest(Engine& engine) : engine_(engine) {}

  void TestCall(const CallDescription& forward) {
    Tensors inputs;
    Answer answer = Test(forward, inputs);
    if (!answer.status.ok() || forward.spec.layout != Layout::kBshdBshdBshd) return;
    CallDescription backward = forward;
    backward.pass = Pass::kBackward;
    backward.return_lse = false;
    backward.backward = {answer.problem.out_desc, answer.problem.lse_desc, answer.problem.out_desc};
    At(inputs, Piece::kOut) = At(answer.outputs, Piece::kOut);
    At(inputs, Piece::kLse) = At(answer.outputs, Piece::kLse);
    Test(backward, inputs);
  }

  std::vector<std::string> failures() && { return std::move(failures_); }

 private:
  Answer Test(const CallDescription& d, Tensors& inputs) {
    std::promise<absl::StatusOr<PlanReport>> promise;
    engine_.Plan(d, [&](absl::StatusOr<PlanReport> r) { promise.set_value(std::move(r)); });
    const absl::StatusOr<PlanReport> plan = promise.get_future().get();
    // What no backend computes is no failure, and a small pool says nothing about kernels.
    if (!plan.ok()) return {.status = plan.status()};
    if (!plan->support.ok()) return {.status = plan->support};
    Answer answer = Run(engine_, d, inputs);
    const std::string fault = Judge(answer, d.pass, d.spec.dtype, inputs);
    if (fault.empty()) return answer;
    const KernelFamily family = {plan->backend, plan->engine, d.spec.dtype, d.pass};
    failures_.push_back(absl::StrCat(NameOf(family), " is disabled: ", fault));
    engine_.Disable(family);
    return answer;
  }

  Engine& engine_;
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<std::string> RunSelfTest(Engine& engine) {
  SelfTest test(engine);
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                      DType::kFloat8E5M2}) {
    test.TestCall(Dense(dtype, /*lengths=*/false));
    test.TestCall(Dense(dtype, /*lengths=*/true));
    // Other types have no other kernels without it.
    if (SizeOf(dtype) == 2) test.TestCall(Capped(dtype));
    test.TestCall(Paged(dtype));
  }
  return std::move(test).failures();
}

}  // namespace attnd
