// The backward half of the suite.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "engine/core/layout.h"
#include "engine/core/status.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/fp8.h"

namespace attnd::testing {
namespace {

constexpr int kMaxFailuresPerTest = 5;
constexpr size_t kMostShown = 4;

// Bound of the RMS error over the larger of the tensor's RMS and 0.1. Where O is FP8 too, so is
// what D = rowsum(dO * O) comes from.
double GradientBound(DType dtype, bool out_is_fp8) {
  switch (dtype) {
    case DType::kFloat8E4M3: return out_is_fp8 ? 1.1e-1 : 4e-2;
    case DType::kFloat8E5M2: return out_is_fp8 ? 2.2e-1 : 8e-2;
    case DType::kFloat16: return 8e-3;
    case DType::kBFloat16: return 3e-2;
    default: return 3e-5;
  }
}

// Of each element: the error is at most this, times 1 + |element|, beside what FP8 rounds.
double ElementBound(DType dtype, bool out_is_fp8) {
  switch (dtype) {
    case DType::kFloat8E4M3: return out_is_fp8 ? 5e-1 : 1e-3;
    case DType::kFloat8E5M2: return out_is_fp8 ? 1.0 : 1e-3;
    case DType::kFloat16: return 2e-2;
    case DType::kBFloat16: return 7e-2;
    default: return 1e-4;
  }
}

// Compares one gradient, element by element.
class Comparison {
 public:
  // `allowance` comes on top of the bound, and, times the size of a dO . v, of that of each
  // element.
  Comparison(const char* name, const AttentionProblem& problem, const StoredAs& stored,
             double allowance)
      : name_(name),
        stored_(stored),
        bound_(GradientBound(problem.dtype, IsFloat8(problem.out_dtype)) + allowance),
        element_bound_(ElementBound(problem.dtype, IsFloat8(problem.out_dtype)) +
                       allowance * std::sqrt(static_cast<double>(problem.head_dim_v))) {}

  // `got` is what is stored; `want` is NaN where nothing contributes.
  void Add(double got, double want, int64_t element) {
    if (std::isnan(want)) {
      ExpectZero(got, element);
      return;
    }
    got /= stored_.scale;
    want = stored_.InRange(want);
    const double allowed = element_bound_ * (1 + std::abs(want)) + stored_.RoundingError(want);
    if (!(std::abs(got - want) <= allowed) && ++wrong_elements_ <= kMostShown) {
      wrong_ << " " << name_ << " at " << element << " = " << got << ", not " << want;
    }
    ++count_;
    error_ += (got - want) * (got - want);
    reference_ += want * want;
  }

  void ExpectZero(double got, int64_t element) {
    if (got == 0 || ++wrong_elements_ > kMostShown) return;
    wrong_ << " " << name_ << " at " << element << " = " << got << ", not 0";
  }

  std::string Result() {
    if (count_ == 0) return wrong_.str();
    const double rms = std::sqrt(error_ / count_);
    const double relative = rms / std::max(std::sqrt(reference_ / count_), 0.1);
    if (!(relative <= bound_)) wrong_ << " " << name_ << " RMS " << relative << " > " << bound_;
    return wrong_.str();
  }

