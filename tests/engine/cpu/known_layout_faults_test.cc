// Sections A and B: packed buffers, strides, and ragged sequences.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/core/backward_checks.h"
#include "engine/core/layout.h"
#include "engine/core/status.h"
#include "tests/engine/cpu/known_faults.h"

namespace attnd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

using Lengths = std::vector<std::pair<int64_t, int64_t>>;

bool AllZero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return x == 0; });
}

// INVALID_ARGUMENT about `field`, from the one function that Plan, Forward and Backward ask.
void ExpectRefused(const absl::StatusOr<AttentionProblem>& problem, std::string_view field) {
  EXPECT_EQ(problem.status().code(), absl::StatusCode::kInvalidArgument) << problem.status();
  EXPECT_EQ(ErrorField(problem.status()), field);
}

InputDescs Buffers(std::vector<std::pair<Buffer, std::vector<int64_t>>> shapes,
                   DType dtype = DType::kFloat16) {
  InputDescs inputs;
  for (auto& [buffer, shape] : shapes) {
    inputs.buffers[static_cast<size_t>(buffer)] = TensorDesc{dtype, shape};
  }
  return inputs;
}

AttentionSpec Spec(Layout layout, DType dtype = DType::kFloat16) {
  AttentionSpec spec;
  spec.layout = layout;
  spec.dtype = dtype;
  return spec;
}

// Zeros that take no memory until they are written.
class LazyMemory {
 public:
  explicit LazyMemory(int64_t size)
      : size_(static_cast<size_t>(size)),
        data_(mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  LazyMemory(const LazyMemory&) = delete;
  ~LazyMemory() { munmap(data_, size_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  size_t size_;
  void* data_;
};

TEST(KnownLayoutFaults, A1_UnequalSizesOfAPackedBuffer) {
  const ResolveOptions plan = {.derive_missing_shapes = true};
  AttentionSpec spec = Spec(Layout::kBshdBs2hd);
  const InputDescs kv = Buffers({{Buffer::kQ, {1, 2, 1, 16}}, {Buffer::kKv, {1, 2, 2, 1, 16}}});
  const auto equal = Resolve(spec, {}, kv);
  ASSERT_TRUE(equal.ok());
  EXPECT_EQ(equal->v.byte_offset, 1 * 16 * 2);
  spec.head_dim_qk = 16;
  spec.head_dim_v = 8;
  ExpectRefused(Resolve(spec, {}, kv), "spec.head_dim_v");
  spec.batch = spec.num_heads = spec.num_kv_heads = 1;
  spec.max_seqlen_q = spec.max_seqlen_kv = 2;
  ExpectRefused(Resolve(spec, {}, {}, plan), "spec.head_dim_v");
  spec = Spec(Layout::kBs3hd);
  spec.max_seqlen_q = 2;
  spec.max_seqlen_kv = 3;
  ExpectRefused(Resolve(spec, {}, Buffers({{Buffer::kQkv, {1, 2, 3, 1, 8}}})),
                "spec.max_seqlen_kv");
  ExpectRefused(Resolve(spec, {}, {}, plan), "spec.max_seqlen_kv");
}

TEST(KnownLayoutFaults, A2_FusedBufferClaimedToBeSeparate) {
  const std::vector<int64_t> fused = {2, 1, 4, 8};  // [s, b, h + 2g, d] with h = 2, g = 1
  AttentionSpec spec = Spec(Layout::kSbhdSbhdSbhd);
  spec.num_heads = 2;
  spec.num_kv_heads = 1;
  ExpectRefused(
      Resolve(spec, {}, Buffers({{Buffer::kQ, fused}, {Buffer::kK, fused}, {Buffer::kV, fused}})),
      "inputs.q");
}

TEST_P(KnownFaults, A3_AxisOf3FoundByItsPosition) {
  LogicalCase c(GeometryOf({{3, 3}}, {.h = 3, .g = 3}));
  const LogicalAnswer separate = c.Run(backend(), Layout::kBshdBshdBshd);
  EXPECT_LT(Distance(c.Run(backend(), Layout::kBs3hd), separate), kClose);
  EXPECT_LT(Distance(c.Run(backend(), Layout::kBsh3d), separate), kClose);
  EXPECT_NE(c.ResolveIn(Layout::kBs3hd)->k, c.ResolveIn(Layout::kBsh3d)->k);
}

TEST_P(KnownFaults, A4_BatchStrideOfAFusedProjection) {
  const LogicalCase c(GeometryOf({{1, 1}, {1, 1}, {1, 1}}, {.h = 2}));
  for (const Arrangement& a : AllArrangements()) {
    if (a.layout != Layout::kStrided || a.IsPaged() || !CanHold(a, c.spec.geometry)) continue;
    EXPECT_LT(Distance(c.Run(backend(), a), c.Run(backend(), Layout::kBshdBshdBshd)), kClose)
        << a.name;
  }
}

TEST_P(KnownFaults, A5_SameShapesInAnotherLayoutAndDtype) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kFloat32}) {
    const LogicalCase c(GeometryOf({{4, 4}}, {.h = 2, .g = 2}), dtype);
    const LogicalAnswer first = c.Run(backend(), Layout::kBshdBshdBshd);
    EXPECT_EQ(c.Run(backend(), Layout::kBshdBs2hd), first);
    EXPECT_EQ(c.Run(backend(), Layout::kBshdBsh2d), first);
    EXPECT_EQ(c.Run(backend(), Layout::kBshdBshdBshd), first);
  }
}

