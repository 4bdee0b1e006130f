// Layout STRIDED: views that contradict the buffers, the sizes or one another.

#include <gtest/gtest.h>

#include <limits>

#include "engine/core/status.h"
#include "tests/engine/core/requests.h"

namespace attnd::testing {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr std::string_view kFused = "STRIDED_fused_dense";       // qkv [2, 4, 18, 8]
constexpr std::string_view kGroups = "STRIDED_groups";           // qkv [s, b, g, h/g + 2, d]
constexpr std::string_view kTokens = "STRIDED_fused_tokens";     // qkv [7, 18, 8]
constexpr std::string_view kPages = "STRIDED_head_major_pages";  // q, k [P, 3, 8, 8], v

const BadRequest kBadViews[] = {
    {"NoViews", kFused, [](Request& r) { r.spec.views.reset(); }, "spec.views"},
    // All sizes are required.
    {"NoBatch", kFused, [](Request& r) { r.spec.batch.reset(); }, "spec.batch"},
    {"NoMaxSeqlenQ", kFused, [](Request& r) { r.spec.max_seqlen_q.reset(); }, "spec.max_seqlen_q"},
    {"NoMaxSeqlenKv", kTokens, [](Request& r) { r.spec.max_seqlen_kv.reset(); },
     "spec.max_seqlen_kv"},
    {"NoNumHeads", kFused, [](Request& r) { r.spec.num_heads.reset(); }, "spec.num_heads"},
    {"NoNumKvHeads", kFused, [](Request& r) { r.spec.num_kv_heads.reset(); }, "spec.num_kv_heads"},
    {"NoHeadDimQk", kFused, [](Request& r) { r.spec.head_dim_qk.reset(); }, "spec.head_dim_qk"},
    {"NoHeadDimV", kFused, [](Request& r) { r.spec.head_dim_v.reset(); }, "spec.head_dim_v"},
    {"NoPageSize", kPages, [](Request& r) { r.spec.page_size.reset(); }, "spec.page_size"},
    {"PageSizeZero", kPages, [](Request& r) { r.spec.page_size = 0; }, "spec.page_size"},
    {"PageSizeWithoutPages", kFused, [](Request& r) { r.spec.page_size = 4; }, "spec.page_size"},
    {"HeadsDoNotDivide", kFused, [](Request& r) { r.spec.num_kv_heads = 4; }, "spec.num_kv_heads"},
    // Buffers.
    {"BufferMissing", kFused, [](Request& r) { r.View(1).buffer = Buffer::kK; }, "inputs.k"},
    {"BufferSurplus", kFused, [](Request& r) { r.Input(Buffer::kV) = r.Input(Buffer::kQkv); },
     "inputs.v"},
    {"BufferIsNoInput", kFused, [](Request& r) { r.View(2).buffer = Buffer::kOut; },
     "spec.views.v.buffer"},
    {"BufferDtype", kFused, [](Request& r) { r.Input(Buffer::kQkv)->dtype = DType::kFloat32; },
     "inputs.qkv.dtype"},
    {"BufferWithoutRows", kTokens, [](Request& r) { r.Shape(Buffer::kQkv) = {}; }, "inputs.qkv"},
    {"BufferPast63Bits", kFused,
     [](Request& r) {
       r.Shape(Buffer::kQkv) = {kMax, 2};
     },
     "inputs.qkv.shape"},
    // Strides and offsets.
    {"TwoStrides", kFused,
     [](Request& r) {
       r.View(0).strides = {8, 1};
     },
     "spec.views.q.strides"},
    {"FiveStrides", kFused, [](Request& r) { r.View(1).strides.push_back(1); },
     "spec.views.k.strides"},
    {"NoStrides", kFused, [](Request& r) { r.View(2).strides.clear(); }, "spec.views.v.strides"},
    {"KIsThdAndVIsNot", kTokens,
     [](Request& r) {
       r.View(2).strides = {1, 144, 8, 1};
     },
     "spec.views.v.strides"},
    {"PagesWithoutAPageStride", kPages,
     [](Request& r) {
       r.View(1).strides.erase(r.View(1).strides.begin());
       r.View(2).strides.erase(r.View(2).strides.begin());
     },
     "spec.views.k.strides"},
    {"NegativeStride", kFused, [](Request& r) { r.View(0).strides[1] = -144; },
     "spec.views.q.strides"},
    {"GroupsOfK", kFused, [](Request& r) { r.View(1).group_stride = 8; },
     "spec.views.k.group_stride"},
    {"GroupsOfV", kFused, [](Request& r) { r.View(2).group_stride = 8; },
     "spec.views.v.group_stride"},
    {"NegativeGroupStride", kGroups, [](Request& r) { r.View(0).group_stride = -8; },
     "spec.views.q.group_stride"},
    {"GroupStrideTooLarge", kGroups, [](Request& r) { *r.View(0).group_stride *= 20; },
     "spec.views.q"},
    {"GroupStridePast63Bits", kGroups, [](Request& r) { r.View(0).group_stride = kMax; },
     "spec.views.q"},
    {"GroupsOfUnevenHeads", kGroups, [](Request& r) { ++*r.spec.num_heads; }, "spec.num_kv_heads"},
    {"GroupsOfNoKvHead", kGroups, [](Request& r) { r.spec.num_kv_heads = 0; }, "spec.num_kv_heads"},
    {"NegativeOffset", kFused, [](Request& r) { r.View(1).byte_offset = -2; },
     "spec.views.k.byte_offset"},
    {"OffsetInsideAnElement", kFused, [](Request& r) { r.View(2).byte_offset += 1; },
     "spec.views.v.byte_offset"},
    // Leaving the buffer.
    {"OffsetBeyondTheBuffer", kFused, [](Request& r) { r.View(0).byte_offset = 1 << 20; },
     "spec.views.q"},
    {"VOneElementTooFar", kFused, [](Request& r) { r.View(2).byte_offset += 2; }, "spec.views.v"},
    {"BatchStrideTooLarge", kFused, [](Request& r) { r.View(0).strides[0] = 2 * 576; },
     "spec.views.q"},
    {"SeqStrideTooLarge", kFused, [](Request& r) { r.View(1).strides[1] = 288; }, "spec.views.k"},
    {"HeadStrideTooLarge", kFused, [](Request& r) { r.View(2).strides[2] = 16; }, "spec.views.v"},
    {"DimStrideTooLarge", kFused, [](Request& r) { r.View(2).strides[3] = 2; }, "spec.views.v"},
    {"MoreBatchesThanTheBuffer", kFused,
     [](Request& r) {
       r.sequences = {};
       r.spec.batch = 3;
     },
     "spec.views.q"},
    {"LongerThanTheBuffer", kFused,
     [](Request& r) { r.spec.max_seqlen_q = r.spec.max_seqlen_kv = 5; }, "spec.views.q"},
    {"StrideOverflows", kFused, [](Request& r) { r.View(0).strides[2] = kMax / 2; },
     "spec.views.q"},
    {"SumOverflows", kFused,
     [](Request& r) {
       r.View(0).strides = {kMax - 5, 8, 8, 1};
     },
     "spec.views.q"},
    {"OffsetOverflows", kFused, [](Request& r) { r.View(0).byte_offset = kMax - 1; },
     "spec.views.q"},
    {"TokenStrideTooLarge", kTokens, [](Request& r) { r.View(0).strides[0] = 288; },
     "spec.views.q"},
    {"TokensBeyondTheBuffer", kTokens,
     [](Request& r) {
       r.sequences.cu_seqlens_q_padded = {0, 4, 8};
     },
     "sequences.cu_seqlens_q_padded"},
    {"SequencesMissingInThd", kTokens, [](Request& r) { r.sequences = {}; },
     "sequences.cu_seqlens_q"},
    {"OneRowForAllPositions", kFused,
     [](Request& r) {
       r.sequences = {};
       r.spec.max_seqlen_kv = kMax;
       r.View(1).strides = {0, 0, 8, 1};
     },
     "spec.views.k.strides"},
};

class BadViews : public ::testing::TestWithParam<BadRequest> {};
TEST_P(BadViews, AreRefused) { ExpectRefused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Strided, BadViews, ::testing::ValuesIn(kBadViews),
                         [](const auto& param) { return std::string(param.param.name); });

// ---------------------------------------------------------------------------- what is legal

TEST(Strided, ViewsComeBackAsTheyWereWritten) {
  const Request r = SmallRequest(kFused);
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->q, (TensorView{Buffer::kQkv, 0, {576, 144, 8, 1}, 0}));
  EXPECT_EQ(p->k, (TensorView{Buffer::kQkv, 96, {576, 144, 8, 1}, 0}));
  EXPECT_EQ(p->v, (TensorView{Buffer::kQkv, 192, {576, 144, 8, 1}, 0}));
  EXPECT_EQ(p->out_desc.shape, (std::vector<int64_t>{2, 4, 6, 8}));
}

