#include "tests/conformance/conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "engine/core/layout.h"
#include "engine/core/status.h"
#include "tests/conformance/fp8.h"

namespace attnd::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kMaxFailuresPerTest = 5;

// Bound of the relative RMS error of O, by its precision or that of the inputs. FP8 inputs are
// exact floats.
double OutBound(const GoldenCase& c, DType out_dtype) {
  switch (IsFloat8(c.dtype) ? out_dtype : c.dtype) {
    case DType::kFloat8E4M3: return 4e-2;
    case DType::kFloat8E5M2: return 8e-2;
    case DType::kFloat16: return 2e-3;
    case DType::kBFloat16: return 1.5e-2;
    default: return 1e-6 * std::sqrt(static_cast<double>(c.geometry.d_qk));
  }
}

// Inputs are exact and the softmax is computed in float, whatever the dtype.
double LseBound(double lse) { return 1e-5 * std::max(1.0, std::abs(lse)); }

float LseAt(const ForwardResult& result, int64_t index) {
  return LoadElement(DType::kFloat32, result.lse.data(), index);
}

// Calls visit(sequence, row, head) in the order of the golden arrays.
template <typename Visitor>
void ForEachRow(const Geometry& g, Visitor visit) {
  for (int64_t i = 0; i < g.batch; ++i) {
    for (int64_t j = 0; j < g.q_len[i]; ++j) {
      for (int64_t n = 0; n < g.h; ++n) visit(i, j, n);
    }
  }
}

std::string CompareOut(const Arrangement& a, const GoldenCase& c, const AttentionProblem& problem,
                       const ForwardResult& result) {
  const Geometry& g = c.geometry;
  std::vector<bool> owned(*NumElements(problem.out_desc.shape));
  const StoredAs stored{problem.out_dtype, problem.out_scale()};
  double error = 0, reference = 0;
  std::ostringstream wrong;
  size_t row = 0;
  ForEachRow(g, [&](int64_t i, int64_t j, int64_t n) {
    for (int64_t d = 0; d < g.d_v; ++d) {
      const int64_t index = OutIndex(a, g, {i, j, n, d});
      const double got = LoadElement(problem.out_dtype, result.out.data(), index) / stored.scale;
      const double want = stored.InRange(c.out[row * g.d_v + d]);
      owned[index] = true;
      if (std::isnan(want) ? got != 0 : !std::isfinite(got)) {
        wrong << " O[" << i << "," << j << "," << n << "," << d << "] = " << got;
      }
      if (std::isnan(want)) continue;
      if (IsFloat8(stored.dtype) &&
          std::abs(got - want) > stored.RoundingError(want) + 1e-5 * (1 + std::abs(want))) {
        wrong << " O[" << i << "," << j << "," << n << "," << d << "] = " << got << ", not "
              << want;
      }
      error += (got - want) * (got - want);
      reference += want * want;
    }
    ++row;
  });
  for (size_t index = 0; index < owned.size(); ++index) {
    const float got = LoadElement(problem.out_dtype, result.out.data(), index);
    if (!owned[index] && got != 0) wrong << " O of no sequence at " << index << " = " << got;
  }
  const double relative = reference > 0 ? std::sqrt(error / reference) : std::sqrt(error);
  const double bound = OutBound(c, problem.out_dtype) + LogitAllowance(c);
  if (!(relative <= bound)) wrong << " relative RMS " << relative << " > " << bound;
  return wrong.str();
}

std::string CompareLse(const Arrangement& a, const GoldenCase& c, const AttentionProblem& problem,
                       const ForwardResult& result) {
  std::vector<bool> owned(*NumElements(problem.lse_desc.shape));
  std::ostringstream wrong;
  size_t row = 0;
  ForEachRow(c.geometry, [&](int64_t i, int64_t j, int64_t n) {
    const int64_t index = LseIndex(a, c.geometry, {i, j, n});
    const double got = LseAt(result, index), want = c.lse[row++];
    owned[index] = true;
    if (want == -kInfinity ? got != want : !(std::abs(got - want) <= LseBound(want))) {
      wrong << " LSE[" << i << "," << j << "," << n << "] = " << got << ", not " << want;
    }
  });
  for (size_t index = 0; index < owned.size(); ++index) {
    const double got = LseAt(result, index);
    if (!owned[index] && got != -kInfinity) {
      wrong << " LSE of no sequence at " << index << " = " << got;
    }
  }
  return wrong.str();
}