TEST_P(KnownFaults, A7_GradientsOfSlicesOfOneProjection) {
  const LogicalCase c(GeometryOf({{4, 4}}, {.d_qk = 256, .d_v = 256}));
  const LogicalAnswer packed = c.Run(backend(), Layout::kBs3hd);
  EXPECT_TRUE(AllFinite(packed));
  EXPECT_LT(Distance(packed, c.Run(backend(), Layout::kBshdBshdBshd)), kClose);
}

TEST(KnownLayoutFaults, A8_OutGradientOfAnotherForm) {
  const auto p = Resolve(Spec(Layout::kBs3hd), {}, Buffers({{Buffer::kQkv, {2, 4, 3, 2, 8}}}));
  ASSERT_TRUE(p.ok());
  BackwardDescs descs{p->out_desc, p->lse_desc, p->out_desc};
  EXPECT_TRUE(CheckBackwardTensors(*p, descs).ok());
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{}, {1}, {1, 1, 1, 1}, {4, 2, 2, 8}}) {
    descs.d_out->shape = shape;
    const absl::Status status = CheckBackwardTensors(*p, descs);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorField(status), "d_out");
  }
}

TEST_P(KnownFaults, A11_GradientsOfSharedHeadsAreSummed) {
  const LogicalCase both(GeometryOf({{2, 2}}, {.h = 2}));
  const LogicalAnswer sum = both.Run(backend(), Layout::kBshdBs2hd);
  std::array<LogicalAnswer, 2> parts;
  for (int64_t n = 0; n < 2; ++n) {
    LogicalCase one(GeometryOf({{2, 2}}, {}));
    for (int64_t j = 0; j < 2; ++j) {
      for (int64_t d = 0; d < 8; ++d) {
        one.qkv[0][one.At(0, 0, j, 0, d)] = both.qkv[0][both.At(0, 0, j, n, d)];
        one.d_out[one.At(0, 0, j, 0, d)] = both.d_out[both.At(0, 0, j, n, d)];
      }
    }
    one.qkv[1] = both.qkv[1];
    one.qkv[2] = both.qkv[2];
    parts[static_cast<size_t>(n)] = one.Run(backend(), Layout::kBshdBs2hd);
  }
  for (const size_t tensor : {1, 2}) {
    for (size_t k = 0; k < 16; ++k) {
      EXPECT_NEAR(sum.dqkv[tensor][k], parts[0].dqkv[tensor][k] + parts[1].dqkv[tensor][k], kClose);
    }
  }
}

// Gaps, tails and sequences without rows, everywhere they can be. LogicalCase puts NaN in all rows
// of no sequence and checks that they come back as 0 (-inf in LSE).
struct RaggedFault {
  const char* name;
  Lengths lengths;
  std::vector<int64_t> rows;  // Empty: no gaps.
  int64_t d = 8;
  bool causal = false;
};

