// Sections C, D and E: masks, gradients and numbers, sinks, statistics and plans.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "engine/core/layout.h"
#include "engine/core/status.h"
#include "tests/engine/cpu/known_faults.h"

namespace attnd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// How many keys each row sees: with Q = 0 all weigh the same.
std::vector<int> VisibleCounts(AttentionBackend& backend, LogicalCase c) {
  std::fill(c.qkv[0].begin(), c.qkv[0].end(), 0.0f);
  std::vector<int> counts;
  for (const float lse : c.Run(backend, Layout::kBshdBshdBshd).lse) {
    counts.push_back(static_cast<int>(std::lround(std::exp(lse))));
  }
  return counts;
}

// Q = +1 and K = -1 in the first component, such that every logit is about `logit`.
void SetLogits(double logit, LogicalCase& c) {
  const auto d = static_cast<size_t>(c.spec.geometry.d_qk);
  for (size_t k = 0; k < c.qkv[0].size(); k += d) c.qkv[0][k] = 1;
  for (size_t k = 0; k < c.qkv[1].size(); k += d) {
    c.qkv[1][k] = static_cast<float>(logit * std::sqrt(static_cast<double>(d)));
  }
}

double Dot(const std::vector<float>& a, const std::vector<float>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

double Loss(AttentionBackend& backend, const LogicalCase& c) {
  return Dot(c.RunForwardOnly(backend, ArrangementOf(Layout::kBshdBshdBshd)).out, c.d_out);
}

TEST_P(KnownFaults, C1_CausalAlignmentOfUnequalLengths) {
  LogicalCase wide(GeometryOf({{2, 5}}, {})), tall(GeometryOf({{5, 2}}, {}));
  wide.spec.causal = Causal::kTopLeft;
  EXPECT_EQ(VisibleCounts(backend(), wide), std::vector<int>({1, 2}));
  wide.spec.causal = tall.spec.causal = Causal::kBottomRight;
  EXPECT_EQ(VisibleCounts(backend(), wide), std::vector<int>({4, 5}));
  EXPECT_EQ(VisibleCounts(backend(), tall), std::vector<int>({0, 0, 0, 1, 2}));
  const LogicalAnswer answer = tall.Run(backend(), Layout::kBshdBshdBshd);
  for (size_t k = 0; k < 24; ++k) EXPECT_EQ(answer.out[k], 0);
  for (size_t k = 0; k < 24; ++k) EXPECT_EQ(answer.dqkv[0][k], 0);
  EXPECT_EQ(answer.lse[2], -kInf);
}

TEST_P(KnownFaults, C3_WindowsCountTheirEnds) {
  LogicalCase c(GeometryOf({{4, 4}}, {}));
  c.spec.causal = Causal::kTopLeft;
  c.spec.window_left = 1;
  c.spec.window_right = 0;
  EXPECT_EQ(VisibleCounts(backend(), c), std::vector<int>({1, 2, 2, 2}));
}

TEST_P(KnownFaults, C5_FullyMaskedRows) {
  LogicalCase padded(GeometryOf({{2, 3}, {2, 0}}, {}));
  padded.spec.causal = Causal::kTopLeft;
  EXPECT_TRUE(AllFinite(padded.Run(backend(), Layout::kBshdBshdBshd)));
  for (const BiasKind kind : {BiasKind::kPreScale, BiasKind::kPostScale}) {
    LogicalCase c(GeometryOf({{3, 4}}, {.h = 2}));
    c.SetBias(kind, {1, 1, 3, 4});
    std::fill(c.bias.begin() + 4, c.bias.begin() + 8, -kInf);
    const LogicalAnswer answer = c.Run(backend(), Layout::kBshdBs2hd);
    EXPECT_TRUE(AllFinite(answer));
    for (size_t k = 16; k < 32; ++k) EXPECT_EQ(answer.out[k], 0);
    for (size_t k = 16; k < 32; ++k) EXPECT_EQ(answer.dqkv[0][k], 0);
    for (size_t k = 4; k < 8; ++k) EXPECT_EQ(answer.d_bias[k], 0);
    EXPECT_EQ(answer.lse[2], -kInf);
  }
}

TEST_P(KnownFaults, C6_NegativeScoresAndAnEmptySequence) {
  LogicalCase c(GeometryOf({{3, 4}, {2, 0}}, {.d_qk = 64, .d_v = 64}));
  std::fill(c.qkv[0].begin(), c.qkv[0].end(), 1.0f);
  std::fill(c.qkv[1].begin(), c.qkv[1].end(), -1.0f);
  const LogicalAnswer answer = c.Run(backend(), Layout::kThdThdThd);
  EXPECT_TRUE(AllFinite(answer));
  EXPECT_NEAR(answer.lse[0], -8 + std::log(4), 1e-5);
}

TEST_P(KnownFaults, C7_BiasOfOneRow) {
  LogicalCase c(GeometryOf({{32, 32}, {32, 32}}, {.h = 2, .g = 2}));
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, 1, 1, 32}, {2, 1, 1, 32}}) {
    c.SetBias(BiasKind::kPostScale, shape);
    ReferenceBackend reference;
    const LogicalAnswer answer = c.Run(backend(), Layout::kBs3hd);
    EXPECT_LT(Distance(answer, c.Run(reference, Layout::kBshdBshdBshd)), kClose);
    EXPECT_GT(Dot(answer.d_bias, answer.d_bias), 0.01);
  }
  c.SetBias(BiasKind::kPostScale, {1, 1, 32, 1});
  EXPECT_EQ(ErrorField(c.ResolveIn(Layout::kBs3hd).status()), "bias");
}

