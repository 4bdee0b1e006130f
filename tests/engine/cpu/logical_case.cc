#include "tests/engine/cpu/logical_case.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

#include "engine/core/layout.h"
#include "tests/engine/cpu/random_elements.h"

namespace attnd::testing {
namespace {

// A buffer's last byte is the last of its mapping but one page, which must not be touched.
class GuardedMemory {
 public:
  static std::byte* Allocate(size_t size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (size + page - 1) / page * page;
    void* mapping = mmap(nullptr, used + page, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(mapping, MAP_FAILED);
    auto* base = static_cast<std::byte*>(mapping);
    EXPECT_EQ(mprotect(base + used, page, PROT_NONE), 0);
    std::byte* memory = base + used - size;
    Sizes()[memory] = {base, used + page};
    return memory;
  }
  static void Release(std::byte* memory) {
    const auto mapping = Sizes().find(memory);
    munmap(mapping->second.first, mapping->second.second);
    Sizes().erase(mapping);
  }

 private:
  static std::map<std::byte*, std::pair<void*, size_t>>& Sizes() {
    static std::map<std::byte*, std::pair<void*, size_t>> sizes;
    return sizes;
  }
};

BackendUnderTest OnGuardedMemory() {
  return {.name = "guarded",
          .allocate = GuardedMemory::Allocate,
          .release = GuardedMemory::Release,
          .copy = [](std::byte* to, const std::byte* from, size_t size) {
            std::memcpy(to, from, size);
          }};
}

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// The case with its tensors as bytes, and where they are.
struct Stored {
  explicit Stored(const LogicalCase& from) : c(from.spec) {
    c.tensors.dtype = c.dtype;
    for (size_t k = 0; k < 3; ++k) qkv[k] = Narrow(c.dtype, from.qkv[k]);
    for (size_t k = 0; k < 3; ++k) c.tensors.qkv[k] = qkv[k];
    d_out = Narrow(c.dtype, from.d_out);
    bias = Narrow(c.dtype, from.bias);
    sinks = Narrow(DType::kFloat32, from.sinks);
    c.d_out = d_out;
    c.bias = bias;
    c.softmax_offset = sinks;
  }
  Stored(const Stored&) = delete;