const RaggedFault kRaggedFaults[] = {
    {"B1_StartsAreNotSumsOfLengths", {{1, 1}, {1, 1}}, {0, 2, 4}},
    {"B2_PaddingAfterTheLastSequence", {{3, 3}}, {0, 4}, 8, true},
    {"B3_SequenceOfPaddingAlone", {{1, 1}, {0, 0}}, {0, 2, 4}},
    {"B9_NanBehindTheLastKey", {{2, 2}}, {0, 4}},
    {"B10_RowsPastTheLastSequence", {{4, 4}}, {0, 6}},
    {"B11_NoQueries", {{0, 2}, {2, 1}, {0, 1}}, {}, 256},
    {"B12_NoQueriesFirst", {{0, 2}, {3, 3}}, {}},
    {"B13_NoKeysAtAll", {{2, 0}, {1, 0}}, {}},
    {"B13_NoQueriesAtAll", {{0, 2}, {0, 1}}, {}},
    {"B13_NothingAtAll", {{0, 0}, {0, 0}}, {}},
    {"ZeroLengthsInEveryPlace", {{2, 0}, {0, 3}, {3, 3}, {0, 0}, {1, 2}, {4, 0}}, {}},
    {"GapsBetweenAll", {{2, 2}, {0, 0}, {3, 3}}, {0, 3, 4, 8}},
};

class KnownRaggedFaults : public ::testing::TestWithParam<std::tuple<RaggedFault, std::string>> {};

TEST_P(KnownRaggedFaults, EveryLayoutGivesTheSame) {
  const auto& [fault, name] = GetParam();
  const std::unique_ptr<AttentionBackend> backend = MakeBackend(name);
  const Heads heads{.h = 2, .g = 2, .d_qk = fault.d, .d_v = fault.d};
  const Geometry g = fault.rows.empty() ? GeometryOf(fault.lengths, heads)
                                        : GeometryWithRows(fault.lengths, fault.rows, heads);
  LogicalCase c(g);
  if (fault.causal) c.spec.causal = Causal::kTopLeft;
  ReferenceBackend reference;
  const LogicalAnswer thd = c.Run(*backend, Layout::kThdThdThd);
  EXPECT_TRUE(AllFinite(thd));
  EXPECT_LT(Distance(thd, c.Run(reference, Layout::kBshdBshdBshd)), kClose);
  for (const Layout layout : {Layout::kT3hd, Layout::kTh3d, Layout::kThdT2hd, Layout::kThdTh2d,
                              Layout::kThdBshdBshd, Layout::kBshdBshdBshd, Layout::kSbhdSbh2d}) {
    if (!CanHold(ArrangementOf(layout), g)) continue;
    EXPECT_LT(Distance(c.Run(*backend, layout), thd), kClose) << Name(layout);
  }
  EXPECT_EQ(c.Run(*backend, Layout::kThdThdThd), thd);  // Bit for bit.
}

INSTANTIATE_TEST_SUITE_P(Cpu, KnownRaggedFaults,
                         ::testing::Combine(::testing::ValuesIn(kRaggedFaults),
                                            ::testing::Values("cpu", "reference")),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_" +
                                  std::get<1>(param.param);
                         });

TEST_P(KnownFaults, B13_NoKeysGiveZeros) {
  const LogicalAnswer answer =
      LogicalCase(GeometryOf({{2, 0}, {1, 0}}, {})).Run(backend(), Layout::kThdThdThd);
  EXPECT_TRUE(AllZero(answer.out) && AllZero(answer.dqkv[0]));
  EXPECT_EQ(answer.lse, std::vector<float>(3, -kInf));
}

TEST_P(KnownFaults, B4_Fp8OverGaps) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    LogicalCase c(GeometryWithRows({{3, 3}}, {0, 16}, {.d_qk = 16, .d_v = 16}), dtype);
    const LogicalAnswer answer = c.Run(backend(), Layout::kThdThdThd);
    EXPECT_TRUE(AllFinite(answer));
    EXPECT_LT(Distance(answer, c.Run(backend(), Layout::kBshdBshdBshd)), kClose);
    ReferenceBackend reference;  // Another backend may round to the next number.
    EXPECT_LT(Distance(answer, c.Run(reference, Layout::kThdThdThd)), 0.6);
  }
}

