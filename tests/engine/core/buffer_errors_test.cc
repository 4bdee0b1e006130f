// Buffers that contradict the layout, the spec or one another.

#include <gtest/gtest.h>

#include "engine/core/status.h"
#include "tests/engine/core/requests.h"

namespace attnd::testing {
namespace {

constexpr Buffer QKV = Buffer::kQkv, Q = Buffer::kQ, KV = Buffer::kKv, K = Buffer::kK,
                 V = Buffer::kV;
constexpr int64_t kTwoTo32 = int64_t{1} << 32;

// Valid requests have qkv [.., 6, 8]; q [.., 6, 8] with kv [.., 3, 8] or k [.., 3, 8], v [.., 3,
// 10].
const BadRequest kBadBuffers[] = {
    // Which buffers.
    {"QkvMissing", "BS3HD", [](Request& r) { r.Input(QKV).reset(); }, "inputs.qkv"},
    {"QMissing", "BSHD_BS2HD", [](Request& r) { r.Input(Q).reset(); }, "inputs.q"},
    {"KvMissing", "BSHD_BS2HD", [](Request& r) { r.Input(KV).reset(); }, "inputs.kv"},
    {"KMissing", "THD_THD_THD", [](Request& r) { r.Input(K).reset(); }, "inputs.k"},
    {"VMissing", "BHSD_BHSD_BHSD", [](Request& r) { r.Input(V).reset(); }, "inputs.v"},
    {"PoolMissing", "PAGED_KV_BSHD_BSHD_BSHD", [](Request& r) { r.Input(V).reset(); }, "inputs.v"},
    {"QBesideQkv", "BS3HD", [](Request& r) { r.Input(Q) = r.Input(QKV); }, "inputs.q"},
    {"KvBesideQkv", "T3HD", [](Request& r) { r.Input(KV) = r.Input(QKV); }, "inputs.kv"},
    {"KBesideKv", "BSHD_BS2HD", [](Request& r) { r.Input(K) = r.Input(KV); }, "inputs.k"},
    {"QkvBesideSeparate", "BSHD_BSHD_BSHD", [](Request& r) { r.Input(QKV) = r.Input(Q); },
     "inputs.qkv"},
    {"EmptySurplus", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.Input(KV) = TensorDesc{DType::kFloat16, {0}};
     },
     "inputs.kv"},
    // dtype.
    {"OtherDtype", "BSHD_BSHD_BSHD", [](Request& r) { r.Input(K)->dtype = DType::kBFloat16; },
     "inputs.k.dtype"},
    {"NoDtype", "BS3HD", [](Request& r) { r.Input(QKV)->dtype = DType::kUnspecified; },
     "inputs.qkv.dtype"},
    // Rank.
    {"RankOfQkvTooLow", "BS3HD",
     [](Request& r) {
       r.Shape(QKV) = {2, 4, 3, 48};
     },
     "inputs.qkv"},
    {"RankOfQkvTooHigh", "T3HD",
     [](Request& r) {
       r.Shape(QKV) = {1, 7, 3, 6, 8};
     },
     "inputs.qkv"},
    {"RankOfThdQ", "THD_T2HD",
     [](Request& r) {
       r.Shape(Q) = {1, 7, 6, 8};
     },
     "inputs.q"},
    {"RankOfKv", "BSHD_BS2HD",
     [](Request& r) {
       r.Shape(KV) = {2, 5, 6, 8};
     },
     "inputs.kv"},
    {"RankOfV", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.Shape(V) = {2, 5, 30};
     },
     "inputs.v"},
    {"RankZero", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(Q) = {}; }, "inputs.q"},
    {"RankOfPool", "PAGED_KV_THD_BSHD_BSHD", [](Request& r) { r.Shape(K).pop_back(); }, "inputs.k"},
    // The 3 and the 2 are found by position.
    {"FourInsteadOfThree", "BS3HD",
     [](Request& r) {
       r.Shape(QKV) = {2, 4, 4, 6, 8};
     },
     "inputs.qkv"},
    {"ThreeInTheWrongPlace", "BS3HD",
     [](Request& r) {
       r.Shape(QKV) = {2, 4, 6, 3, 8};
     },
     "inputs.qkv"},
    {"HeadsFirst", "BSH3D",
     [](Request& r) {
       r.Shape(QKV) = {2, 4, 3, 6, 8};
     },
     "inputs.qkv"},
    {"ThreeElsewhereIsNoPack", "SB3HD",
     [](Request& r) {
       r.Shape(QKV) = {3, 3, 2, 3, 8};
     },
     "inputs.qkv"},
    {"ThreeInsteadOfTwo", "THD_T2HD",
     [](Request& r) {
       r.Shape(KV) = {7, 3, 2, 8};
     },
     "inputs.kv"},
    {"OneInsteadOfTwo", "SBHD_SBH2D",
     [](Request& r) {
       r.Shape(KV) = {5, 2, 3, 1, 8};
     },
     "inputs.kv"},
    // Sizes that buffers share.
    {"BatchOfKDiffers", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(K)[0] = 3; }, "inputs.k"},
    {"BatchOfKvDiffers", "SBHD_SB2HD", [](Request& r) { r.Shape(KV)[1] = 3; }, "inputs.kv"},
    {"SeqOfVDiffers", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(V)[1] = 6; }, "inputs.v"},
    {"SwappedSeqAndBatch", "BSHD_SBHD_SBHD",
     [](Request& r) {
       r.Shape(K) = {2, 5, 3, 8};
     },
     "inputs.k"},
    {"TokensOfVDiffer", "THD_THD_THD", [](Request& r) { r.Shape(V)[0] = 8; }, "inputs.v"},
    {"KvHeadsOfVDiffer", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(V)[2] = 6; }, "inputs.v"},
    {"HeadDimOfKDiffers", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(K)[3] = 16; }, "inputs.k"},
    {"HeadDimOfKvDiffers", "BSHD_BS2HD", [](Request& r) { r.Shape(KV)[4] = 16; }, "inputs.kv"},
    {"HeadDimOfPoolDiffers", "PAGED_KV_SBHD_SBHD_SBHD", [](Request& r) { r.Shape(K)[3] = 9; },
     "inputs.k"},
    {"PageSizesDiffer", "PAGED_KV_BSHD_BSHD_BSHD", [](Request& r) { r.Shape(V)[1] = 8; },
     "inputs.v"},
    {"HeadsDoNotDivide", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(K)[2] = 4, r.Shape(V)[2] = 4; },
     "spec.num_kv_heads"},
    {"HeadsDoNotDivideInKv", "THD_T2HD", [](Request& r) { r.Shape(KV)[2] = 4; },
     "spec.num_kv_heads"},
    {"MoreKvHeadsThanHeads", "BSHD_BSHD_BSHD",
     [](Request& r) { r.Shape(K)[2] = 12, r.Shape(V)[2] = 12; }, "spec.num_kv_heads"},
    // No heads, no dims, negative and enormous dimensions.
    {"NoHeads", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(Q)[2] = 0; }, "inputs.q"},
    {"NoKvHeads", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(K)[2] = 0; }, "inputs.k"},
    {"NoHeadDim", "BS3HD", [](Request& r) { r.Shape(QKV)[4] = 0; }, "inputs.qkv"},
    {"NoHeadDimOfV", "THD_THD_THD", [](Request& r) { r.Shape(V)[2] = 0; }, "inputs.v"},
    {"NoBatch", "BS3HD",
     [](Request& r) {
       r.Shape(QKV)[0] = 0;
       r.sequences = {};
     },
     "inputs.qkv"},
    {"NegativeDim", "BSHD_BSHD_BSHD", [](Request& r) { r.Shape(K)[1] = -5; }, "inputs.k.shape"},
    {"ProductPast63Bits", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.Shape(Q) = {kTwoTo32, kTwoTo32, 6, 8};
     },
     "inputs.q.shape"},
    {"BytesPast63Bits", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.Shape(V) = {2, kTwoTo32, 3, kTwoTo32 / 4};
     },
     "inputs.v.shape"},
    {"PackedProductPast63Bits", "SB3HD",
     [](Request& r) {
       r.Shape(QKV) = {kTwoTo32, 1 << 20, 3, 1 << 10, 8};
     },
     "inputs.qkv.shape"},
    {"EmptyButEnormous", "BSHD_BSHD_BSHD",
     [](Request& r) {
       r.Shape(K) = {kTwoTo32, 0, kTwoTo32, 8};
     },
     "inputs.k.shape"},
    {"PoolPast63Bits", "PAGED_KV_BSHD_SBHD_SBHD",
     [](Request& r) {
       r.Shape(K) = {kTwoTo32, kTwoTo32, 3, 8};
     },
     "inputs.k.shape"},
};

