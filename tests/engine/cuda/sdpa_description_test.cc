#include "engine/cuda/sdpa_description.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/core/status.h"
#include "tests/engine/cuda/problems.h"

namespace attnd::testing {
namespace {

using ::testing::HasSubstr;

Geometry Full(int64_t batch, int64_t s_q, int64_t s_kv) {
  return LengthsOf(std::vector<int64_t>(batch, s_q), std::vector<int64_t>(batch, s_kv), s_q, s_kv);
}

SdpaDescription Describe(const AttentionProblem& problem) {
  const auto description = DescribeSdpa(problem);
  EXPECT_TRUE(description.ok()) << description.status();
  return *description;
}

TEST(SdpaDescription, HashesEveryByte) {
  const SdpaDescription base;
  const size_t hash = SdpaDescriptionHash()(base);
  for (size_t at = 0; at < sizeof(base); ++at) {
    SdpaDescription other = base;
    auto* bytes = reinterpret_cast<unsigned char*>(&other);
    bytes[at] ^= 1;
    EXPECT_NE(SdpaDescriptionHash()(other), hash) << at;
    EXPECT_FALSE(other == base) << at;
  }
}

TEST(SdpaDescription, BucketsArePowersOfTwoAndOne) {
  EXPECT_EQ(BucketLength(0), 1);
  EXPECT_EQ(BucketLength(1), 1);
  EXPECT_EQ(BucketLength(2), 64);
  EXPECT_EQ(BucketLength(64), 64);
  EXPECT_EQ(BucketLength(65), 128);
  EXPECT_EQ(BucketLength(100'000), 131'072);
  EXPECT_EQ(BucketCount(0), 1);
  EXPECT_EQ(BucketCount(3), 4);
  EXPECT_EQ(BucketCount(4), 4);
}

TEST(SdpaDescription, GrowingLengthsMakeFewPlans) {
  for (Layout layout : {Layout::kBshdBshdBshd, Layout::kBhsdBhsdBhsd, Layout::kThdThdThd,
                        Layout::kPagedKvBshdBshdBshd}) {
    for (bool decode : {true, false}) {
      std::unordered_set<SdpaDescription, SdpaDescriptionHash> plans;
      for (int64_t n = 1; n <= 300; ++n) {
        plans.insert(Describe(ProblemOf(layout, Full(1, decode ? 1 : n, n))));
      }
      EXPECT_LE(plans.size(), 12u) << Name(layout) << decode;
    }
  }
}

TEST(SdpaDescription, FullRoundBatchesRunDenseAndTheRestRagged) {
  const auto engine = [](Layout layout, const Geometry& g) {
    return EngineName(Describe(ProblemOf(layout, g)));
  };
  EXPECT_EQ(engine(Layout::kBshdBs2hd, Full(2, 128, 256)), "cudnn_dense");
  EXPECT_EQ(engine(Layout::kBshdBs2hd, Full(2, 1, 256)), "cudnn_dense");
  EXPECT_EQ(engine(Layout::kBshdBs2hd, Full(2, 128, 200)), "cudnn_ragged");
  EXPECT_EQ(engine(Layout::kBshdBs2hd, LengthsOf({128, 5}, {256, 256}, 128, 256)), "cudnn_ragged");
  EXPECT_EQ(engine(Layout::kThdT2hd, Full(2, 128, 256)), "cudnn_ragged");
  EXPECT_EQ(engine(Layout::kPagedKvBshdBshdBshd, Full(2, 1, 256)), "cudnn_paged");
}

TEST(SdpaDescription, KeepsTheTrueBatchInTheStridesOfSbhd) {
  const Geometry g = LengthsOf({5, 9, 3}, {5, 9, 3}, 9, 9);
  const SdpaDescription d = Describe(ProblemOf(Layout::kSbhdSbhdSbhd, g));
  EXPECT_EQ(d.batch, 4);
  EXPECT_EQ(d.q.seq, 3 * 4 * 16);
  EXPECT_EQ(d.k.seq, 3 * 2 * 16);
}

TEST(SdpaDescription, RefusesWhatCudnnCannotRunAndNamesTheField) {
  const Geometry g = Full(2, 8, 8);
  const auto field = [](const AttentionProblem& p) { return ErrorField(DescribeSdpa(p).status()); };
  const AttentionProblem good = ProblemOf(Layout::kBshdBshdBshd, g);
  EXPECT_EQ(field(good), "");

  AttentionProblem p = good;
  p.dtype = DType::kFloat32;
  EXPECT_EQ(field(p), "spec.dtype");
  p = good;
  p.logit_softcap = 10.0;
  EXPECT_EQ(field(p), "spec.logit_softcap");
  p = good;
  p.bias_kind = BiasKind::kPreScale;
  EXPECT_EQ(field(p), "spec.bias_kind");
  p = good;
  p.dropout.probability = 0.5;
  EXPECT_EQ(field(p), "spec.dropout");
  p = good;
  p.batch_invariant = true;
  EXPECT_EQ(field(p), "spec.batch_invariant");
  p = good;
  p.head_dim_v = 12;
  EXPECT_EQ(field(p), "spec.head_dim_v");
  p = good;
  p.head_dim_qk = 264;
  EXPECT_EQ(field(p), "spec.head_dim_qk");
  p = good;
  p.k.strides.dim = 2;
  EXPECT_EQ(field(p), "spec.views");
  p = good;
  p.v.byte_offset = 8;
  EXPECT_EQ(field(p), "spec.views");
  p = good;
  p.max_seqlen_kv = int64_t{1} << 40;
  EXPECT_EQ(field(p), "spec.max_seqlen_kv");
  p = ProblemOf(Layout::kPagedKvBshdBshdBshd, g);
  p.page_size = 48;
  EXPECT_EQ(field(p), "spec.page_size");
  EXPECT_THAT(std::string(DescribeSdpa(p).status().message()), HasSubstr("64"));
}

TEST(SdpaDescription, LeavesOutBoundsThatMaskNothing) {
  const auto describe = [](const Geometry& g, Causal causal) {
    return Describe(
        ProblemOf(Layout::kBshdBshdBshd, g, [&](AttentionSpec& spec) { spec.causal = causal; }));
  };
  EXPECT_EQ(describe(Full(1, 1, 300), Causal::kBottomRight).right, kUnbounded);
  EXPECT_EQ(describe(Full(1, 1, 300), Causal::kTopLeft).right, 0);
  EXPECT_EQ(describe(Full(1, 128, 128), Causal::kBottomRight).right, 0);
  EXPECT_FALSE(describe(Full(1, 128, 128), Causal::kBottomRight).bottom_right);
  EXPECT_TRUE(describe(Full(1, 128, 256), Causal::kBottomRight).bottom_right);
}

AttentionProblem WithBias(AttentionProblem p, std::vector<int64_t> shape) {
  p.bias_kind = BiasKind::kPostScale;
  p.bias_strides.batch = shape[0] == 1 ? 0 : shape[1] * shape[2] * shape[3];
  p.bias_strides.head = shape[1] == 1 ? 0 : shape[2] * shape[3];
  p.bias_strides.seq = shape[2] == 1 ? 0 : shape[3];
  p.bias_strides.dim = 1;
  p.bias = TensorDesc{p.dtype, std::move(shape)};
  return p;
}

TEST(SdpaDescription, BiasesAreOfDenseBatchesOnly) {
  const AttentionProblem dense = ProblemOf(Layout::kBshdBshdBshd, Full(2, 128, 256));
  const AttentionProblem p = WithBias(dense, {1, 4, 128, 256});
  const SdpaDescription d = Describe(p);
  EXPECT_FALSE(d.bias_per_sequence);
  EXPECT_TRUE(d.bias_per_head);
  EXPECT_TRUE(d.bias_per_row);
  EXPECT_EQ(ErrorField(DescribeSdpaBackward(p).status()), "bias");  // Its gradient is a sum.
  EXPECT_TRUE(DescribeSdpaBackward(WithBias(dense, {2, 4, 128, 256})).ok());
  AttentionProblem huge = WithBias(dense, {2, 4, 128, 256});
  huge.max_seqlen_q = huge.max_seqlen_kv = 32768;
  for (SequenceExtent& s : huge.sequences) s.q_len = s.kv_len = 32768;
  EXPECT_EQ(ErrorField(DescribeSdpa(huge).status()), "bias");
  const AttentionProblem by_key = WithBias(dense, {1, 1, 1, 256});
  EXPECT_TRUE(DescribeSdpa(by_key).ok());
  EXPECT_EQ(ErrorField(DescribeSdpaBackward(by_key).status()), "bias");
  const AttentionProblem odd =
      WithBias(ProblemOf(Layout::kBshdBshdBshd, Full(2, 100, 256)), {1, 4, 100, 256});
  EXPECT_EQ(ErrorField(DescribeSdpa(odd).status()), "spec.bias_kind");
}

TEST(SdpaDescription, AlibiIsOfCausalMasksAndWholeModelsOnly) {
  const auto alibi = [](Causal causal, std::optional<AlibiShard> shard) {
    const AttentionProblem p =
        ProblemOf(Layout::kThdThdThd, Full(2, 8, 8), [&](AttentionSpec& spec) {
          spec.bias_kind = BiasKind::kAlibi;
          spec.causal = causal;
          spec.alibi = shard;
          if (causal == Causal::kNone) spec.window_alignment = Alignment::kTopLeft;
        });
    return ErrorField(DescribeSdpa(p).status());
  };
  EXPECT_EQ(alibi(Causal::kTopLeft, std::nullopt), "");
  EXPECT_EQ(alibi(Causal::kTopLeft, AlibiShard{0, 4}), "");
  EXPECT_EQ(alibi(Causal::kTopLeft, AlibiShard{0, 8}), "spec.alibi");
  EXPECT_EQ(alibi(Causal::kBottomRight, std::nullopt), "spec.causal");
  EXPECT_EQ(alibi(Causal::kNone, std::nullopt), "spec.causal");
}

TEST(SdpaDescription, BackwardBoundsTheRowsOfTokenBuffers) {
  Geometry g = LengthsOf({60, 3}, {70, 9}, 60, 70);
  SdpaDescription d = *DescribeSdpaBackward(ProblemOf(Layout::kThdThdThd, g));
  EXPECT_TRUE(d.is_backward);
  EXPECT_EQ(d.total_q, 64);
  EXPECT_EQ(d.total_kv, 128);
  d = *DescribeSdpaBackward(ProblemOf(Layout::kThdBshdBshd, g));
  EXPECT_EQ(d.total_q, 64);
  EXPECT_EQ(d.total_kv, 0);
  AttentionProblem head_major = ProblemOf(Layout::kThdThdThd, g);
  head_major.k.strides.head = 79 * 16;
  head_major.k.strides.seq = 16;
  d = *DescribeSdpaBackward(head_major);
  EXPECT_EQ(d.total_q, 64);
  EXPECT_EQ(d.total_kv, 0);
  g.d_qk = 24;  // cuDNN bounds them for multiples of 16 only.
  d = *DescribeSdpaBackward(ProblemOf(Layout::kThdThdThd, g));
  EXPECT_EQ(d.total_q, 0);
}

TEST(SdpaDescription, RefusesGroupsWhereItCannotSplitHeads) {
  const auto with_groups = [](AttentionProblem p) {
    p.q.group_heads = 2;
    p.q.group_stride = 8 * p.head_dim_qk;
    return p;
  };
  const AttentionProblem dense =
      with_groups(ProblemOf(Layout::kBshdBshdBshd, LengthsOf({128}, {128}, 128, 128)));
  EXPECT_TRUE(DescribeSdpa(dense).ok());
  EXPECT_EQ(ErrorField(DescribeSdpaBackward(dense).status()), "spec.views.q.group_stride");
  const AttentionProblem tokens =
      with_groups(ProblemOf(Layout::kThdThdThd, LengthsOf({3}, {3}, 3, 3)));
  EXPECT_EQ(ErrorField(DescribeSdpa(tokens).status()), "spec.views.q.group_stride");
}

TEST(SdpaDescription, RefusesWhatCudnnsArithmeticOrTypesCannotHold) {
  const auto field = [](const AttentionProblem& p) { return ErrorField(DescribeSdpa(p).status()); };
  AttentionProblem p = ProblemOf(Layout::kThdThdThd, LengthsOf({1}, {1}, 1, 1));
  p.batch = 32'769;
  p.sequences.assign(32'769, p.sequences[0]);
  EXPECT_EQ(field(p), "spec.batch");
  p = ProblemOf(Layout::kBshdBshdBshd, Full(2, 8, 8));
  p.scale = -1;
  EXPECT_EQ(field(p), "spec.scale");
  EXPECT_TRUE(DescribeSdpaBackward(p).ok());
  p = ProblemOf(Layout::kBshdBshdBshd, Full(2, 8, 8));
  p.dtype = DType::kFloat16;
  p.out_dtype = DType::kFloat32;
  EXPECT_EQ(ErrorField(DescribeSdpaBackward(p).status()), "out");
}

TEST(SdpaDescription, ABoundAboveTheLengthsMakesNoLargerGraph) {
  const auto describe = [](int64_t bound) {
    return Describe(
        ProblemOf(Layout::kThdThdThd, LengthsOf({5, 9}, {7, 8}, 9, 8), [&](AttentionSpec& spec) {
          spec.max_seqlen_q = bound;
          spec.max_seqlen_kv = bound;
        }));
  };
  EXPECT_EQ(describe(int64_t{1} << 30), describe(9));
}

TEST(SdpaDescription, StridesOfAxesWithOneElementSayNothing) {
  AttentionProblem p = ProblemOf(Layout::kBshdBshdBshd, Full(1, 128, 128));
  const SdpaDescription want = Describe(p);
  p.q.strides.batch = int64_t{1} << 33;
  p.k.strides.batch = 7;
  EXPECT_EQ(Describe(p), want);
}

TEST(SdpaDescription, LargeDeterministicProblemsRunInParts) {
  const auto parts = [](Layout layout, int64_t batch, int64_t s) {
    AttentionProblem p = ProblemOf(layout, Full(batch, 128, 128));
    p.deterministic = true;
    p.max_seqlen_q = p.max_seqlen_kv = s;
    for (SequenceExtent& extent : p.sequences) extent.q_len = extent.kv_len = s;
    const SdpaDescription d = *DescribeSdpaBackward(p);
    const SdpaParts n = PartsOf(d, p);
    EXPECT_EQ(d.num_heads / d.num_kv_heads, p.num_heads / p.num_kv_heads);
    return std::pair(n.batch, n.heads);
  };
  // Four heads: 8 s^2 bytes of a sequence.
  EXPECT_EQ(parts(Layout::kBshdBshdBshd, 8, 8192), std::pair(int64_t{1}, int64_t{1}));
  EXPECT_EQ(parts(Layout::kBshdBshdBshd, 16, 8192), std::pair(int64_t{2}, int64_t{1}));
  EXPECT_EQ(parts(Layout::kBshdBshdBshd, 3, 16384), std::pair(int64_t{3}, int64_t{1}));
  EXPECT_EQ(parts(Layout::kBshdBshdBshd, 2, 32768), std::pair(int64_t{2}, int64_t{2}));
  EXPECT_EQ(parts(Layout::kThdThdThd, 12, 8192), std::pair(int64_t{2}, int64_t{1}));
}

}  // namespace
}  // namespace attnd::testing