std::string Shorten(std::string text) {
  if (text.size() > 600) text = text.substr(0, 600) + " ...";
  return text;
}

// One cell. Empty if it passed or was refused as it may be.
std::string RunCell(const BackendUnderTest& backend, AttentionBackend& instance,
                    const Arrangement& a, const GoldenCase& c, size_t index) {
  const PackedRequest request =
      MakeRequest(a, c, {.explicit_sizes = index % 2 == 0, .seed = index});
  ResolveOptions options;
  if (index / 3 % 2 == 0) options.out_dtype = DType::kFloat32;
  const auto problem = Resolve(request.spec, request.sequences, request.inputs, options);
  if (!problem.ok()) return problem.status().ToString();
  const auto plan = instance.BuildPlan(*problem);
  if (const absl::Status& support = plan.status(); !support.ok()) {
    return TallyRefusal(support, backend.runs_everything, TallyOf(backend.name));
  }
  const auto result = RunForward(backend, **plan, *problem, request);
  if (!result.ok()) return result.status().ToString();
  ++TallyOf(backend.name).ran[std::string(a.name)];
  return Compare(a, c, *problem, *result);
}

}  // namespace

TestBuffer::TestBuffer(const BackendUnderTest& backend, std::span<const std::byte> contents)
    : backend_(&backend),
      size_(contents.size()),
      memory_(size_ > 0 ? backend.allocate(size_) : nullptr, backend.release) {
  if (size_ > 0) backend.copy(get(), contents.data(), size_);
}

TestBuffer::TestBuffer(const BackendUnderTest& backend, size_t size)
    : TestBuffer(backend, std::vector<std::byte>(size, std::byte{0xFF})) {}

std::vector<std::byte> TestBuffer::Read() const {
  std::vector<std::byte> contents(size_);
  if (size_ > 0) backend_->copy(contents.data(), get(), size_);
  return contents;
}

PackedRequest MakeRequest(const Arrangement& a, const GoldenCase& c, const PackOptions& options) {
  PackOptions pack = options;
  pack.explicit_sizes = options.explicit_sizes || !c.bias_shape.empty();
  PackedRequest request = Pack(a, c.geometry, c.tensors, pack);
  request.spec.causal = c.causal;
  request.spec.window_alignment = c.alignment;
  request.spec.window_left = c.window_left;
  request.spec.window_right = c.window_right;
  request.spec.scale = c.scale;
  request.spec.logit_softcap = c.softcap;
  request.spec.bias_kind = c.bias_kind;
  request.spec.alibi = c.alibi;
  request.spec.softmax_kind = c.softmax_kind;
  request.spec.dropout = c.dropout;
  request.spec.fp8 = c.fp8;
  if (!c.bias_shape.empty()) {
    request.inputs.bias = TensorDesc{c.dtype, c.bias_shape};
    request.bias.assign(c.bias.begin(), c.bias.end());
  }
  if (c.softmax_kind == SoftmaxKind::kLearnable) {
    request.inputs.softmax_offset = TensorDesc{DType::kFloat32, {c.geometry.h}};
    request.softmax_offset.assign(c.softmax_offset.begin(), c.softmax_offset.end());
  }
  return request;
}