class BadBuffers : public ::testing::TestWithParam<BadRequest> {};
TEST_P(BadBuffers, AreRefused) { ExpectRefused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Layout, BadBuffers, ::testing::ValuesIn(kBadBuffers),
                         [](const auto& param) { return std::string(param.param.name); });

// Heads, sequence and batch of 3 next to the 3 that packs: nothing may be found by value.
TEST(Layout, ThreeHeadsOfThreeRowsInABatchOfThreeResolve) {
  for (const Layout layout : {Layout::kBs3hd, Layout::kBsh3d, Layout::kSb3hd, Layout::kSbh3d}) {
    Request r;
    r.spec.layout = layout;
    r.spec.dtype = DType::kFloat16;
    r.Input(QKV) = TensorDesc{DType::kFloat16, {3, 3, 3, 3, 8}};
    const auto p = r.Resolve();
    ASSERT_TRUE(p.ok()) << Name(layout) << p.status();
    EXPECT_EQ(p->num_heads, 3);
    const bool before = layout == Layout::kBs3hd || layout == Layout::kSb3hd;
    EXPECT_EQ(p->k.byte_offset, before ? 48 : 16) << Name(layout);
    EXPECT_EQ(p->v.strides.head, before ? 8 : 24) << Name(layout);
  }
  Request r;
  r.spec.layout = Layout::kBs3hd;
  r.spec.dtype = DType::kFloat16;
  r.Input(QKV) = TensorDesc{DType::kFloat16, {3, 3, 2, 3, 8}};  // All 3 but the pack.
  EXPECT_EQ(ErrorField(r.Resolve().status()), "inputs.qkv");
}

