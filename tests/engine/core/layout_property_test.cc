// The views that Resolve returns, against an independent packer: every element is where the view
// says, once.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "engine/core/layout.h"
#include "tests/conformance/pack.h"

namespace attnd::testing {
namespace {

int64_t Draw(std::mt19937& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// `dense`: every sequence fills its axis, and token buffers have no gaps and no tail.
Geometry RandomGeometry(std::mt19937& random, bool dense) {
  Geometry g{.batch = Draw(random, 1, 4)};
  g.g = Draw(random, 1, 3);
  g.h = g.g * Draw(random, 1, 3);
  g.d_qk = Draw(random, 1, 9);
  g.d_v = Draw(random, 0, 1) ? g.d_qk : Draw(random, 1, 9);
  g.s_q = Draw(random, 1, 7);
  g.s_kv = Draw(random, 1, 7);
  g.has_lengths = !dense;
  g.has_gaps = !dense && Draw(random, 0, 1);
  auto fill = [&](int64_t axis, std::vector<int64_t>& lens, std::vector<int64_t>& rows,
                  int64_t& tokens) {
    tokens = g.has_gaps ? Draw(random, 0, 2) : 0;
    for (int64_t i = 0; i < g.batch; ++i) {
      lens.push_back(dense ? axis : Draw(random, 0, axis));
      rows.push_back(tokens);
      tokens += lens.back() + (g.has_gaps ? Draw(random, 0, 2) : 0);
    }
    rows.push_back(tokens);
    if (!dense) tokens += Draw(random, 0, 2);
  };
  fill(g.s_q, g.q_len, g.q_row, g.t_q);
  fill(g.s_kv, g.kv_len, g.kv_row, g.t_kv);
  if (Draw(random, 0, 1)) {  // What layouts that pack Q need.
    g.h = Draw(random, 0, 1) ? g.g : g.h;
    g.s_kv = g.s_q, g.kv_len = g.q_len, g.kv_row = g.q_row, g.t_kv = g.t_q;
  }
  return g;
}

// Every element has a value of its own.
std::array<std::vector<float>, 3> NumberedTensors(const Geometry& g) {
  auto sum = [](const std::vector<int64_t>& lens) {
    return std::accumulate(lens.begin(), lens.end(), int64_t{0});
  };
  std::array<std::vector<float>, 3> tensors;
  tensors[0].resize(sum(g.q_len) * g.h * g.d_qk);
  tensors[1].resize(sum(g.kv_len) * g.g * g.d_qk);
  tensors[2].resize(sum(g.kv_len) * g.g * g.d_v);
  float next = 1;
  for (auto& tensor : tensors) {
    for (float& value : tensor) value = next++;
  }
  return tensors;
}

// An element of a logical tensor; `row` is where its sequence starts in a token buffer.
struct Element {
  int64_t sequence, row, j, head, component;
};

// Its index in the buffer, by the formula in engine/core/tensor_view.h.
int64_t Follow(const TensorView& view, const AttentionProblem& p,
               const std::vector<int32_t>* page_table, const Element& e) {
  int64_t start =
      e.sequence * view.strides.batch + e.row * view.start_multiplier + e.j * view.strides.seq;
  if (page_table != nullptr) {
    const int64_t page = page_table->at(e.sequence * p.pages_per_sequence + e.j / p.page_size);
    start = page * view.strides.batch + e.j % p.page_size * view.strides.seq;
  }
  return view.byte_offset / SizeOf(DType::kFloat32) + start + view.HeadStart(e.head) +
         e.component * view.strides.dim;
}

class LayoutProperty : public ::testing::TestWithParam<Arrangement> {
 protected:
  // Checks one packed problem. Counts how often the views reach each element.
  void Check(const Geometry& g, uint64_t seed) {
    const Arrangement& a = GetParam();
    const auto tensors = NumberedTensors(g);
    LogicalTensors logical{DType::kFloat32, {}};
    for (int t = 0; t < 3; ++t) logical.qkv[t] = std::as_bytes(std::span(tensors[t]));
    const PackedRequest request = Pack(a, g, logical, {seed % 2 == 0, seed});
    const auto p = Resolve(request.spec, request.sequences, request.inputs);
    ASSERT_TRUE(p.ok()) << a.name << ": " << p.status();
    ASSERT_EQ(p->sequences.size(), static_cast<size_t>(g.batch));
    const bool dense = !g.has_lengths;
    std::array<std::vector<int>, kNumInputBuffers> reached;
    for (int b = 0; b < kNumInputBuffers; ++b) reached[b].resize(request.buffers[b].size() / 4);
    CheckTensor(p->q, *p, nullptr, tensors[0], request, reached);
    const bool paged = a.IsPaged();
    CheckTensor(p->k, *p, paged ? &request.page_table_k : nullptr, tensors[1], request, reached);
    CheckTensor(p->v, *p, paged ? &request.page_table_v : nullptr, tensors[2], request, reached);
    for (int b = 0; b < kNumInputBuffers; ++b) {
      for (size_t index = 0; index < reached[b].size(); ++index) {
        const bool filler = std::isnan(
            LoadElement(DType::kFloat32, request.buffers[b].data(), static_cast<int64_t>(index)));
        EXPECT_EQ(reached[b][index], filler ? 0 : 1) << a.name << " buffer " << b << " " << index;
        EXPECT_FALSE(filler && dense && !paged && index >= static_cast<size_t>(a.lead));
      }
    }
    CheckOutputs(g, *p);
  }

  void CheckTensor(const TensorView& view, const AttentionProblem& p,
                   const std::vector<int32_t>* page_table, const std::vector<float>& tensor,
                   const PackedRequest& request,
                   std::array<std::vector<int>, kNumInputBuffers>& reached) {
    const bool is_q = &view == &p.q;
    const int64_t heads = is_q ? p.num_heads : p.num_kv_heads;
    const int64_t dims = &view == &p.v ? p.head_dim_v : p.head_dim_qk;
    const std::vector<std::byte>& buffer = request.buffers[static_cast<int>(view.buffer)];
    size_t next = 0;
    for (int64_t i = 0; i < p.batch; ++i) {
      const SequenceExtent& s = p.sequences[i];
      const int64_t length = is_q ? s.q_len : s.kv_len, row = is_q ? s.q_row : s.kv_row;
      for (int64_t j = 0; j < length; ++j) {
        for (int64_t n = 0; n < heads; ++n) {
          for (int64_t c = 0; c < dims; ++c) {
            const int64_t index = Follow(view, p, page_table, {i, row, j, n, c});
            ++reached[static_cast<int>(view.buffer)].at(index);
            EXPECT_EQ(LoadElement(DType::kFloat32, buffer.data(), index), tensor.at(next++));
          }
        }
      }
    }
    EXPECT_EQ(next, tensor.size());
  }

  void CheckOutputs(const Geometry& g, const AttentionProblem& p) {
    const Arrangement& a = GetParam();
    EXPECT_EQ(p.out_desc.shape, OutShape(a, g));
    EXPECT_EQ(p.lse_desc.shape, LseShape(a, g));
    std::vector<int> out(*NumElements(p.out_desc.shape)), lse(*NumElements(p.lse_desc.shape));
    for (int64_t i = 0; i < g.batch; ++i) {
      for (int64_t j = 0; j < g.q_len[i]; ++j) {
        for (int64_t n = 0; n < g.h; ++n) {
          const int64_t row = p.sequences[i].q_row;
          const int64_t stat = i * p.lse.batch + (row + j) * p.lse.seq + n * p.lse.head;
          EXPECT_EQ(stat, LseIndex(a, g, {i, j, n}));
          ++lse.at(stat);
          for (int64_t c = 0; c < g.d_v; ++c) {
            const int64_t index = Follow(p.out, p, nullptr, {i, row, j, n, c});
            EXPECT_EQ(index, OutIndex(a, g, {i, j, n, c}));
            ++out.at(index);
          }
        }
      }
    }
    const int least = g.has_lengths ? 0 : 1;
    for (int count : out) EXPECT_TRUE(count >= least && count <= 1) << count;
    for (int count : lse) EXPECT_TRUE(count >= least && count <= 1) << count;
  }
};

TEST_P(LayoutProperty, EveryElementIsReachedOnce) {
  std::mt19937 random(static_cast<uint32_t>(std::hash<std::string_view>()(GetParam().name)));
  int checked = 0;
  for (int trial = 0; trial < 400 && checked < 30; ++trial) {
    const Geometry g = RandomGeometry(random, trial % 2 == 0);
    if (!CanHold(GetParam(), g)) continue;
    Check(g, trial);
    ++checked;
  }
  EXPECT_EQ(checked, 30);
}

INSTANTIATE_TEST_SUITE_P(Arrangements, LayoutProperty,
                         ::testing::ValuesIn(AllArrangements().begin(), AllArrangements().end()),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace attnd::testing