  GoldenCase c;
  std::array<std::vector<std::byte>, 3> qkv;
  std::vector<std::byte> d_out, bias, sinks;
};

template <typename Visitor>
void ForEachElement(const std::vector<int64_t>& lens, int64_t heads, int64_t components,
                    Visitor visit) {
  for (int64_t i = 0; i < static_cast<int64_t>(lens.size()); ++i) {
    for (int64_t j = 0; j < lens[static_cast<size_t>(i)]; ++j) {
      for (int64_t n = 0; n < heads; ++n) {
        for (int64_t c = 0; c < components; ++c) visit(std::array<int64_t, 4>{i, j, n, c});
      }
    }
  }
}

void TakeForward(const Arrangement& a, const Geometry& g, const AttentionProblem& problem,
                 const ForwardResult& result, LogicalAnswer& answer) {
  ForEachElement(g.q_len, g.h, g.d_v, [&](const std::array<int64_t, 4>& at) {
    answer.out.push_back(LoadElement(problem.out_dtype, result.out.data(), OutIndex(a, g, at)));
  });
  ForEachElement(g.q_len, g.h, 1, [&](const std::array<int64_t, 4>& at) {
    const int64_t index = LseIndex(a, g, {at[0], at[1], at[2]});
    answer.lse.push_back(LoadElement(DType::kFloat32, result.lse.data(), index));
  });
}

void TakeGradients(const Arrangement& a, const GoldenCase& c, const BackwardResult& result,
                   LogicalAnswer& answer) {
  const Geometry& g = c.geometry;
  for (int tensor = 0; tensor < 3; ++tensor) {
    const bool is_q = tensor == 0;
    ForEachElement(is_q ? g.q_len : g.kv_len, is_q ? g.h : g.g, tensor == 2 ? g.d_v : g.d_qk,
                   [&](const std::array<int64_t, 4>& at) {
                     const ElementPlace place = InputPlace(a, g, tensor, at);
                     const auto& buffer = result.grads[static_cast<size_t>(place.buffer)];
                     answer.dqkv[static_cast<size_t>(tensor)].push_back(
                         LoadElement(c.dtype, buffer.data(), place.element));
                   });
  }
  answer.d_bias = Widen(c.dtype, result.d_bias);
  answer.d_sinks = Widen(DType::kFloat32, result.d_softmax_offset);
}

}  // namespace

Geometry GeometryOf(const std::vector<std::pair<int64_t, int64_t>>& lengths, const Heads& heads) {
  Geometry g{.batch = static_cast<int64_t>(lengths.size()),
             .h = heads.h,
             .g = heads.g,
             .d_qk = heads.d_qk,
             .d_v = heads.d_v,
             .s_q = 1,
             .s_kv = 1};
  g.q_row = g.kv_row = {0};
  for (const auto& [q, kv] : lengths) {
    g.q_len.push_back(q);
    g.kv_len.push_back(kv);
    g.q_row.push_back(g.q_row.back() + q);
    g.kv_row.push_back(g.kv_row.back() + kv);
    g.s_q = std::max(g.s_q, q);
    g.s_kv = std::max(g.s_kv, kv);
  }
  g.t_q = g.q_row.back();
  g.t_kv = g.kv_row.back();
  g.has_lengths = g.batch * g.s_q != g.t_q || g.batch * g.s_kv != g.t_kv;
  return g;
}

Geometry GeometryWithRows(const std::vector<std::pair<int64_t, int64_t>>& lengths,
                          const std::vector<int64_t>& rows, const Heads& heads) {
  Geometry g = GeometryOf(lengths, heads);
  g.q_row = g.kv_row = rows;
  g.t_q = g.t_kv = rows.back();
  g.has_gaps = true;
  return g;
}

LogicalCase::LogicalCase(const Geometry& g, DType dtype) {
  spec.dtype = dtype;
  spec.geometry = g;
  spec.has_gradients = true;
  const int64_t queries = Sum(g.q_len), keys = Sum(g.kv_len);
  qkv = {Random(queries * g.h * g.d_qk, 1), Random(keys * g.g * g.d_qk, 2),
         Random(keys * g.g * g.d_v, 3)};
  d_out = Random(queries * g.h * g.d_v, 4);
}

void LogicalCase::SetBias(BiasKind kind, const std::vector<int64_t>& shape) {
  spec.bias_kind = kind;
  spec.bias_shape = shape;
  bias = Random(*NumElements(shape), 5);
}

void LogicalCase::SetSinks(const std::vector<float>& values) {
  spec.softmax_kind = SoftmaxKind::kLearnable;
  sinks = values;
}

LogicalAnswer LogicalCase::Run(AttentionBackend& backend, const Arrangement& a) const {
  LogicalAnswer answer = RunForwardOnly(backend, a);
  Stored stored(*this);
  GoldenCase& c = stored.c;
  const PackedRequest request = MakeRequest(a, c);
  const auto problem = Resolve(request.spec, request.sequences, request.inputs);
  EXPECT_TRUE(problem.ok()) << problem.status();
  if (!problem.ok()) return answer;
  const auto plan = backend.BuildBackwardPlan(*problem);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return answer;
  c.out.assign(answer.out.begin(), answer.out.end());
  c.lse.assign(answer.lse.begin(), answer.lse.end());
  const auto result = RunBackward(OnGuardedMemory(), **plan, *problem,
                                  MakeBackwardRequest(a, c, *problem, request));
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return answer;
  TakeGradients(a, c, *result, answer);
  // Against itself: what is left to compare is what belongs to nobody.
  for (size_t k = 0; k < 3; ++k) c.dqkv[k].assign(answer.dqkv[k].begin(), answer.dqkv[k].end());
  c.d_bias.assign(answer.d_bias.begin(), answer.d_bias.end());
  c.d_softmax_offset.assign(answer.d_sinks.begin(), answer.d_sinks.end());
  c.amax.assign(2, 0);
  for (const float x : Widen(DType::kFloat32, result->amax)) c.amax.push_back(x);
  EXPECT_EQ(CompareGradients(a, c, *problem, *result), "");
  return answer;
}

LogicalAnswer LogicalCase::RunForwardOnly(AttentionBackend& backend, const Arrangement& a) const {
  LogicalAnswer answer;
  Stored stored(*this);
  GoldenCase& c = stored.c;
  const PackedRequest request = MakeRequest(a, c);
  const auto problem = Resolve(request.spec, request.sequences, request.inputs);
  EXPECT_TRUE(problem.ok()) << problem.status();
  if (!problem.ok()) return answer;
  const auto plan = backend.BuildPlan(*problem);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return answer;
  const auto result = RunForward(OnGuardedMemory(), **plan, *problem, request);
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return answer;
  TakeForward(a, c.geometry, *problem, *result, answer);
  c.out.assign(answer.out.begin(), answer.out.end());
  c.lse.assign(answer.lse.begin(), answer.lse.end());
  c.amax = Widen(DType::kFloat32, result->amax);
  EXPECT_EQ(Compare(a, c, *problem, *result), "");
  return answer;
}

absl::StatusOr<AttentionProblem> LogicalCase::ResolveIn(Layout layout) const {
  const Stored stored(*this);
  const PackedRequest request = MakeRequest(ArrangementOf(layout), stored.c);
  return Resolve(request.spec, request.sequences, request.inputs);
}

size_t LogicalCase::At(int tensor, int64_t i, int64_t j, int64_t n, int64_t c) const {
  const Geometry& g = spec.geometry;
  const std::vector<int64_t>& lens = tensor == 0 ? g.q_len : g.kv_len;
  const int64_t row = std::accumulate(lens.begin(), lens.begin() + i, j);
  const int64_t heads = tensor == 0 ? g.h : g.g, components = tensor == 2 ? g.d_v : g.d_qk;
  return static_cast<size_t>((row * heads + n) * components + c);
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double most = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    if (a[k] == b[k] || (std::isnan(a[k]) && std::isnan(b[k]))) continue;
    const double distance = std::abs(static_cast<double>(a[k]) - b[k]);
    most =
        std::isnan(distance) ? std::numeric_limits<double>::infinity() : std::max(most, distance);
  }
  return most;
}

double Distance(const LogicalAnswer& a, const LogicalAnswer& b) {
  double most = std::max(Distance(a.out, b.out), Distance(a.lse, b.lse));
  for (size_t k = 0; k < 3; ++k) most = std::max(most, Distance(a.dqkv[k], b.dqkv[k]));
  return std::max({most, Distance(a.d_bias, b.d_bias), Distance(a.d_sinks, b.d_sinks)});
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

bool AllFinite(const LogicalAnswer& a) {
  return AllFinite(a.out) && AllFinite(a.dqkv[0]) && AllFinite(a.dqkv[1]) && AllFinite(a.dqkv[2]) &&
         AllFinite(a.d_bias) && AllFinite(a.d_sinks);
}

}  // namespace attnd::testing