 private:
  const char* const name_;
  const StoredAs stored_;
  const double bound_, element_bound_;
  double error_ = 0, reference_ = 0, count_ = 0;
  size_t wrong_elements_ = 0;
  std::ostringstream wrong_;
};

// Places values [sum q_len, h, d_v] (or [sum q_len, h], one component) where `index_of` says; the
// rest of the bytes is 0xFF.
template <typename Load, typename Index>
std::vector<std::byte> Scatter(const Geometry& g, const TensorDesc& desc, int64_t components,
                               Load load, Index index_of) {
  std::vector<std::byte> bytes(*NumBytes(desc), std::byte{0xFF});
  int64_t next = 0;
  for (int64_t i = 0; i < g.batch; ++i) {
    for (int64_t j = 0; j < g.q_len[i]; ++j) {
      for (int64_t n = 0; n < g.h; ++n) {
        for (int64_t c = 0; c < components; ++c) {
          StoreElement(desc.dtype, bytes.data(), index_of(i, j, n, c), load(next++));
        }
      }
    }
  }
  return bytes;
}

std::string CompareInputGradients(const Arrangement& a, const GoldenCase& c,
                                  const AttentionProblem& problem, const BackwardResult& result) {
  constexpr const char* kNames[] = {"dQ", "dK", "dV"};
  const Fp8Scales& fp8 = problem.fp8;
  const double scales[] = {fp8.scale_d_q, fp8.scale_d_k, fp8.scale_d_v};
  const Geometry& g = c.geometry;
  std::array<std::vector<bool>, kNumInputBuffers> owned;
  const int64_t size = SizeOf(c.dtype);
  for (size_t k = 0; k < owned.size(); ++k) owned[k].resize(result.grads[k].size() / size);
  std::string wrong;
  for (int tensor = 0; tensor < 3; ++tensor) {
    Comparison comparison(kNames[tensor], problem, {c.dtype, scales[tensor]}, LogitAllowance(c));
    size_t next = 0;
    const std::vector<int64_t>& lens = tensor == 0 ? g.q_len : g.kv_len;
    for (int64_t i = 0; i < g.batch; ++i) {
      for (int64_t j = 0; j < lens[i]; ++j) {
        for (int64_t n = 0; n < (tensor == 0 ? g.h : g.g); ++n) {
          for (int64_t d = 0; d < (tensor == 2 ? g.d_v : g.d_qk); ++d) {
            const ElementPlace place = InputPlace(a, g, tensor, {i, j, n, d});
            const auto buffer = static_cast<size_t>(place.buffer);
            owned[buffer].at(place.element) = true;
            comparison.Add(LoadElement(c.dtype, result.grads[buffer].data(), place.element),
                           c.dqkv[tensor][next++], place.element);
          }
        }
      }
    }
    wrong += comparison.Result();
  }
  Comparison gaps("a gradient of no sequence", problem, {}, 0);
  for (size_t k = 0; k < owned.size(); ++k) {
    for (size_t element = 0; element < owned[k].size(); ++element) {
      if (owned[k][element]) continue;
      gaps.ExpectZero(LoadElement(c.dtype, result.grads[k].data(), element), element);
    }
  }
  return wrong + gaps.Result();
}

// `got` is in the type of `stored`.
struct StoredArray {
  const char* name;
  DType dtype;
  const std::vector<std::byte>& got;
};

std::string CompareArray(const StoredArray& stored, const AttentionProblem& problem,
                         const std::vector<double>& want, double allowance) {
  const auto& [name, dtype, got] = stored;
  if (got.size() != want.size() * SizeOf(dtype)) return std::string(" no ") + name;
  Comparison comparison(name, problem, {}, allowance);
  for (size_t k = 0; k < want.size(); ++k) {
    comparison.Add(LoadElement(dtype, got.data(), k), want[k], k);
  }
  return comparison.Result();
}

// One cell. Empty if it passed or was refused as it may be.
std::string RunBackwardCell(const BackendUnderTest& backend, AttentionBackend& instance,
                            const Arrangement& a, const GoldenCase& c, size_t index) {
  PackedRequest request = MakeRequest(a, c, {.explicit_sizes = index % 2 == 0, .seed = index});
  ResolveOptions options;
  if (index % 8 == 5 || (IsFloat8(c.dtype) && index % 4 < 2)) {
    options.out_dtype = DType::kFloat32;
  }
  const auto problem = Resolve(request.spec, request.sequences, request.inputs, options);
  if (!problem.ok()) return problem.status().ToString();
  const auto plan = instance.BuildBackwardPlan(*problem);
  Tally& tally = TallyOf(BackwardName(backend));
  if (const absl::Status& support = plan.status(); !support.ok()) {
    const bool is_allowed = a.IsPaged() && ErrorField(support) == "spec.layout";
    return TallyRefusal(support, backend.runs_everything && !is_allowed, tally);
  }
  const BackwardRequest sent = MakeBackwardRequest(a, c, *problem, std::move(request));
  const auto result = RunBackward(backend, **plan, *problem, sent);
  if (!result.ok()) return result.status().ToString();
  ++tally.ran[std::string(a.name)];
  return CompareGradients(a, c, *problem, *result);
}

}  // namespace

BackwardRequest MakeBackwardRequest(const Arrangement& a, const GoldenCase& c,
                                    const AttentionProblem& problem, PackedRequest forward) {
  const Geometry& g = c.geometry;
  const auto out_index = [&](int64_t i, int64_t j, int64_t n, int64_t d) {
    return OutIndex(a, g, {i, j, n, d});
  };
  const auto out = [&](int64_t k) {
    return std::isnan(c.out[k]) ? 0.0f : static_cast<float>(c.out[k] * problem.out_scale());
  };
  const auto lse = [&](int64_t k) { return static_cast<float>(c.lse[k]); };
  // What FP8 stores is real where dO is not FP8.
  const double d_out_factor = problem.fp8.descale_d_o / problem.d_out_descale();
  const auto d_out = [&](int64_t k) {
    return static_cast<float>(LoadElement(c.dtype, c.d_out.data(), k) * d_out_factor);
  };
  BackwardRequest request;
  request.forward = std::move(forward);
  request.out = Scatter(g, problem.out_desc, g.d_v, out, out_index);
  request.d_out = Scatter(g, problem.out_desc, g.d_v, d_out, out_index);
  request.lse = Scatter(g, problem.lse_desc, 1, lse, [&](int64_t i, int64_t j, int64_t n, int64_t) {
    return LseIndex(a, g, {i, j, n});
  });
  return request;
}

absl::StatusOr<BackwardResult> RunBackward(const BackendUnderTest& backend, BackwardPlan& plan,
                                           const AttentionProblem& problem,
                                           const BackwardRequest& request) {
  std::vector<TestBuffer> inputs, grads;
  BackwardBuffers buffers;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    inputs.emplace_back(backend, request.forward.buffers[i]);
    grads.emplace_back(backend, request.forward.buffers[i].size());
    buffers.inputs[i] = inputs.back().get();
    buffers.grads[i] = grads.back().get();
  }
  const TestBuffer bias(backend, request.forward.bias);
  const TestBuffer softmax_offset(backend, request.forward.softmax_offset);
  const TestBuffer d_bias(backend, request.forward.bias.size());
  const TestBuffer d_softmax_offset(backend, request.forward.softmax_offset.size());
  const TestBuffer out(backend, request.out), lse(backend, request.lse);
  const TestBuffer d_out(backend, request.d_out);
  const TestBuffer workspace(backend, plan.workspace_bytes());
  buffers.bias = bias.get();
  buffers.softmax_offset = reinterpret_cast<const float*>(softmax_offset.get());
  buffers.out = out.get();
  const TestBuffer amax(backend, IsFloat8(problem.dtype) ? 4 * sizeof(float) : 0);
  buffers.amax = reinterpret_cast<float*>(amax.get());
  buffers.lse = reinterpret_cast<const float*>(lse.get());
  buffers.d_out = d_out.get();
  buffers.d_bias = d_bias.get();
  buffers.d_softmax_offset = reinterpret_cast<float*>(d_softmax_offset.get());
  buffers.workspace = {workspace.get(), static_cast<size_t>(plan.workspace_bytes())};
  if (backend.queue) buffers.queue = &backend.queue();
  ATTND_RETURN_IF_ERROR(plan.Backward(problem, buffers));
  if (buffers.queue != nullptr) ATTND_RETURN_IF_ERROR(buffers.queue->Wait());
  BackwardResult result;
  for (int i = 0; i < kNumInputBuffers; ++i) result.grads[i] = grads[i].Read();
  result.d_bias = d_bias.Read();
  result.d_softmax_offset = d_softmax_offset.Read();
  result.amax = amax.Read();
  return result;
}