TEST(KnownLayoutFaults, B5_MoreSequencesThanTheBatch) {
  const std::vector<int64_t> shape = {4, 1, 1, 8};
  Sequences sequences;
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = {0, 1, 3, 4};
  ExpectRefused(Resolve(Spec(Layout::kSbhdSbhdSbhd), sequences,
                        Buffers({{Buffer::kQ, shape}, {Buffer::kK, shape}, {Buffer::kV, shape}})),
                "sequences.cu_seqlens_q");
}

TEST_P(KnownFaults, B6_GradientOfOneSequenceByDirection) {
  LogicalCase c(GeometryOf({{4, 4}}, {.h = 2, .g = 2}));
  c.spec.causal = Causal::kTopLeft;
  const LogicalAnswer answer = c.Run(backend(), Layout::kThdThdThd);
  const auto loss = [&] {
    const LogicalAnswer a = c.RunForwardOnly(backend(), ArrangementOf(Layout::kThdThdThd));
    double sum = 0;
    for (size_t k = 0; k < a.out.size(); ++k) sum += static_cast<double>(a.out[k]) * c.d_out[k];
    return sum;
  };
  double product = 0, got = 0, want = 0;
  for (size_t k = 0; k < c.qkv[0].size(); ++k) {
    const float q = c.qkv[0][k];
    c.qkv[0][k] = q + 0.02f;
    double difference = loss();
    c.qkv[0][k] = q - 0.02f;
    difference = (difference - loss()) / 0.04;
    c.qkv[0][k] = q;
    product += difference * answer.dqkv[0][k];
    got += static_cast<double>(answer.dqkv[0][k]) * answer.dqkv[0][k];
    want += difference * difference;
  }
  EXPECT_GT(product / std::sqrt(got * want), 0.9999);
  EXPECT_NEAR(std::sqrt(got / want), 1, 1e-3);
}

TEST(KnownLayoutFaults, B7_LseWithHeadsFirst) {
  const auto p =
      LogicalCase(GeometryOf({{2, 2}, {2, 2}}, {.h = 2, .g = 2})).ResolveIn(Layout::kT3hd);
  ASSERT_TRUE(p.ok());
  const TensorDesc lse{DType::kFloat32, {2, 4}};  // [h, t]
  const absl::Status status = CheckBackwardTensors(*p, {p->out_desc, lse, p->out_desc});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorField(status), "lse");
}

