// Specs that contradict themselves or the buffers, and features without what they need.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "tests/engine/core/requests.h"

namespace attnd::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

const TensorDesc kBias{DType::kFloat16, {1, 6, 4, 5}};

BadRequest Bad(const char* name, std::function<void(AttentionSpec&)> spoil, const char* field,
               std::string_view layout = "BSHD_BSHD_BSHD") {
  return {name, layout, [spoil](Request& r) { spoil(r.spec); }, field};
}

const BadRequest kBadSpecs[] = {
    Bad(
        "NoLayout", [](auto& s) { s.layout = Layout::kUnspecified; }, "spec.layout"),
    Bad(
        "UnknownLayout", [](auto& s) { s.layout = static_cast<Layout>(99); }, "spec.layout"),
    Bad(
        "NoDtype", [](auto& s) { s.dtype = DType::kUnspecified; }, "spec.dtype"),
    Bad(
        "IntegerDtype", [](auto& s) { s.dtype = DType::kInt32; }, "spec.dtype"),
    // Sizes against the shapes.
    Bad(
        "Batch", [](auto& s) { s.batch = 3; }, "inputs.q"),
    Bad(
        "BatchZero", [](auto& s) { s.batch = 0; }, "spec.batch"),
    Bad(
        "BatchNegative", [](auto& s) { s.batch = -2; }, "spec.batch"),
    Bad(
        "BatchOfThd", [](auto& s) { s.batch = 3; }, "sequences.cu_seqlens_q", "T3HD"),
    Bad(
        "MaxSeqlenQBelowTheAxis", [](auto& s) { s.max_seqlen_q = 3; }, "inputs.q"),
    Bad(
        "MaxSeqlenQAboveTheAxis", [](auto& s) { s.max_seqlen_q = 5; }, "inputs.q"),
    Bad(
        "MaxSeqlenKv", [](auto& s) { s.max_seqlen_kv = 6; }, "inputs.k"),
    Bad(
        "MaxSeqlenNegative", [](auto& s) { s.max_seqlen_q = -1; }, "spec.max_seqlen_q"),
    Bad(
        "MaxSeqlenQOfThdBelowTheLongest", [](auto& s) { s.max_seqlen_q = 3; }, "spec.max_seqlen_q",
        "THD_THD_THD"),
    Bad(
        "MaxSeqlenKvOfThdBelowTheLongest", [](auto& s) { s.max_seqlen_kv = 4; },
        "spec.max_seqlen_kv", "THD_T2HD"),
    Bad(
        "MaxSeqlenOfThdNegative", [](auto& s) { s.max_seqlen_kv = -4; }, "spec.max_seqlen_kv",
        "THD_THD_THD"),
    Bad(
        "MaxSeqlenKvOfPagedBelowTheLongest", [](auto& s) { s.max_seqlen_kv = 4; },
        "spec.max_seqlen_kv", "PAGED_KV_THD_BSHD_BSHD"),
    Bad(
        "NumHeads", [](auto& s) { s.num_heads = 12; }, "inputs.q"),
    Bad(
        "NumHeadsZero", [](auto& s) { s.num_heads = 0; }, "spec.num_heads"),
    Bad(
        "NumKvHeads", [](auto& s) { s.num_kv_heads = 6; }, "inputs.k"),
    Bad(
        "NumKvHeadsNegative", [](auto& s) { s.num_kv_heads = -3; }, "spec.num_kv_heads"),
    Bad(
        "HeadDimQk", [](auto& s) { s.head_dim_qk = 16; }, "inputs.q"),
    Bad(
        "HeadDimQkZero", [](auto& s) { s.head_dim_qk = 0; }, "spec.head_dim_qk"),
    Bad(
        "HeadDimV", [](auto& s) { s.head_dim_v = 8; }, "inputs.v"),
    Bad(
        "PageSize", [](auto& s) { s.page_size = 8; }, "inputs.k", "PAGED_KV_BSHD_BSHD_BSHD"),
    Bad(
        "PageSizeZero", [](auto& s) { s.page_size = 0; }, "spec.page_size",
        "PAGED_KV_BSHD_BSHD_BSHD"),
    Bad(
        "PageSizeWithoutPages", [](auto& s) { s.page_size = 8; }, "spec.page_size"),
    // What packed layouts cannot express.
    Bad(
        "HeadDimsOf3Packed", [](auto& s) { s.head_dim_qk = 8, s.head_dim_v = 4; },
        "spec.head_dim_v", "BS3HD"),
    Bad(
        "HeadDimVOf3Packed", [](auto& s) { s.head_dim_v = 4; }, "inputs.qkv", "TH3D"),
    Bad(
        "HeadDimsOf2Packed", [](auto& s) { s.head_dim_qk = 8, s.head_dim_v = 16; },
        "spec.head_dim_v", "THD_TH2D"),
    Bad(
        "HeadDimVOf2Packed", [](auto& s) { s.head_dim_v = 16; }, "inputs.kv", "SBHD_SB2HD"),
    Bad(
        "HeadsOf3Packed", [](auto& s) { s.num_heads = 6, s.num_kv_heads = 3; }, "spec.num_kv_heads",
        "SBH3D"),
    Bad(
        "KvHeadsOf3Packed", [](auto& s) { s.num_kv_heads = 3; }, "inputs.qkv", "T3HD"),
    Bad(
        "SeqlensOf3Packed", [](auto& s) { s.max_seqlen_q = 4, s.max_seqlen_kv = 8; },
        "spec.max_seqlen_kv", "BS3HD"),
    Bad(
        "SeqlenKvOf3Packed", [](auto& s) { s.max_seqlen_kv = 8; }, "inputs.qkv", "SB3HD"),
    // Numbers.
    Bad(
        "ScaleNan", [](auto& s) { s.scale = kNan; }, "spec.scale"),
    Bad(
        "ScaleInfinite", [](auto& s) { s.scale = -kInfinity; }, "spec.scale"),
    Bad(
        "SoftcapZero", [](auto& s) { s.logit_softcap = 0; }, "spec.logit_softcap"),
    Bad(
        "SoftcapNegative", [](auto& s) { s.logit_softcap = -30; }, "spec.logit_softcap"),
    Bad(
        "SoftcapInfinite", [](auto& s) { s.logit_softcap = kInfinity; }, "spec.logit_softcap"),
    Bad(
        "SoftcapNan", [](auto& s) { s.logit_softcap = kNan; }, "spec.logit_softcap"),
    Bad(
        "DropoutOne", [](auto& s) { s.dropout = Dropout{1.0}; }, "spec.dropout.probability"),
    Bad(
        "DropoutNegative", [](auto& s) { s.dropout = Dropout{-0.1}; }, "spec.dropout.probability"),
    Bad(
        "DropoutNan", [](auto& s) { s.dropout = Dropout{kNan}; }, "spec.dropout.probability"),
    // Windows.
    Bad(
        "WindowLeft", [](auto& s) { s.window_left = -2; }, "spec.window.left"),
    Bad(
        "WindowRight",
        [](auto& s) {
          s.window_right = std::numeric_limits<int64_t>::min();
          s.window_alignment = Alignment::kTopLeft;
        },
        "spec.window.right"),
    Bad(
        "WindowNeedsAlignment", [](auto& s) { s.window_left = 2; }, "spec.window_alignment"),
    Bad(
        "WindowNeedsAlignmentInThd", [](auto& s) { s.window_right = 0; }, "spec.window_alignment",
        "THD_THD_THD"),
    Bad(
        "AlignmentContradictsTopLeft",
        [](auto& s) {
          s.causal = Causal::kTopLeft;
          s.window_left = 2;
          s.window_alignment = Alignment::kBottomRight;
        },
        "spec.window_alignment"),
    Bad(
        "AlignmentContradictsBottomRight",
        [](auto& s) {
          s.causal = Causal::kBottomRight;
          s.window_left = 2;
          s.window_alignment = Alignment::kTopLeft;
        },
        "spec.window_alignment"),
    // Misplaced.
    Bad(
        "AlibiShardWithoutAlibi",
        [](auto& s) {
          s.alibi = AlibiShard{0, 6};
        },
        "spec.alibi"),
    Bad(
        "Fp8ScalesWithoutFp8", [](auto& s) { s.fp8.emplace(); }, "spec.fp8"),
    Bad(
        "ViewsWithANamedLayout", [](auto& s) { s.views.emplace(); }, "spec.views"),
    Bad(
        "AlibiShardTooSmall",
        [](auto& s) {
          s.bias_kind = BiasKind::kAlibi;
          s.window_alignment = Alignment::kTopLeft;
          s.alibi = AlibiShard{2, 7};
        },
        "spec.alibi"),
    Bad(
        "AlibiWithoutAlignment", [](auto& s) { s.bias_kind = BiasKind::kAlibi; },
        "spec.window_alignment"),
    Bad(
        "AlibiShardNegative",
        [](auto& s) {
          s.bias_kind = BiasKind::kAlibi;
          s.window_alignment = Alignment::kTopLeft;
          s.alibi = AlibiShard{-1, 12};
        },
        "spec.alibi"),
    // Bias and sink.
    Bad(
        "BiasMissing", [](auto& s) { s.bias_kind = BiasKind::kPostScale; }, "bias"),
    {"BiasMisplaced", "BSHD_BSHD_BSHD", [](Request& r) { r.inputs.bias = kBias; }, "bias"},
    {"BiasWithAlibi", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.bias_kind = BiasKind::kAlibi;
       r.spec.window_alignment = Alignment::kTopLeft;
       r.inputs.bias = kBias;
     },
     "bias"},
    {"BiasDtype", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.bias_kind = BiasKind::kPreScale;
       r.inputs.bias = TensorDesc{DType::kFloat32, kBias.shape};
     },
     "bias.dtype"},
    {"BiasRank", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.bias_kind = BiasKind::kPostScale;
       r.inputs.bias = TensorDesc{DType::kFloat16, {6, 4, 5}};
     },
     "bias"},
    {"BiasHeads", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.bias_kind = BiasKind::kPostScale;
       r.inputs.bias = TensorDesc{DType::kFloat16, {1, 3, 4, 5}};
     },
     "bias"},
    {"BiasKeysAreNeverBroadcast", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.bias_kind = BiasKind::kPostScale;
       r.inputs.bias = TensorDesc{DType::kFloat16, {2, 6, 4, 1}};
     },
     "bias"},
    Bad(
        "SinkMissing", [](auto& s) { s.softmax_kind = SoftmaxKind::kLearnable; }, "softmax_offset"),
    {"SinkMisplaced", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.softmax_kind = SoftmaxKind::kOffByOne;
       r.inputs.softmax_offset = TensorDesc{DType::kFloat32, {6}};
     },
     "softmax_offset"},
    {"SinkDtype", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.softmax_kind = SoftmaxKind::kLearnable;
       r.inputs.softmax_offset = TensorDesc{DType::kFloat16, {6}};
     },
     "softmax_offset.dtype"},
    {"SinkShape", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.spec.softmax_kind = SoftmaxKind::kLearnable;
       r.inputs.softmax_offset = TensorDesc{DType::kFloat32, {3}};
     },
     "softmax_offset"},
    // Output type.
    {"OutDtype", "BSHD_BSHD_BSHD", [](Request& r) { r.options.out_dtype = DType::kBFloat16; },
     "out_dtype"},
    {"OutDtypeInteger", "T3HD", [](Request& r) { r.options.out_dtype = DType::kInt32; },
     "out_dtype"},
};

