// Every named layout against numbers written by hand: shapes, offsets, strides.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/core/layout.h"
#include "tests/engine/core/requests.h"

namespace attnd::testing {
namespace {

using Shape = std::vector<int64_t>;

struct Place {
  Buffer buffer;
  int64_t byte_offset;
  Strides strides;
};

struct Row {
  Layout layout;
  std::string_view name;
  std::array<Shape, kNumInputBuffers> shapes;  // qkv, q, kv, k, v
  Place q, k, v;
  Shape out_shape;
  Strides out;
};

constexpr Buffer QKV = Buffer::kQkv, Q = Buffer::kQ, KV = Buffer::kKv, K = Buffer::kK,
                 V = Buffer::kV;

// b = 2, s_q = 4, s_kv = 5, h = 6, d = 8, FLOAT16; t_q = 7, t_kv = 11; g = 3 and d_v = 10 where Q
// (or K) is not packed with V; pages of 4 rows, 6 of K and 7 of V.
const Row kRows[] = {
    {Layout::kSb3hd,
     "SB3HD",
     {{{4, 2, 3, 6, 8}, {}, {}, {}, {}}},
     {QKV, 0, {144, 288, 8, 1}},
     {QKV, 96, {144, 288, 8, 1}},
     {QKV, 192, {144, 288, 8, 1}},
     {4, 2, 6, 8},
     {48, 96, 8, 1}},
    {Layout::kSbh3d,
     "SBH3D",
     {{{4, 2, 6, 3, 8}, {}, {}, {}, {}}},
     {QKV, 0, {144, 288, 24, 1}},
     {QKV, 16, {144, 288, 24, 1}},
     {QKV, 32, {144, 288, 24, 1}},
     {4, 2, 6, 8},
     {48, 96, 8, 1}},
    {Layout::kSbhdSb2hd,
     "SBHD_SB2HD",
     {{{}, {4, 2, 6, 8}, {5, 2, 2, 3, 8}, {}, {}}},
     {Q, 0, {48, 96, 8, 1}},
     {KV, 0, {48, 96, 8, 1}},
     {KV, 48, {48, 96, 8, 1}},
     {4, 2, 6, 8},
     {48, 96, 8, 1}},
    {Layout::kSbhdSbh2d,
     "SBHD_SBH2D",
     {{{}, {4, 2, 6, 8}, {5, 2, 3, 2, 8}, {}, {}}},
     {Q, 0, {48, 96, 8, 1}},
     {KV, 0, {48, 96, 16, 1}},
     {KV, 16, {48, 96, 16, 1}},
     {4, 2, 6, 8},
     {48, 96, 8, 1}},
    {Layout::kSbhdSbhdSbhd,
     "SBHD_SBHD_SBHD",
     {{{}, {4, 2, 6, 8}, {}, {5, 2, 3, 8}, {5, 2, 3, 10}}},
     {Q, 0, {48, 96, 8, 1}},
     {K, 0, {24, 48, 8, 1}},
     {V, 0, {30, 60, 10, 1}},
     {4, 2, 6, 10},
     {60, 120, 10, 1}},
    {Layout::kBs3hd,
     "BS3HD",
     {{{2, 4, 3, 6, 8}, {}, {}, {}, {}}},
     {QKV, 0, {576, 144, 8, 1}},
     {QKV, 96, {576, 144, 8, 1}},
     {QKV, 192, {576, 144, 8, 1}},
     {2, 4, 6, 8},
     {192, 48, 8, 1}},
    {Layout::kBsh3d,
     "BSH3D",
     {{{2, 4, 6, 3, 8}, {}, {}, {}, {}}},
     {QKV, 0, {576, 144, 24, 1}},
     {QKV, 16, {576, 144, 24, 1}},
     {QKV, 32, {576, 144, 24, 1}},
     {2, 4, 6, 8},
     {192, 48, 8, 1}},
    {Layout::kBshdBs2hd,
     "BSHD_BS2HD",
     {{{}, {2, 4, 6, 8}, {2, 5, 2, 3, 8}, {}, {}}},
     {Q, 0, {192, 48, 8, 1}},
     {KV, 0, {240, 48, 8, 1}},
     {KV, 48, {240, 48, 8, 1}},
     {2, 4, 6, 8},
     {192, 48, 8, 1}},
    {Layout::kBshdBsh2d,
     "BSHD_BSH2D",
     {{{}, {2, 4, 6, 8}, {2, 5, 3, 2, 8}, {}, {}}},
     {Q, 0, {192, 48, 8, 1}},
     {KV, 0, {240, 48, 16, 1}},
     {KV, 16, {240, 48, 16, 1}},
     {2, 4, 6, 8},
     {192, 48, 8, 1}},
    {Layout::kBshdBshdBshd,
     "BSHD_BSHD_BSHD",
     {{{}, {2, 4, 6, 8}, {}, {2, 5, 3, 8}, {2, 5, 3, 10}}},
     {Q, 0, {192, 48, 8, 1}},
     {K, 0, {120, 24, 8, 1}},
     {V, 0, {150, 30, 10, 1}},
     {2, 4, 6, 10},
     {240, 60, 10, 1}},
    {Layout::kT3hd,
     "T3HD",
     {{{7, 3, 6, 8}, {}, {}, {}, {}}},
     {QKV, 0, {0, 144, 8, 1}},
     {QKV, 96, {0, 144, 8, 1}},
     {QKV, 192, {0, 144, 8, 1}},
     {7, 6, 8},
     {0, 48, 8, 1}},
    {Layout::kTh3d,
     "TH3D",
     {{{7, 6, 3, 8}, {}, {}, {}, {}}},
     {QKV, 0, {0, 144, 24, 1}},
     {QKV, 16, {0, 144, 24, 1}},
     {QKV, 32, {0, 144, 24, 1}},
     {7, 6, 8},
     {0, 48, 8, 1}},
    {Layout::kThdT2hd,
     "THD_T2HD",
     {{{}, {7, 6, 8}, {11, 2, 3, 8}, {}, {}}},
     {Q, 0, {0, 48, 8, 1}},
     {KV, 0, {0, 48, 8, 1}},
     {KV, 48, {0, 48, 8, 1}},
     {7, 6, 8},
     {0, 48, 8, 1}},
    {Layout::kThdTh2d,
     "THD_TH2D",
     {{{}, {7, 6, 8}, {11, 3, 2, 8}, {}, {}}},
     {Q, 0, {0, 48, 8, 1}},
     {KV, 0, {0, 48, 16, 1}},
     {KV, 16, {0, 48, 16, 1}},
     {7, 6, 8},
     {0, 48, 8, 1}},
    {Layout::kThdThdThd,
     "THD_THD_THD",
     {{{}, {7, 6, 8}, {}, {11, 3, 8}, {11, 3, 10}}},
     {Q, 0, {0, 48, 8, 1}},
     {K, 0, {0, 24, 8, 1}},
     {V, 0, {0, 30, 10, 1}},
     {7, 6, 10},
     {0, 60, 10, 1}},
    {Layout::kSbhdBshdBshd,
     "SBHD_BSHD_BSHD",
     {{{}, {4, 2, 6, 8}, {}, {2, 5, 3, 8}, {2, 5, 3, 10}}},
     {Q, 0, {48, 96, 8, 1}},
     {K, 0, {120, 24, 8, 1}},
     {V, 0, {150, 30, 10, 1}},
     {4, 2, 6, 10},
     {60, 120, 10, 1}},
    {Layout::kBshdSbhdSbhd,
     "BSHD_SBHD_SBHD",
     {{{}, {2, 4, 6, 8}, {}, {5, 2, 3, 8}, {5, 2, 3, 10}}},
     {Q, 0, {192, 48, 8, 1}},
     {K, 0, {24, 48, 8, 1}},
     {V, 0, {30, 60, 10, 1}},
     {2, 4, 6, 10},
     {240, 60, 10, 1}},
    {Layout::kThdBshdBshd,
     "THD_BSHD_BSHD",
     {{{}, {7, 6, 8}, {}, {2, 5, 3, 8}, {2, 5, 3, 10}}},
     {Q, 0, {0, 48, 8, 1}},
     {K, 0, {120, 24, 8, 1}},
     {V, 0, {150, 30, 10, 1}},
     {7, 6, 10},
     {0, 60, 10, 1}},
    {Layout::kThdSbhdSbhd,
     "THD_SBHD_SBHD",
     {{{}, {7, 6, 8}, {}, {5, 2, 3, 8}, {5, 2, 3, 10}}},
     {Q, 0, {0, 48, 8, 1}},
     {K, 0, {24, 48, 8, 1}},
     {V, 0, {30, 60, 10, 1}},
     {7, 6, 10},
     {0, 60, 10, 1}},
    {Layout::kPagedKvBshdBshdBshd,
     "PAGED_KV_BSHD_BSHD_BSHD",
     {{{}, {2, 4, 6, 8}, {}, {6, 4, 3, 8}, {7, 4, 3, 10}}},
     {Q, 0, {192, 48, 8, 1}},
     {K, 0, {96, 24, 8, 1}},
     {V, 0, {120, 30, 10, 1}},
     {2, 4, 6, 10},
     {240, 60, 10, 1}},
    {Layout::kPagedKvBshdSbhdSbhd,
     "PAGED_KV_BSHD_SBHD_SBHD",
     {{{}, {2, 4, 6, 8}, {}, {4, 6, 3, 8}, {4, 7, 3, 10}}},
     {Q, 0, {192, 48, 8, 1}},
     {K, 0, {24, 144, 8, 1}},
     {V, 0, {30, 210, 10, 1}},
     {2, 4, 6, 10},
     {240, 60, 10, 1}},
    {Layout::kPagedKvSbhdBshdBshd,
     "PAGED_KV_SBHD_BSHD_BSHD",
     {{{}, {4, 2, 6, 8}, {}, {6, 4, 3, 8}, {7, 4, 3, 10}}},
     {Q, 0, {48, 96, 8, 1}},
     {K, 0, {96, 24, 8, 1}},
     {V, 0, {120, 30, 10, 1}},
     {4, 2, 6, 10},
     {60, 120, 10, 1}},
    {Layout::kPagedKvSbhdSbhdSbhd,
     "PAGED_KV_SBHD_SBHD_SBHD",
     {{{}, {4, 2, 6, 8}, {}, {4, 6, 3, 8}, {4, 7, 3, 10}}},
     {Q, 0, {48, 96, 8, 1}},
     {K, 0, {24, 144, 8, 1}},
     {V, 0, {30, 210, 10, 1}},
     {4, 2, 6, 10},
     {60, 120, 10, 1}},
    {Layout::kPagedKvThdBshdBshd,
     "PAGED_KV_THD_BSHD_BSHD",
     {{{}, {7, 6, 8}, {}, {6, 4, 3, 8}, {7, 4, 3, 10}}},
     {Q, 0, {0, 48, 8, 1}},
     {K, 0, {96, 24, 8, 1}},
     {V, 0, {120, 30, 10, 1}},
     {7, 6, 10},
     {0, 60, 10, 1}},
    {Layout::kPagedKvThdSbhdSbhd,
     "PAGED_KV_THD_SBHD_SBHD",
     {{{}, {7, 6, 8}, {}, {4, 6, 3, 8}, {4, 7, 3, 10}}},
     {Q, 0, {0, 48, 8, 1}},
     {K, 0, {24, 144, 8, 1}},
     {V, 0, {30, 210, 10, 1}},
     {7, 6, 10},
     {0, 60, 10, 1}},
    {Layout::kBhsdBhsdBhsd,
     "BHSD_BHSD_BHSD",
     {{{}, {2, 6, 4, 8}, {}, {2, 3, 5, 8}, {2, 3, 5, 10}}},
     {Q, 0, {192, 8, 32, 1}},
     {K, 0, {120, 8, 40, 1}},
     {V, 0, {150, 10, 50, 1}},
     {2, 6, 4, 10},
     {240, 10, 40, 1}},
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

class LayoutTable : public ::testing::TestWithParam<Row> {
 protected:
  static bool IsPaged(const Row& row) { return row.name.rfind("PAGED", 0) == 0; }

  Request MakeRequest(const Row& row) {
    Request r;
    r.spec.layout = row.layout;
    r.spec.dtype = DType::kFloat16;
    for (int i = 0; i < kNumInputBuffers; ++i) {
      if (row.shapes[i].empty()) continue;
      r.inputs.buffers[i] = TensorDesc{DType::kFloat16, row.shapes[i]};
    }
    const bool q_is_thd = row.out_shape.size() == 3;
    if (!q_is_thd && !IsPaged(row)) return r;
    r.sequences.cu_seqlens_q = {0, 3, 7};
    r.sequences.cu_seqlens_kv = {0, 5, 9};
    if (!row.shapes[0].empty()) r.sequences.cu_seqlens_kv = {0, 3, 7};
    if (!IsPaged(row)) return r;
    r.sequences.page_table_k = r.sequences.page_table_v = TensorDesc{DType::kInt32, {2, 2}};
    return r;
  }
};

void ExpectPlace(const TensorView& view, const Place& place, bool is_thd, const char* name) {
  EXPECT_EQ(view.buffer, place.buffer) << name;
  EXPECT_EQ(view.byte_offset, place.byte_offset) << name;
  EXPECT_EQ(view.strides.batch, place.strides.batch) << name;
  EXPECT_EQ(view.strides.seq, place.strides.seq) << name;
  EXPECT_EQ(view.strides.head, place.strides.head) << name;
  EXPECT_EQ(view.strides.dim, place.strides.dim) << name;
  EXPECT_EQ(view.start_multiplier, is_thd ? place.strides.seq : 0) << name;
}

TEST_P(LayoutTable, HasTheOffsetsAndStridesOfItsName) {
  const Row& row = GetParam();
  EXPECT_EQ(Name(row.layout), row.name);
  const auto p = MakeRequest(row).Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  const bool q_is_thd = row.out_shape.size() == 3;
  const bool kv_is_thd = q_is_thd && row.k.strides.batch == 0;
  EXPECT_EQ(p->q_is_thd, q_is_thd);
  EXPECT_EQ(p->kv_is_thd, kv_is_thd);
  ExpectPlace(p->q, row.q, q_is_thd, "q");
  ExpectPlace(p->k, row.k, kv_is_thd, "k");
  ExpectPlace(p->v, row.v, kv_is_thd, "v");
  ExpectPlace(p->out, {Buffer::kOut, 0, row.out}, q_is_thd, "out");
  EXPECT_EQ(p->out_desc, (TensorDesc{DType::kFloat16, row.out_shape}));
  if (q_is_thd) {
    EXPECT_EQ(p->lse_desc, (TensorDesc{DType::kFloat32, {7, 6}}));
    EXPECT_EQ(p->lse, (Strides{0, 6, 1, 0}));
  } else {
    EXPECT_EQ(p->lse_desc, (TensorDesc{DType::kFloat32, {2, 6, 4}}));
    EXPECT_EQ(p->lse, (Strides{24, 1, 4, 0}));
  }
}

TEST_P(LayoutTable, TakesSizesFromTheShapes) {
  const Row& row = GetParam();
  const auto p = MakeRequest(row).Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  const bool packs_q = !row.shapes[0].empty(), packs_v = packs_q || !row.shapes[2].empty();
  EXPECT_EQ(p->batch, 2);
  EXPECT_EQ(p->num_heads, 6);
  EXPECT_EQ(p->num_kv_heads, packs_q ? 6 : 3);
  EXPECT_EQ(p->head_dim_qk, 8);
  EXPECT_EQ(p->head_dim_v, packs_v ? 8 : 10);
  EXPECT_EQ(p->max_seqlen_q, 4);
  EXPECT_EQ(p->max_seqlen_kv, packs_q ? 4 : 5);
  EXPECT_EQ(p->is_paged, IsPaged(row));
  EXPECT_EQ(p->page_size, IsPaged(row) ? 4 : 0);
  EXPECT_EQ(p->pages_per_sequence, IsPaged(row) ? 2 : 0);
  EXPECT_EQ(p->num_pages_k, IsPaged(row) ? 6 : 0);
  EXPECT_EQ(p->num_pages_v, IsPaged(row) ? 7 : 0);
  EXPECT_DOUBLE_EQ(p->scale, 0.35355339059327373);  // 1 / sqrt(8)
  for (int i = 0; i < kNumInputBuffers; ++i) {
    EXPECT_EQ(p->inputs[i].has_value(), !row.shapes[i].empty()) << i;
  }
}

// Plan without inputs: the spec's sizes say what the shapes said.
TEST_P(LayoutTable, DerivesTheSameViewsFromTheSpecAlone) {
  const Row& row = GetParam();
  Request request = MakeRequest(row);
  const auto with = request.Resolve();
  ASSERT_TRUE(with.ok()) << with.status();
  request.spec.batch = with->batch;
  request.spec.max_seqlen_q = with->max_seqlen_q;
  request.spec.max_seqlen_kv = with->max_seqlen_kv;
  request.spec.num_heads = with->num_heads;
  request.spec.num_kv_heads = with->num_kv_heads;
  request.spec.head_dim_qk = with->head_dim_qk;
  request.spec.head_dim_v = with->head_dim_v;
  if (IsPaged(row)) request.spec.page_size = 4;
  const auto explicit_sizes = request.Resolve();
  ASSERT_TRUE(explicit_sizes.ok()) << explicit_sizes.status();
  EXPECT_EQ(explicit_sizes->v, with->v);
  request.inputs = {};
  EXPECT_EQ(request.Resolve().status().code(), absl::StatusCode::kInvalidArgument);
  request.options.derive_missing_shapes = true;
  const auto without = request.Resolve();
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ(without->q, with->q);
  EXPECT_EQ(without->out, with->out);
  EXPECT_EQ(without->sequences, with->sequences);
  if (IsPaged(row)) return;  // A pool's number of pages is not in the spec.
  EXPECT_EQ(without->k, with->k);
  EXPECT_EQ(without->v, with->v);
}

INSTANTIATE_TEST_SUITE_P(Layouts, LayoutTable, ::testing::ValuesIn(kRows),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(Layout, EveryValueIsInTheTable) {
  ASSERT_EQ(std::size(kRows), 26u);
  for (int value = 1; value < kNumLayouts - 1; ++value) {
    const auto layout = static_cast<Layout>(value);
    EXPECT_EQ(std::count_if(std::begin(kRows), std::end(kRows),
                            [&](const Row& row) { return row.layout == layout; }),
              1)
        << value;
    EXPECT_FALSE(LayoutShapes(layout).empty()) << value;
  }
  EXPECT_EQ(Name(Layout::kStrided), "STRIDED");
}

}  // namespace
}  // namespace attnd::testing