TEST(KnownLayoutFaults, B13_ABatchOfNothingIsAnError) {
  Sequences sequences;
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = {0};
  EXPECT_EQ(Resolve(Spec(Layout::kT3hd), sequences, Buffers({{Buffer::kQkv, {0, 3, 1, 8}}}))
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(KnownLayoutFaults, B16_NegativeLength) {
  Sequences sequences;
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = {0, 2, 1};
  ExpectRefused(Resolve(Spec(Layout::kT3hd), sequences, Buffers({{Buffer::kQkv, {2, 3, 1, 8}}})),
                "sequences.cu_seqlens_q");
}

TEST_P(KnownFaults, B18_PositionsRestartWithEachSequence) {
  LogicalCase c(GeometryOf({{2, 2}, {2, 2}}, {}));
  c.spec.causal = Causal::kTopLeft;
  std::fill(c.qkv[0].begin(), c.qkv[0].end(), 0.0f);  // LSE = ln(number of visible keys).
  const LogicalAnswer answer = c.Run(backend(), Layout::kT3hd);
  for (const size_t row : {0, 1, 2, 3}) {
    EXPECT_NEAR(answer.lse[row], std::log(1 + static_cast<double>(row % 2)), 1e-6);
  }
}

TEST_P(KnownFaults, B19_NothingCrossesFromOneSequenceToTheNext) {
  LogicalCase c(GeometryOf({{2, 2}, {2, 2}}, {}));
  for (size_t k = 0; k < 32; ++k) c.qkv[2][k] = k < 16 ? 1 : 0;
  const LogicalAnswer answer = c.Run(backend(), Layout::kT3hd);
  for (size_t k = 0; k < 32; ++k) EXPECT_NEAR(answer.out[k], k < 16 ? 1 : 0, 1e-6);
}

TEST(KnownLayoutFaults, B20_StartsPast2To31) {
  Sequences sequences;
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = {0, 43'691, 43'692};
  const auto p =
      Resolve(Spec(Layout::kT3hd), sequences, Buffers({{Buffer::kQkv, {43'692, 3, 128, 128}}}));
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p->sequences[1].q_row * p->q.start_multiplier, int64_t{2'147'500'032});
}

// K and V of 6.5 GB each, of which the one sequence has the last row; the others take no memory.
TEST_P(KnownFaults, B20_RowsPast2To31AreRead) {
  constexpr int64_t kRows = 200'001, kHeads = 128, kDim = 128, kRow = kHeads * kDim;
  const std::vector<int64_t> kv_shape = {kRows, kHeads, kDim};
  Sequences sequences;
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = {0, 1};
  sequences.cu_seqlens_kv_padded = {kRows - 1, kRows};
  const auto p = Resolve(
      Spec(Layout::kThdThdThd), sequences,
      Buffers({{Buffer::kQ, {1, kHeads, kDim}}, {Buffer::kK, kv_shape}, {Buffer::kV, kv_shape}}));
  ASSERT_TRUE(p.ok()) << p.status();
  const LazyMemory k(kRows * kRow * 2), v(kRows * kRow * 2);
  for (int64_t c = 0; c < kRow; ++c) {
    const auto value = static_cast<float>(c % 50);
    StoreElement(DType::kFloat16, k.data(), (kRows - 1) * kRow + c, 1);
    StoreElement(DType::kFloat16, v.data(), (kRows - 1) * kRow + c, value);
  }
  const auto plan = backend().BuildPlan(*p);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<std::byte> q(kRow * 2), out(kRow * 2);
  for (int64_t c = 0; c < kRow; ++c) StoreElement(DType::kFloat16, q.data(), c, 1);
  std::vector<float> lse(kHeads);
  const LazyMemory workspace((*plan)->workspace_bytes() + 1);
  ForwardBuffers buffers{.out = out.data(), .lse = lse.data()};
  buffers.inputs[static_cast<size_t>(Buffer::kQ)] = q.data();
  buffers.inputs[static_cast<size_t>(Buffer::kK)] = k.data();
  buffers.inputs[static_cast<size_t>(Buffer::kV)] = v.data();
  buffers.workspace = {workspace.data(), static_cast<size_t>((*plan)->workspace_bytes())};
  ASSERT_TRUE((*plan)->Forward(*p, buffers).ok());
  for (int64_t c = 0; c < kRow; ++c) {
    ASSERT_EQ(LoadElement(DType::kFloat16, out.data(), c), static_cast<float>(c % 50)) << c;
  }
  for (const float x : lse) EXPECT_NEAR(x, std::sqrt(static_cast<double>(kDim)), 1e-4);
}

TEST_P(KnownFaults, B20_MoreTokensThanBefore) {
  for (const int64_t tokens : {128, 1000, 128}) {
    const LogicalCase c(GeometryOf({{tokens / 2, tokens / 2}, {tokens / 2, tokens / 2}}, {}));
    ReferenceBackend fresh;
    EXPECT_LT(Distance(c.Run(backend(), Layout::kT3hd), c.Run(fresh, Layout::kT3hd)), kClose);
  }
}

TEST(KnownLayoutFaults, B21_ArraysOfExactlyTheBatchAndOne) {
  const InputDescs inputs = Buffers({{Buffer::kQkv, {2, 3, 1, 8}}});
  Sequences sequences;
  sequences.cu_seqlens_q = sequences.cu_seqlens_kv = {0, 2, -1};
  sequences.cu_seqlens_q.pop_back();  // What lies behind the end would be an error.
  sequences.cu_seqlens_kv.pop_back();
  const auto p = Resolve(Spec(Layout::kT3hd), sequences, inputs);
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->sequences, std::vector<SequenceExtent>({{2, 2, 0, 0}}));
  sequences.cu_seqlens_q_padded = sequences.cu_seqlens_kv_padded = {0};  // One too few.
  ExpectRefused(Resolve(Spec(Layout::kT3hd), sequences, inputs), "sequences.cu_seqlens_q_padded");
}

INSTANTIATE_TEST_SUITE_P(Cpu, KnownFaults, ::testing::Values("cpu", "reference"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace attnd::testing