class BadSpecs : public ::testing::TestWithParam<BadRequest> {};
TEST_P(BadSpecs, AreRefused) { ExpectRefused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Layout, BadSpecs, ::testing::ValuesIn(kBadSpecs),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(Layout, DeriveNamesTheSizeThatNobodySays) {
  Request r = SmallRequest(Layout::kBshdBshdBshd);
  r.inputs = {};
  r.options.derive_missing_shapes = true;
  r.spec.max_seqlen_q = 4, r.spec.max_seqlen_kv = 5;
  r.spec.num_heads = 6, r.spec.num_kv_heads = 3, r.spec.head_dim_qk = 8;
  EXPECT_EQ(ErrorField(r.Resolve().status()), "spec.head_dim_v");
  r.spec.head_dim_v = 10;
  EXPECT_TRUE(r.Resolve().ok()) << r.Resolve().status();
  r.spec.num_heads.reset();
  EXPECT_EQ(ErrorField(r.Resolve().status()), "spec.num_heads");
}

// ---------------------------------------------------------------------------- what is legal

TEST(Layout, NumbersTravelThrough) {
  Request r = SmallRequest(Layout::kBshdBshdBshd);
  for (const double scale : {0.0, -0.5, 3.0}) {
    r.spec.scale = scale;
    EXPECT_EQ(r.Resolve()->scale, scale);
  }
  r.spec.logit_softcap = 50.0;
  r.spec.dropout = Dropout{0.25, 7, 9};
  r.spec.deterministic = r.spec.batch_invariant = true;
  r.options.out_dtype = DType::kFloat32;
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->logit_softcap, 50.0);
  EXPECT_EQ(p->dropout.probability, 0.25);
  EXPECT_EQ(p->dropout.seed, 7);
  EXPECT_TRUE(p->deterministic && p->batch_invariant);
  EXPECT_EQ(p->out_desc.dtype, DType::kFloat32);
  EXPECT_EQ(p->dtype, DType::kFloat16);
}