TEST(Layout, SequencesAndBuffersWithoutRowsResolve) {
  Request dense = SmallRequest(Layout::kBshdBshdBshd);
  dense.sequences = {};
  dense.Shape(Q)[1] = 0;
  ASSERT_TRUE(dense.Resolve().ok()) << dense.Resolve().status();
  EXPECT_EQ(dense.Resolve()->out_desc.shape, (std::vector<int64_t>{2, 0, 6, 10}));
  dense.Shape(K)[1] = dense.Shape(V)[1] = 0;
  EXPECT_TRUE(dense.Resolve().ok()) << dense.Resolve().status();

  Request thd = SmallRequest(Layout::kT3hd);
  thd.sequences.cu_seqlens_q = thd.sequences.cu_seqlens_kv = {0, 0, 0};
  EXPECT_TRUE(thd.Resolve().ok()) << thd.Resolve().status();  // All of it tail.
  thd.Shape(QKV)[0] = 0;
  ASSERT_TRUE(thd.Resolve().ok()) << thd.Resolve().status();
  EXPECT_EQ(thd.Resolve()->batch, 2);
  EXPECT_EQ(thd.Resolve()->max_seqlen_q, 0);
}

// A request of a few bytes must not make the resolver fill the memory.
TEST(Layout, AnEnormousBatchOfNothingIsRefused) {
  Request r = SmallRequest(Layout::kBs3hd);
  r.sequences = {};
  r.Shape(QKV) = {int64_t{1} << 40, 0, 3, 6, 8};
  EXPECT_EQ(r.Resolve().status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace attnd::testing
