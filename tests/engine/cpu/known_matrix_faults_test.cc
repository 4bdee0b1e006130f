// Faults that show where everything is combined: all layouts on the same numbers, all masks on
// small lengths.
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "engine/core/layout.h"
#include "tests/engine/cpu/known_faults.h"

namespace attnd::testing {
namespace {

TEST_P(KnownFaults, EveryLayoutGivesTheSame) {
  const Geometry packed = GeometryOf({{3, 3}, {3, 3}}, {.h = 3, .g = 3});
  const Geometry separate = GeometryOf({{3, 3}, {3, 3}}, {.h = 4, .g = 2, .d_v = 16});
  const Geometry grouped = GeometryOf({{3, 3}, {3, 3}}, {.h = 4, .g = 2, .d_qk = 16, .d_v = 16});
  int runs = 0;
  for (const Geometry& g : {packed, separate, grouped}) {
    LogicalCase c(g);
    c.spec.causal = Causal::kTopLeft;
    const LogicalAnswer want = c.Run(backend(), Layout::kBshdBshdBshd);
    for (const Arrangement& a : AllArrangements()) {
      if (a.IsPaged() || !CanHold(a, g)) continue;
      EXPECT_LT(Distance(c.Run(backend(), a), want), kClose) << a.name;
      ++runs;
    }
  }
  EXPECT_GE(runs, 20 + 8 + 14);  // The named layouts that can hold it, and STRIDED ones.
}

// The mask, of rows i and keys j of sequences of these lengths.
bool IsVisible(const GoldenCase& c, int64_t i, int64_t j) {
  const int64_t shift = c.geometry.kv_len[0] - c.geometry.q_len[0];
  const bool bottom_right = c.causal == Causal::kBottomRight ||
                            (c.causal == Causal::kNone && c.alignment == Alignment::kBottomRight);
  const int64_t diagonal = i + (bottom_right ? shift : 0);
  if (c.causal != Causal::kNone && j > diagonal) return false;
  if (c.window_left && *c.window_left >= 0 && j < diagonal - *c.window_left) return false;
  return !c.window_right || *c.window_right < 0 || j <= diagonal + *c.window_right;
}

// With Q = 0 a row's LSE is the logarithm of how many keys it sees, and its O their V's mean.
void ExpectMask(AttentionBackend& backend, const LogicalCase& c) {
  const LogicalAnswer answer = c.Run(backend, Layout::kBshdBshdBshd);
  for (int64_t i = 0; i < c.spec.geometry.q_len[0]; ++i) {
    double count = 0, sum = 0;
    for (int64_t j = 0; j < c.spec.geometry.kv_len[0]; ++j) {
      if (!IsVisible(c.spec, i, j)) continue;
      ++count;
      sum += c.qkv[2][c.At(2, 0, j, 0, 0)];
    }
    const auto row = static_cast<size_t>(i);
    if (count > 0) {
      ASSERT_NEAR(answer.lse[row], std::log(count), 1e-6);
    } else {
      ASSERT_EQ(answer.lse[row], std::log(0.0f));
    }
    ASSERT_NEAR(answer.out[row * 8], count > 0 ? sum / count : 0, 1e-6);
  }
}

class KnownMaskFaults : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {};

TEST_P(KnownMaskFaults, EveryMaskShowsItsKeys) {
  const auto& [name, s_q] = GetParam();
  const std::unique_ptr<AttentionBackend> backend = MakeBackend(name);
  const std::pair<int64_t, int64_t> windows[] = {{-1, -1}, {0, 0}, {1, 0}, {2, 1}};
  for (int64_t s_kv = 1; s_kv <= 5; ++s_kv) {
    for (const bool padded : {false, true}) {  // A second sequence, longer on both sides.
      std::vector<std::pair<int64_t, int64_t>> lengths = {{s_q, s_kv}};
      if (padded) lengths.emplace_back(6, 7);
      LogicalCase c(GeometryOf(lengths, {}));
      std::fill(c.qkv[0].begin(), c.qkv[0].end(), 0.0f);
      for (const Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
        for (const auto& [left, right] : windows) {
          for (const Alignment alignment : {Alignment::kTopLeft, Alignment::kBottomRight}) {
            const bool has_window = left >= 0;
            if (causal != Causal::kNone && right > 0) continue;  // Causal forces right 0.
            c.spec.causal = causal;
            c.spec.window_left = has_window ? std::optional(left) : std::nullopt;
            c.spec.window_right = has_window ? std::optional(right) : std::nullopt;
            const bool aligned = causal == Causal::kNone && has_window;
            c.spec.alignment = aligned ? alignment : Alignment::kUnspecified;
            ASSERT_NO_FATAL_FAILURE(ExpectMask(*backend, c))
                << s_kv << " " << padded << " " << static_cast<int>(causal) << " " << left << " "
                << right << " " << static_cast<int>(alignment);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, KnownMaskFaults,
                         ::testing::Combine(::testing::Values("cpu", "reference"),
                                            ::testing::Range<int64_t>(1, 6)),
                         [](const auto& param) {
                           return std::get<0>(param.param) + "_" +
                                  std::to_string(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace attnd::testing