absl::StatusOr<ForwardResult> RunForward(const BackendUnderTest& backend, AttentionPlan& plan,
                                         const AttentionProblem& problem,
                                         const PackedRequest& request, bool want_lse) {
  std::vector<TestBuffer> inputs;
  ForwardBuffers buffers;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    inputs.emplace_back(backend, request.buffers[i]);
    buffers.inputs[i] = inputs.back().get();
  }
  auto table = [&](const std::vector<int32_t>& entries) {
    inputs.emplace_back(backend, std::as_bytes(std::span(entries)));
    return reinterpret_cast<const int32_t*>(inputs.back().get());
  };
  if (problem.is_paged) {
    ATTND_RETURN_IF_ERROR(CheckPageTable(problem, request.page_table_k, problem.num_pages_k,
                                         "sequences.page_table_k"));
    ATTND_RETURN_IF_ERROR(CheckPageTable(problem, request.page_table_v, problem.num_pages_v,
                                         "sequences.page_table_v"));
    buffers.page_table_k = table(request.page_table_k);
    buffers.page_table_v = table(request.page_table_v);
  }
  const TestBuffer bias(backend, request.bias), softmax_offset(backend, request.softmax_offset);
  buffers.bias = bias.get();
  buffers.softmax_offset = reinterpret_cast<const float*>(softmax_offset.get());
  const TestBuffer out(backend, *NumBytes(problem.out_desc));
  const TestBuffer lse(backend, *NumBytes(problem.lse_desc));
  const TestBuffer amax(backend, IsFloat8(problem.dtype) ? 2 * sizeof(float) : 0);
  const TestBuffer workspace(backend, plan.workspace_bytes());
  buffers.out = out.get();
  buffers.lse = want_lse ? reinterpret_cast<float*>(lse.get()) : nullptr;
  buffers.amax = reinterpret_cast<float*>(amax.get());
  buffers.workspace = {workspace.get(), static_cast<size_t>(plan.workspace_bytes())};
  if (backend.queue) buffers.queue = &backend.queue();
  ATTND_RETURN_IF_ERROR(plan.Forward(problem, buffers));
  if (buffers.queue != nullptr) ATTND_RETURN_IF_ERROR(buffers.queue->Wait());
  return ForwardResult{out.Read(), lse.Read(), amax.Read()};
}

std::string Compare(const Arrangement& a, const GoldenCase& c, const AttentionProblem& problem,
                    const ForwardResult& result) {
  if (problem.out_desc.shape != OutShape(a, c.geometry)) {
    return "O has shape " + ShapeString(problem.out_desc.shape);
  }
  if (problem.lse_desc.shape != LseShape(a, c.geometry)) {
    return "LSE has shape " + ShapeString(problem.lse_desc.shape);
  }
  return Shorten(CompareOut(a, c, problem, result)) + Shorten(CompareLse(a, c, problem, result)) +
         CompareAmax(c, result.amax, 0, std::array{1e-5, 1e-5});
}

std::string CompareAmax(const GoldenCase& c, const std::vector<std::byte>& got, size_t first,
                        std::span<const double> bounds) {
  if (!IsFloat8(c.dtype)) return "";
  std::ostringstream wrong;
  for (size_t k = 0; k < bounds.size(); ++k) {
    const double value = LoadElement(DType::kFloat32, got.data(), static_cast<int64_t>(k));
    const double want = c.amax[first + k];
    if (std::abs(value - want) <= bounds[k] * want) continue;  // False for NaN.
    wrong << " amax " << k << " = " << value << ", not " << want;
  }
  return wrong.str();
}

Tally& TallyOf(const std::string& backend) {
  static std::map<std::string, Tally> tallies;
  return tallies[backend];
}

std::string TallyRefusal(const absl::Status& status, bool runs_everything, Tally& tally) {
  if (runs_everything || status.code() != absl::StatusCode::kUnimplemented ||
      ErrorField(status).empty()) {
    return "refused: " + status.ToString();
  }
  ++tally.refused[std::string(status.message())];
  return "";
}

void RunConformance(const BackendUnderTest& backend, AttentionBackend& instance,
                    const Arrangement& a, const std::string& group) {
  int failures = 0;
  const std::vector<GoldenCase>& cases = GoldenCases();
  for (size_t index = 0; index < cases.size(); ++index) {
    const GoldenCase& c = cases[index];
    if (c.group != group || !CanHold(a, c.geometry) || index % kEveryNthCase != 0) continue;
    const std::string wrong = RunCell(backend, instance, a, c, index);
    if (wrong.empty()) continue;
    ADD_FAILURE() << a.name << ", " << c.group << "/" << c.name << ": " << wrong;
    if (++failures == kMaxFailuresPerTest) break;
  }
}

}  // namespace attnd::testing