TEST(Strided, ThreeStridesMakeAThdSide) {
  const auto p = SmallRequest(kTokens).Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_TRUE(p->q_is_thd && p->kv_is_thd);
  EXPECT_EQ(p->k, (TensorView{Buffer::kQkv, 96, {0, 144, 8, 1}, 144}));
  EXPECT_EQ(p->out_desc.shape, (std::vector<int64_t>{7, 6, 8}));
}

TEST(Strided, PagesAreCountedByWhatFitsTheBuffer) {
  Request r = SmallRequest(kPages);
  const int64_t pages_k = r.Shape(Buffer::kK)[0], pages_v = r.Shape(Buffer::kV)[0];
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->num_pages_k, pages_k);
  EXPECT_EQ(p->num_pages_v, pages_v);
  r.View(1).byte_offset = 2;  // One element later: the last page no longer fits.
  EXPECT_EQ(r.Resolve()->num_pages_k, pages_k - 1);
}

// Strides of 0 read the same row for all (one key for every head of a group, for example).
TEST(Strided, StridesMayBeZero) {
  Request r = SmallRequest(kFused);
  r.View(1).strides[0] = 0;
  r.View(2).strides[2] = 0;
  EXPECT_TRUE(r.Resolve().ok()) << r.Resolve().status();
}

TEST(Strided, AnEnormousBatchOfOneRowIsRefused) {
  Request r = SmallRequest(kFused);
  r.sequences = {};
  r.spec.batch = int64_t{1} << 40;
  r.spec.max_seqlen_q = r.spec.max_seqlen_kv = 1;
  for (int i = 0; i < 3; ++i) r.View(i).strides[0] = 0;
  EXPECT_EQ(r.Resolve().status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace attnd::testing
