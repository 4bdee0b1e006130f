#include "engine/core/gradient_views.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "engine/core/status.h"

namespace attnd {
namespace {

// FLOAT32, b = 2, s_q = 3, s_kv = 4, h = 4, g = 2, d_qk = d_v = 8, all in one buffer.
AttentionProblem Problem() {
  AttentionProblem p;
  p.dtype = DType::kFloat32;
  p.batch = 2;
  p.max_seqlen_q = 3;
  p.max_seqlen_kv = 4;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim_qk = p.head_dim_v = 8;
  p.sequences = {{3, 4}, {3, 4}};
  p.q = {.buffer = Buffer::kQ, .strides = {96, 32, 8, 1}};
  p.k = {.buffer = Buffer::kK, .strides = {64, 16, 8, 1}};
  p.v = {.buffer = Buffer::kV, .strides = {64, 16, 8, 1}};
  return p;
}

void ExpectRefused(const AttentionProblem& p, std::string_view field) {
  const absl::Status status = CheckGradientViews(p);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_EQ(ErrorField(status), field);
}

TEST(GradientViews, PassesTensorsOfTheirOwn) { EXPECT_TRUE(CheckGradientViews(Problem()).ok()); }

TEST(GradientViews, PassesSlotsThatInterleave) {
  AttentionProblem p = Problem();
  p.k = {.buffer = Buffer::kKv, .byte_offset = 0, .strides = {128, 32, 16, 1}};
  p.v = {.buffer = Buffer::kKv, .byte_offset = 32, .strides = {128, 32, 16, 1}};
  EXPECT_TRUE(CheckGradientViews(p).ok());
  // Rows of K and V by turns, with strides of their own.
  p.k.strides = {128, 32, 8, 1};
  p.v = {.buffer = Buffer::kKv, .byte_offset = 64, .strides = {128, 32, 8, 1}};
  EXPECT_TRUE(CheckGradientViews(p).ok());
  p.v.byte_offset = 60;
  ExpectRefused(p, "spec.views");
}

TEST(GradientViews, RefusesOneElementForManyPlaces) {
  AttentionProblem p = Problem();
  p.k.strides.batch = 0;
  ExpectRefused(p, "spec.views");
  p = Problem();
  p.q.strides.head = 0;
  ExpectRefused(p, "spec.views");
  p = Problem();
  p.v.strides.seq = 15;  // Two heads of 8 in 15.
  ExpectRefused(p, "spec.views");
  p = Problem();
  p.batch = 1;
  p.k.strides.batch = 0;  // Of a single sequence it says nothing.
  p.sequences.resize(1);
  EXPECT_TRUE(CheckGradientViews(p).ok());
}

TEST(GradientViews, RefusesTwoTensorsInOnePlace) {
  AttentionProblem p = Problem();
  p.v = p.k;
  ExpectRefused(p, "spec.views");
  p.v.byte_offset = 4 * 127;  // K's last element.
  ExpectRefused(p, "spec.views");
  p.v.byte_offset = 4 * 128;
  EXPECT_TRUE(CheckGradientViews(p).ok());
}

TEST(GradientViews, IgnoresTensorsWithoutElements) {
  AttentionProblem p = Problem();
  p.max_seqlen_kv = 0;
  p.v = p.k;
  EXPECT_TRUE(CheckGradientViews(p).ok());
}

TEST(GradientViews, TakesTheRowsOfTokenBuffersFromTheSequences) {
  AttentionProblem p = Problem();
  p.q_is_thd = p.kv_is_thd = true;
  p.sequences = {{1, 1, 0, 0}, {2, 3, 1, 2}};  // Rows up to 3 and 5.
  p.q = {.buffer = Buffer::kQkv, .strides = {0, 32, 8, 1}, .start_multiplier = 32};
  p.k = {.buffer = Buffer::kQkv, .byte_offset = 4 * 96, .strides = {0, 16, 8, 1}};
  EXPECT_TRUE(CheckGradientViews(p).ok());
  p.sequences[1].q_row = 2;
  ExpectRefused(p, "spec.views");
}

TEST(GradientViews, RefusesPages) {
  AttentionProblem p = Problem();
  p.is_paged = true;
  ExpectRefused(p, "spec.layout");
}

TEST(GradientViews, HoldsStridesNear2To63) {
  AttentionProblem p = Problem();
  p.batch = 2;
  p.k = {.buffer = Buffer::kKv, .strides = {int64_t{1} << 61, 16, 8, 1}};
  p.v = {
      .buffer = Buffer::kKv, .byte_offset = 4 * 64, .strides = {(int64_t{1} << 61) - 64, 16, 8, 1}};
  EXPECT_FALSE(CheckGradientViews(p).ok());  // V's second sequence meets K's.
  p.v.strides.batch = (int64_t{1} << 61) - 128;
  EXPECT_TRUE(CheckGradientViews(p).ok());
}

// Small views at random against the sets of their elements.
TEST(GradientViews, AgreesWithEnumeration) {
  std::mt19937_64 random(7);
  int passed = 0, refused = 0;
  for (int trial = 0; trial < 20'000; ++trial) {
    AttentionProblem p = Problem();
    const bool has_groups = trial % 2 == 0;
    p.max_seqlen_q = 2, p.max_seqlen_kv = 3, p.num_heads = has_groups ? 4 : 2, p.num_kv_heads = 1;
    p.head_dim_qk = p.head_dim_v = 2;
    std::set<int64_t> used;
    bool apart = true;
    for (TensorView* view : {&p.q, &p.k, &p.v}) {
      const auto pick = [&](int64_t below) {
        return static_cast<int64_t>(random() % static_cast<uint64_t>(below));
      };
      const int64_t start = pick(150);
      *view = {.buffer = Buffer::kQkv,
               .byte_offset = 4 * start,
               .strides = {pick(40), pick(12) + 1, pick(12), pick(4)}};
      const bool is_q = view == &p.q;
      if (is_q && has_groups) {
        view->group_heads = 2;
        view->group_stride = pick(20);
      }
      for (int64_t i = 0; i < 2; ++i) {
        for (int64_t j = 0; j < (is_q ? 2 : 3); ++j) {
          for (int64_t n = 0; n < (is_q ? p.num_heads : 1); ++n) {
            for (int64_t c = 0; c < 2; ++c) {
              const Strides& s = view->strides;
              const int64_t element =
                  start + i * s.batch + j * s.seq + view->HeadStart(n) + c * s.dim;
              apart = used.insert(element).second && apart;
            }
          }
        }
      }
    }
    ASSERT_EQ(CheckGradientViews(p).ok(), apart) << trial;
    (apart ? passed : refused)++;
  }
  EXPECT_GT(passed, 50);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace attnd