TEST_P(KnownFaults, C8_TwoSidedWindowWithoutCausalMask) {
  LogicalCase c(GeometryOf({{3, 6}}, {}));
  c.spec.window_left = 2;
  c.spec.window_right = 1;
  EXPECT_EQ(ErrorField(c.ResolveIn(Layout::kBshdBshdBshd).status()), "spec.window_alignment");
  c.spec.alignment = Alignment::kTopLeft;
  EXPECT_EQ(VisibleCounts(backend(), c), std::vector<int>({2, 3, 4}));
  c.spec.alignment = Alignment::kBottomRight;
  EXPECT_EQ(VisibleCounts(backend(), c), std::vector<int>({4, 4, 3}));
}

TEST_P(KnownFaults, D2_StronglyNegativeLseWithABiasOfZero) {
  for (const int64_t s : {1, 64, 65, 128, 192}) {
    for (const bool has_bias : {false, true}) {
      LogicalCase c(GeometryOf({{s, s}}, {.d_qk = 64, .d_v = 64}));
      SetLogits(-120, c);
      if (has_bias) {
        c.SetBias(BiasKind::kPostScale, {1, 1, s, s});
        std::fill(c.bias.begin(), c.bias.end(), 0.0f);
      }
      ReferenceBackend reference;
      const LogicalAnswer answer = c.Run(backend(), Layout::kBshdBshdBshd);
      EXPECT_LT(answer.lse[0], -88.7);
      EXPECT_LT(Distance(answer, c.Run(reference, Layout::kBshdBshdBshd)), 1e-3) << s;
    }
  }
}

TEST_P(KnownFaults, D3_StronglyNegativeLse) {
  LogicalCase c(GeometryOf({{1, 128}}, {.h = 2, .g = 2, .d_qk = 64, .d_v = 64}));
  SetLogits(-120, c);
  const LogicalAnswer answer = c.Run(backend(), Layout::kBshdBshdBshd);
  EXPECT_TRUE(AllFinite(answer));
  EXPECT_GT(Dot(answer.dqkv[1], answer.dqkv[1]), 1e-4);
}

TEST(KnownNumberFaults, D4_BiasOfAnotherDtype) {
  AttentionSpec spec;
  spec.layout = Layout::kBs3hd;
  spec.dtype = DType::kBFloat16;
  spec.bias_kind = BiasKind::kPostScale;
  InputDescs inputs;
  inputs.buffers[0] = TensorDesc{DType::kBFloat16, {1, 128, 3, 4, 32}};
  inputs.bias = TensorDesc{DType::kFloat32, {1, 4, 128, 128}};
  const absl::Status status = Resolve(spec, {}, inputs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorField(status), "bias.dtype");
}

TEST_P(KnownFaults, D6_BiasGradientOfAllSequences) {
  LogicalCase whole(GeometryOf({{4, 4}, {4, 4}}, {.h = 2, .g = 2}));
  whole.SetBias(BiasKind::kPostScale, {1, 1, 4, 4});
  const LogicalAnswer sum = whole.Run(backend(), Layout::kBs3hd);
  std::vector<double> parts(16);
  for (size_t i = 0; i < 2; ++i) {
    LogicalCase part(GeometryOf({{4, 4}}, {.h = 2, .g = 2}));
    part.SetBias(BiasKind::kPostScale, {1, 1, 4, 4});
    const auto half = [i](const std::vector<float>& x) {
      const auto middle = static_cast<std::ptrdiff_t>(x.size() / 2);
      return i == 0 ? std::vector<float>(x.begin(), x.begin() + middle)
                    : std::vector<float>(x.begin() + middle, x.end());
    };
    for (size_t t = 0; t < 3; ++t) part.qkv[t] = half(whole.qkv[t]);
    part.d_out = half(whole.d_out);
    const LogicalAnswer answer = part.Run(backend(), Layout::kBs3hd);
    for (size_t k = 0; k < 16; ++k) parts[k] += answer.d_bias[k];
  }
  for (size_t k = 0; k < 16; ++k) EXPECT_NEAR(sum.d_bias[k], parts[k], kClose);
}

