// Problems for tests of the GPU room, straight from the packer of the conformance suite.
#pragma once

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "engine/core/layout.h"
#include "tests/conformance/pack.h"

namespace attnd::testing {

// A THD geometry whose sequences follow one another, or a dense one of which they fill a part.
inline Geometry LengthsOf(std::vector<int64_t> q_len, std::vector<int64_t> kv_len, int64_t s_q,
                          int64_t s_kv) {
  Geometry g;
  g.batch = static_cast<int64_t>(q_len.size());
  g.h = 4;
  g.g = 2;
  g.d_qk = g.d_v = 16;
  g.s_q = s_q;
  g.s_kv = s_kv;
  g.q_row = {0};
  g.kv_row = {0};
  for (int64_t n : q_len) g.q_row.push_back(g.q_row.back() + n);
  for (int64_t n : kv_len) g.kv_row.push_back(g.kv_row.back() + n);
  g.t_q = g.q_row.back();
  g.t_kv = g.kv_row.back();
  for (size_t i = 0; i < q_len.size(); ++i) {
    g.has_lengths |= q_len[i] != s_q || kv_len[i] != s_kv;
  }
  g.q_len = std::move(q_len);
  g.kv_len = std::move(kv_len);
  return g;
}

// All elements 0; `edit` changes the spec before it is resolved.
template <typename Edit>
AttentionProblem ProblemOf(Layout layout, const Geometry& g, Edit edit) {
  std::vector<std::byte> q(g.q_row.back() * g.h * g.d_qk * 2);
  std::vector<std::byte> k(g.kv_row.back() * g.g * g.d_qk * 2);
  std::vector<std::byte> v(g.kv_row.back() * g.g * g.d_v * 2);
  PackedRequest request =
      Pack(ArrangementOf(layout), g, {DType::kBFloat16, {q, k, v}}, {.explicit_sizes = true});
  edit(request.spec);
  auto problem = Resolve(request.spec, request.sequences, request.inputs);
  EXPECT_TRUE(problem.ok()) << problem.status();
  return *std::move(problem);
}

inline AttentionProblem ProblemOf(Layout layout, const Geometry& g) {
  return ProblemOf(layout, g, [](AttentionSpec&) {});
}

}  // namespace attnd::testing