TEST(Layout, MasksBecomeBands) {
  Request r = SmallRequest(Layout::kBshdBshdBshd);
  EXPECT_EQ(r.Resolve()->mask, BandMask{});
  r.spec.window_left = r.spec.window_right = -1;  // Unlimited: needs no alignment.
  EXPECT_EQ(r.Resolve()->mask, BandMask{});
  r.spec.causal = Causal::kBottomRight;
  r.spec.window_left = 2, r.spec.window_right = 7;
  EXPECT_EQ(r.Resolve()->mask, (BandMask{2, 0, true}));
  r.spec.causal = Causal::kTopLeft;
  r.spec.window_left.reset();
  r.spec.window_alignment = Alignment::kTopLeft;  // Agrees.
  EXPECT_EQ(r.Resolve()->mask, (BandMask{std::nullopt, 0, false}));
  r.spec.causal = Causal::kNone;
  r.spec.window_left = 0;
  r.spec.window_alignment = Alignment::kBottomRight;
  EXPECT_EQ(r.Resolve()->mask, (BandMask{0, 7, true}));
}

TEST(Layout, EqualLengthsNeedNoAlignment) {
  Request r = SmallRequest(Layout::kT3hd);
  r.spec.window_left = 1;
  EXPECT_TRUE(r.Resolve().ok()) << r.Resolve().status();
}