// LogicalCase's buffers end at pages that must not be touched.
TEST_P(KnownFaults, D7_BiasOfOneRowIsNotReadPastItsEnd) {
  LogicalCase c(GeometryOf({{4, 4}}, {}));
  for (const BiasKind kind : {BiasKind::kPreScale, BiasKind::kPostScale}) {
    c.SetBias(kind, {1, 1, 1, 4});
    EXPECT_TRUE(AllFinite(c.Run(backend(), Layout::kBs3hd)));
  }
}

TEST_P(KnownFaults, D8_BroadcastBiasGradientIsDeterministic) {
  LogicalCase c(
      GeometryOf(std::vector<std::pair<int64_t, int64_t>>(8, {20, 20}), {.h = 2, .g = 2}));
  c.SetBias(BiasKind::kPostScale, {1, 2, 20, 20});
  EXPECT_EQ(c.Run(backend(), Layout::kBs3hd), c.Run(backend(), Layout::kBs3hd));
}

TEST_P(KnownFaults, D9_BackwardGivesTheSameBitsAgain) {
  const LogicalCase c(
      GeometryOf(std::vector<std::pair<int64_t, int64_t>>(8, {48, 48}), {.h = 4, .g = 4}));
  const LogicalAnswer first = c.Run(backend(), Layout::kBs3hd);
  for (int run = 0; run < 4; ++run) EXPECT_EQ(c.Run(backend(), Layout::kBs3hd), first);
}

