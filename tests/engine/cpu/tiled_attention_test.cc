// The tiled path against the plain loop, over random problems of every kind.
#include "engine/cpu/tiled_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/attention_case.h"

namespace attnd::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kRandomProblems = 30;  // Sanitizers make them many times slower.
#else
constexpr uint64_t kRandomProblems = 150;
#endif

double Tolerance(const CaseOptions& options) {
  const DType out = options.out_dtype.value_or(options.dtype);
  if (options.dtype == DType::kBFloat16) return 1.5e-2;
  if (out == DType::kFloat16) return 2e-3;
  return 1e-6 * std::sqrt(static_cast<double>(std::max<int64_t>(options.d_qk, 1)));
}

void ExpectAgreement(const CaseOptions& options, AttentionBackend& backend) {
  SCOPED_TRACE(Describe(options));
  const AttentionCase test(options);
  ReferenceBackend reference;
  const Output expected = test.Run(reference);
  const Output actual = test.Run(backend);
  EXPECT_LT(RelativeRms(actual.out, expected.out), Tolerance(options));
  EXPECT_LT(MaxDifference(actual.lse, expected.lse), 1e-4);
  // Rows that see nothing, or belong to nobody, are exact.
  for (size_t k = 0; k < expected.out.size(); ++k) {
    if (expected.out[k] != 0) continue;
    EXPECT_EQ(actual.out[k], 0) << k;
  }
}

class Backends : public ::testing::Test {
 protected:
  CpuBackend backend_{2};
};

using TiledAttention = Backends;

TEST_F(TiledAttention, AgreesOnMasksOfAllSmallShapes) {
  for (const auto& [left, right] : std::vector<std::pair<int, int>>{
           {-1, -1}, {-1, 0}, {0, 0}, {1, 0}, {2, 1}, {0, -1}, {-1, 2}}) {
    for (const bool bottom_right : {false, true}) {
      for (int64_t s_q = 1; s_q <= 5; ++s_q) {
        for (int64_t s_kv = 1; s_kv <= 5; ++s_kv) {
          CaseOptions options;
          options.lengths = {{s_q, s_kv}};
          if (left >= 0) options.mask.left = left;
          if (right >= 0) options.mask.right = right;
          options.mask.bottom_right = bottom_right;
          ExpectAgreement(options, backend_);
        }
      }
    }
  }
}

TEST_F(TiledAttention, AgreesAtTheEdgesOfTiles) {
  const int64_t sizes[] = {1, 64, 65, 256, 257, 600};
  for (const int64_t s_q : sizes) {
    for (const int64_t s_kv : sizes) {
      for (const bool causal : {false, true}) {
        CaseOptions options;
        options.lengths = {{s_q, s_kv}};
        options.d_qk = options.d_v = 4;
        if (causal) options.mask = {std::nullopt, 0, true};
        ExpectAgreement(options, backend_);
      }
    }
  }
}

TEST_F(TiledAttention, AgreesWithWindowsThatStartAndEndInsideTiles) {
  for (const auto& [left, right] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {100, 0}, {600, 3}, {5, 600}, {1, 1}}) {
    for (const bool bottom_right : {false, true}) {
      for (const auto& lengths :
           std::vector<std::pair<int64_t, int64_t>>{{900, 900}, {300, 1500}, {1300, 200}}) {
        CaseOptions options;
        options.lengths = {lengths};
        options.mask = {left, right, bottom_right};
        ExpectAgreement(options, backend_);
      }
    }
  }
}

TEST_F(TiledAttention, AgreesOnDecodeWithManyKeys) {
  for (const int64_t kv_len : {1, 511, 1025, 5000}) {
    for (const int64_t group : {1, 4, 7}) {
      for (const int64_t q_len : {1, 2, 17}) {
        CaseOptions options;
        options.lengths = {{q_len, kv_len}, {q_len, kv_len / 2}};
        options.heads = 2 * group;
        options.kv_heads = 2;
        options.d_qk = options.d_v = 8;
        options.mask = {std::nullopt, 0, true};
        ExpectAgreement(options, backend_);
      }
    }
  }
}

TEST_F(TiledAttention, AgreesOnEveryHeadDimension) {
  for (int64_t d = 1; d <= 40; ++d) {
    CaseOptions options;
    options.lengths = {{9, 33}};
    options.d_qk = d;
    options.d_v = 41 - d;
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      options.dtype = dtype;
      ExpectAgreement(options, backend_);
    }
  }
  CaseOptions wide;
  wide.lengths = {{3, 20}};
  wide.d_qk = 1000;
  wide.d_v = 1;
  ExpectAgreement(wide, backend_);
}