std::string CompareGradients(const Arrangement& a, const GoldenCase& c,
                             const AttentionProblem& problem, const BackwardResult& result) {
  // Of dP, dQ and dK, which need D, and of dV.
  const double with_d = IsFloat8(problem.out_dtype) ? 2.5e-1 : 1e-4;
  return CompareInputGradients(a, c, problem, result) +
         CompareArray({"dBias", problem.dtype, result.d_bias}, problem, c.d_bias,
                      LogitAllowance(c)) +
         CompareArray({"dSoftmaxOffset", DType::kFloat32, result.d_softmax_offset}, problem,
                      c.d_softmax_offset, LogitAllowance(c)) +
         CompareAmax(c, result.amax, 2, std::array{with_d, with_d, with_d, 1e-5});
}

void RunBackwardConformance(const BackendUnderTest& backend, AttentionBackend& instance,
                            const Arrangement& a, const std::string& group) {
  int failures = 0;
  const std::vector<GoldenCase>& cases = GoldenCases();
  for (size_t index = 0; index < cases.size(); ++index) {
    const GoldenCase& c = cases[index];
    if (c.group != group || !c.has_gradients || !CanHold(a, c.geometry)) continue;
    if (index % kEveryNthCase != 0) continue;
    const std::string wrong = RunBackwardCell(backend, instance, a, c, index);
    if (wrong.empty()) continue;
    ADD_FAILURE() << a.name << ", " << c.group << "/" << c.name << ": " << wrong;
    if (++failures == kMaxFailuresPerTest) break;
  }
}

}  // namespace attnd::testing