TEST(KnownNumberFaults, D10_BytesOfAHugeBias) {
  AttentionSpec spec;
  spec.layout = Layout::kBs3hd;
  spec.dtype = DType::kBFloat16;
  spec.bias_kind = BiasKind::kPostScale;
  InputDescs inputs;
  inputs.buffers[0] = TensorDesc{DType::kBFloat16, {2, 33'280, 3, 1, 8}};
  inputs.bias = TensorDesc{DType::kBFloat16, {2, 1, 33'280, 33'280}};
  const auto p = Resolve(spec, {}, inputs);
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->bias_strides.batch, int64_t{33'280} * 33'280);
  EXPECT_EQ(*NumBytes(*p->bias), int64_t{2} * 33'280 * 33'280 * 2);
}

TEST(KnownNumberFaults, D12_D13_OffsetsPast2To31) {
  AttentionSpec spec;
  spec.layout = Layout::kBshdBshdBshd;
  spec.dtype = DType::kBFloat16;
  InputDescs inputs;
  for (const Buffer buffer : {Buffer::kQ, Buffer::kK, Buffer::kV}) {
    inputs.buffers[static_cast<size_t>(buffer)] = TensorDesc{DType::kBFloat16, {3000, 16, 729, 72}};
  }
  const auto dense = Resolve(spec, {}, inputs);
  ASSERT_TRUE(dense.ok());
  EXPECT_EQ(2999 * dense->k.strides.batch, int64_t{2999} * 16 * 729 * 72);
  spec.layout = Layout::kThdThdThd;
  Sequences sequences;
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = {0, 200'000, 200'001};
  for (auto& desc : inputs.buffers) {
    if (desc) desc->shape = {200'001, 128, 128};
  }
  const auto thd = Resolve(spec, sequences, inputs);
  ASSERT_TRUE(thd.ok());
  EXPECT_EQ(thd->sequences[1].q_row * thd->out.start_multiplier, int64_t{200'000} * 128 * 128);
}

TEST_P(KnownFaults, D12_ManySequences) {
  const LogicalCase c(
      GeometryOf(std::vector<std::pair<int64_t, int64_t>>(8300, {1, 1}), {.h = 4, .g = 4}));
  const LogicalAnswer answer = c.Run(backend(), Layout::kBs3hd);
  EXPECT_LT(Distance(answer.out, c.qkv[2]), 1e-6);  // One key has all the weight.
  EXPECT_LT(Distance(answer.dqkv[2], c.d_out), kClose);
  EXPECT_LT(Distance(answer.dqkv[0], std::vector<float>(c.qkv[0].size())), kClose);
}

// By what the sink takes from the keys, worked out from the answer without a sink.
TEST_P(KnownFaults, E1_SinkReachesTheResultAndHasAGradient) {
  LogicalCase c(GeometryOf({{4, 4}, {2, 0}}, {}));
  const LogicalAnswer vanilla = c.Run(backend(), Layout::kThdThdThd);
  for (const float alpha : {0.0f, 5.0f, 20.0f, 100.0f}) {
    c.SetSinks({alpha});
    const LogicalAnswer answer = c.Run(backend(), Layout::kThdThdThd);
    EXPECT_TRUE(AllFinite(answer));
    double want = 0;
    for (size_t row = 0; row < 4; ++row) {
      // Of the denominator exp(alpha) + exp(lse) the keys have the second part.
      const double keys = 1 / (1 + std::exp(static_cast<double>(alpha) - vanilla.lse[row]));
      double d = 0;
      for (size_t k = row * 8; k < row * 8 + 8; ++k) {
        EXPECT_NEAR(answer.out[k], vanilla.out[k] * keys, 1e-5 * keys + 1e-30);
        d += static_cast<double>(vanilla.out[k]) * keys * c.d_out[k];
      }
      EXPECT_NEAR(answer.lse[row], alpha - std::log(1 - keys), 1e-4);
      want -= (1 - keys) * d;
    }
    if (alpha < 50) {
      EXPECT_NE(answer.d_sinks[0], 0);
    }
    EXPECT_NEAR(answer.d_sinks[0], want, 1e-4 * std::abs(want) + 1e-40);
    EXPECT_EQ(answer.lse[4], alpha);
  }
}

TEST_P(KnownFaults, E2_PaddedRowsStayOutOfTheSinksGradient) {
  LogicalCase padded(GeometryOf({{1, 3}, {4, 4}}, {})), alone(GeometryOf({{1, 3}}, {}));
  padded.SetSinks({2});
  alone.SetSinks({2});
  for (size_t t = 0; t < 3; ++t) {
    std::copy(alone.qkv[t].begin(), alone.qkv[t].end(), padded.qkv[t].begin());
  }
  std::fill(padded.d_out.begin(), padded.d_out.end(), 0.0f);  // Of the second sequence.
  std::copy(alone.d_out.begin(), alone.d_out.end(), padded.d_out.begin());
  const float want = alone.Run(backend(), Layout::kBshdBshdBshd).d_sinks[0];
  EXPECT_NEAR(padded.Run(backend(), Layout::kBshdBshdBshd).d_sinks[0], want, 1e-6);
}

TEST_P(KnownFaults, E5_PartsMergeByNaturalLogarithms) {
  LogicalCase whole(GeometryOf({{1, 8}}, {})), first(GeometryOf({{1, 6}}, {})),
      second(GeometryOf({{1, 2}}, {}));
  first.qkv[0] = second.qkv[0] = whole.qkv[0];
  for (const size_t t : {1, 2}) {
    first.qkv[t].assign(whole.qkv[t].begin(), whole.qkv[t].begin() + 48);
    second.qkv[t].assign(whole.qkv[t].begin() + 48, whole.qkv[t].end());
  }
  const Layout layout = Layout::kBshdBshdBshd;
  const LogicalAnswer a = first.Run(backend(), layout), b = second.Run(backend(), layout);
  const LogicalAnswer want = whole.Run(backend(), layout);
  const double lse = std::log(std::exp(a.lse[0]) + std::exp(b.lse[0]));
  EXPECT_NEAR(want.lse[0], lse, 1e-5);
  for (size_t k = 0; k < 8; ++k) {
    EXPECT_NEAR(want.out[k],
                a.out[k] * std::exp(a.lse[0] - lse) + b.out[k] * std::exp(b.lse[0] - lse), 1e-5);
  }
}

TEST_P(KnownFaults, E6_AlibiOfAShardOfHeads) {
  LogicalCase all(GeometryOf({{5, 5}}, {.h = 8, .g = 8})),
      shard(GeometryOf({{5, 5}}, {.h = 4, .g = 4}));
  all.spec.bias_kind = shard.spec.bias_kind = BiasKind::kAlibi;
  shard.spec.alibi = AlibiShard{4, 8};
  for (int t = 0; t < 3; ++t) {
    const auto tensor = static_cast<size_t>(t);
    for (int64_t j = 0; j < 5; ++j) {
      for (int64_t n = 0; n < 4; ++n) {
        for (int64_t d = 0; d < 8; ++d) {
          shard.qkv[tensor][shard.At(t, 0, j, n, d)] = all.qkv[tensor][all.At(t, 0, j, n + 4, d)];
        }
      }
    }
  }
  const LogicalAnswer whole = all.Run(backend(), Layout::kBs3hd);
  const LogicalAnswer part = shard.Run(backend(), Layout::kBs3hd);
  for (size_t row = 0; row < 5; ++row) {
    for (size_t n = 0; n < 4; ++n)
      EXPECT_NEAR(part.lse[row * 4 + n], whole.lse[row * 8 + n + 4], 1e-5);
  }
}

TEST_P(KnownFaults, E10_EveryBackendMeansTheSameLse) {
  for (const SoftmaxKind kind : {SoftmaxKind::kVanilla, SoftmaxKind::kOffByOne}) {
    LogicalCase c(GeometryOf({{7, 9}, {3, 0}}, {.h = 2}));
    c.spec.softmax_kind = kind;
    ReferenceBackend reference;
    EXPECT_LT(Distance(c.Run(backend(), Layout::kThdThdThd).lse,
                       c.Run(reference, Layout::kBshdBshdBshd).lse),
              1e-5);
  }
}

TEST_P(KnownFaults, E11_DropoutByTheValueOfItsSeed) {
  LogicalCase c(GeometryOf({{9, 13}, {5, 6}}, {.h = 2}));
  c.spec.dropout = Dropout{0.4, 17, 3};
  const LogicalAnswer answer = c.Run(backend(), Layout::kBshdBshdBshd);
  EXPECT_EQ(LogicalCase(c).Run(backend(), Layout::kBshdBshdBshd), answer);
  EXPECT_LT(Distance(c.Run(backend(), Layout::kThdTh2d), answer), kClose);
  // O is linear in V, so that dV . V = dO . O where backward drops what forward dropped.
  EXPECT_NEAR(Dot(answer.dqkv[2], c.qkv[2]), Dot(answer.out, c.d_out), 1e-3);
  for (const Dropout& other : {Dropout{0.4, 18, 3}, Dropout{0.4, 17, 4}}) {
    c.spec.dropout = other;
    EXPECT_GT(Distance(c.Run(backend(), Layout::kBshdBshdBshd), answer), 0.1);
  }
}

TEST_P(KnownFaults, E12_PagesOfAnySize) {
  const LogicalCase c(GeometryOf({{3, 100}, {1, 7}}, {.h = 2}));
  const LogicalAnswer want = c.Run(backend(), Layout::kBshdBshdBshd);
  for (const int64_t size : {1, 3, 48, 64}) {
    Arrangement pages = ArrangementOf(Layout::kPagedKvBshdBshdBshd);
    pages.page_size = size;
    const LogicalAnswer answer = c.RunForwardOnly(backend(), pages);
    EXPECT_LT(Distance(answer.out, want.out), kClose) << size;
    EXPECT_LT(Distance(answer.lse, want.lse), kClose) << size;
  }
}

// Each gradient against the change of the loss along it.
TEST_P(KnownFaults, D_GradientsByDirectionWithEverything) {
  LogicalCase c(GeometryOf({{5, 7}, {3, 3}}, {.h = 4, .g = 2}));
  c.spec.causal = Causal::kBottomRight;
  c.spec.softcap = 3;
  c.spec.scale = -0.6;
  c.spec.dropout = Dropout{0.2, 1, 1};
  c.SetBias(BiasKind::kPreScale, {1, 4, 5, 7});
  c.SetSinks({-1, 0, 1, 2});
  const LogicalAnswer answer = c.Run(backend(), Layout::kBshdBshdBshd);
  const auto along = [&](std::vector<float>& values, const std::vector<float>& gradient) {
    const std::vector<float> start = values;
    const double length = std::sqrt(Dot(gradient, gradient));
    double change = 0;
    for (const double sign : {1.0, -1.0}) {
      for (size_t k = 0; k < values.size(); ++k) {
        values[k] = start[k] + static_cast<float>(sign * 0.02 * gradient[k] / length);
      }
      change += sign * Loss(backend(), c);
    }
    values = start;
    EXPECT_NEAR(change / 0.04, length, 2e-3 * length);
  };
  for (size_t t = 0; t < 3; ++t) along(c.qkv[t], answer.dqkv[t]);
  along(c.bias, answer.d_bias);
  along(c.sinks, answer.d_sinks);
}

}  // namespace
}  // namespace attnd::testing