TEST_F(TiledAttention, AgreesOnRandomProblems) {
  std::mt19937_64 random(2024);
  const auto pick = [&](std::initializer_list<int64_t> choices) {
    return *(choices.begin() + static_cast<int64_t>(random() % choices.size()));
  };
  for (uint64_t seed = 1; seed <= kRandomProblems; ++seed) {
    CaseOptions options;
    options.seed = seed;
    options.dtype = static_cast<DType>(pick({1, 2, 3}));
    if (random() % 4 == 0) options.out_dtype = DType::kFloat32;
    options.q_format = static_cast<Format>(random() % 4);
    options.kv_format = static_cast<Format>(random() % 4);
    options.kv_heads = pick({1, 2, 3});
    options.heads = options.kv_heads * pick({1, 2, 3, 5});
    options.d_qk = pick({1, 3, 8, 16, 64});
    options.d_v = pick({1, 5, 8, 32, 64});
    options.dim_stride = pick({1, 1, 1, 2});
    options.extra_rows = pick({0, 0, 1, 3, 70});
    options.page_size = options.kv_format == Format::kThd ? 0 : pick({0, 0, 1, 3, 16, 700});
    options.lengths.clear();
    for (int64_t b = pick({1, 2, 4}); b > 0; --b) {
      options.lengths.emplace_back(pick({0, 1, 2, 30, 130, 290}), pick({0, 1, 3, 60, 520, 1200}));
    }
    if (random() % 2 == 0) options.mask.left = pick({0, 1, 7, 100, 600});
    if (random() % 2 == 0) options.mask.right = pick({0, 0, 1, 9, 300});
    options.mask.bottom_right = random() % 2 == 0;
    if (random() % 4 == 0) options.softcap = static_cast<double>(pick({1, 10, 50}));
    if (random() % 4 == 0) options.scale = pick({-1, 0, 1}) * 0.3;
    options.batch_invariant = random() % 4 == 0;
    ExpectAgreement(options, backend_);
  }
}

TEST_F(TiledAttention, GivesTheSameBitsOnAnyTeam) {
  for (const bool decode : {false, true}) {
    CaseOptions options;
    options.lengths = decode ? std::vector<std::pair<int64_t, int64_t>>{{1, 4000}, {1, 1}}
                             : std::vector<std::pair<int64_t, int64_t>>{{500, 900}, {0, 3}};
    options.heads = 4;
    options.kv_heads = 2;
    options.extra_rows = 5;
    options.mask = {std::nullopt, 0, true};
    const AttentionCase test(options);
    CpuBackend one(1);
    const Output expected = test.Run(one);
    for (const int threads : {1, 2, 3, 5}) {
      CpuBackend team(threads);
      for (int repeat = 0; repeat < 3; ++repeat) {
        const Output actual = test.Run(team);
        EXPECT_EQ(actual.out, expected.out);
        EXPECT_EQ(actual.lse, expected.lse);
      }
    }
  }
}

TEST_F(TiledAttention, GivesASequenceTheSameBitsInAnyBatchWhereAsked) {
  CaseOptions options;
  options.lengths = {{3, 3000}};
  options.heads = options.kv_heads = 2;
  options.batch_invariant = true;
  options.seed = 5;
  const AttentionCase alone(options);
  options.lengths = {{3, 3000}, {90, 40}, {1, 1}, {7, 2000}, {0, 9}, {200, 100}};
  AttentionCase batched(options);
  const auto copy = [&](const TensorView& from, const TensorView& to, int64_t rows, int64_t dim) {
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t n = 0; n < 2; ++n) {
        for (int64_t c = 0; c < dim; ++c) {
          batched.Set(to, 0, j, n, c, alone.Get(from, 0, j, n, c));
        }
      }
    }
  };
  copy(alone.problem().q, batched.problem().q, 3, options.d_qk);
  copy(alone.problem().k, batched.problem().k, 3000, options.d_qk);
  copy(alone.problem().v, batched.problem().v, 3000, options.d_v);
  const Output expected = alone.Run(backend_);
  const Output actual = batched.Run(backend_);
  for (int64_t j = 0; j < 3; ++j) {
    for (int64_t n = 0; n < 2; ++n) {
      for (int64_t c = 0; c < options.d_v; ++c) {
        EXPECT_EQ(actual.out[static_cast<size_t>(batched.OutIndex(0, j, n, c))],
                  expected.out[static_cast<size_t>(alone.OutIndex(0, j, n, c))]);
      }
      EXPECT_EQ(actual.lse[static_cast<size_t>(batched.LseIndex(0, j, n))],
                expected.lse[static_cast<size_t>(alone.LseIndex(0, j, n))]);
    }
  }
}

TEST_F(TiledAttention, WritesNoLseWhereNoneIsWanted) {
  CaseOptions options;
  options.lengths = {{3, 2000}, {2, 0}, {0, 1}};
  options.extra_rows = 2;
  const AttentionCase test(options);
  EXPECT_EQ(test.Run(backend_, /*want_lse=*/false).out, test.Run(backend_).out);
}

}  // namespace
}  // namespace attnd::testing