TEST(Layout, BiasesOfEveryBroadcastResolve) {
  Request r = SmallRequest(Layout::kBshdBshdBshd);
  r.spec.bias_kind = BiasKind::kPostScale;
  for (const int64_t b : {1, 2}) {
    for (const int64_t h : {1, 6}) {
      for (const int64_t s : {1, 4}) {
        r.inputs.bias = TensorDesc{DType::kFloat16, {b, h, s, 5}};
        ASSERT_TRUE(r.Resolve().ok()) << r.Resolve().status();
        EXPECT_EQ(r.Resolve()->bias, r.inputs.bias);
        const Strides strides = {.batch = b > 1 ? h * s * 5 : 0,
                                 .seq = s > 1 ? 5 : 0,
                                 .head = h > 1 ? s * 5 : 0,
                                 .dim = 1};
        EXPECT_EQ(r.Resolve()->bias_strides, strides);
      }
    }
  }
}

TEST(Layout, FeaturesOfLaterIssuesResolve) {
  Request r = SmallRequest(Layout::kThdThdThd);
  r.spec.bias_kind = BiasKind::kAlibi;
  r.spec.alibi = AlibiShard{6, 12};
  r.spec.window_alignment = Alignment::kTopLeft;
  r.spec.softmax_kind = SoftmaxKind::kLearnable;
  r.inputs.softmax_offset = TensorDesc{DType::kFloat32, {6}};
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  // Heads 6 and up of 12: the last two of the first 8, then those with odd exponents.
  EXPECT_EQ(p->alibi_slopes,
            std::vector<double>({std::exp2(-7), std::exp2(-8), std::exp2(-0.5), std::exp2(-1.5),
                                 std::exp2(-2.5), std::exp2(-3.5)}));
  EXPECT_EQ(p->softmax_kind, SoftmaxKind::kLearnable);
  r.spec.dtype = DType::kFloat8E4M3;
  r.spec.fp8.emplace();
  for (Buffer buffer : {Buffer::kQ, Buffer::kK, Buffer::kV}) {
    r.Input(buffer)->dtype = DType::kFloat8E4M3;
  }
  EXPECT_TRUE(r.Resolve().ok()) << r.Resolve().status();
}

TEST(SoftmaxOffset, IsFiniteOrMinusInfinity) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kQuietNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(CheckSoftmaxOffset({}).ok());
  EXPECT_TRUE(CheckSoftmaxOffset(std::vector<float>{-kInf, -kMax, 0, kMax}).ok());
  for (const auto& [value, text] : {std::pair(kInf, "inf"), std::pair(kQuietNan, "nan")}) {
    for (size_t head = 0; head < 4; ++head) {
      std::vector<float> offsets{0, -kInf, kMax, 1};
      offsets[head] = value;
      const absl::Status status = CheckSoftmaxOffset(offsets);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorField(status), "softmax_offset");
      EXPECT_EQ(ErrorReason(status), reason::kInvalidField);
      const std::string sentence =
          absl::StrCat("softmax_offset is ", text, " for head ", head, ";");
      EXPECT_TRUE(absl::StartsWith(status.message(), sentence)) << status;
    }
  }
}

}  // namespace
}  // namespace attnd::testing
