// Packs logical tensors into the buffers of any layout, element by element, without the resolver.
//
// A buffer is written down as its axes, one letter each, in memory order, exactly as the layout's
// name spells them ("bs3hd"). An element's place follows from its coordinate along each axis and
// nothing else, so this file shares no stride, offset or table with the product.
//   b sequence   s row of a dense side    t row of a token buffer   h head   d component
//   3 Q, K or V  2 K or V                 H heads of Q, K and V in a row, h + 2g of them
//   G group of heads, and in it M: its h/g heads of Q, then K and V
//   p page       r row in a page
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "engine/core/attention_spec.h"

namespace attnd::testing {

// Sizes of a logical problem. Sequence i has q_len[i] queries and kv_len[i] keys; in a token buffer
// it starts at row q_row[i] (kv_row[i]).
struct Geometry {
  int64_t batch = 0, h = 0, g = 0, d_qk = 0, d_v = 0;
  int64_t s_q = 0, s_kv = 0;           // Axes of a dense buffer.
  int64_t t_q = 0, t_kv = 0;           // Rows of a token buffer.
  bool has_lengths = false;            // False: every sequence fills its dense axis.
  bool has_gaps = false;               // True: rows are not the running sums of the lengths.
  std::vector<int64_t> q_len, kv_len;  // batch
  std::vector<int64_t> q_row, kv_row;  // batch + 1; the last is an end
};

// One way to lay out Q, K and V: a layout name, or one use of STRIDED.
struct Arrangement {
  Layout layout = Layout::kUnspecified;
  std::string_view name;
  std::array<std::string_view, kNumInputBuffers> axes;  // By Buffer; empty: no such buffer.
  std::string_view out_axes;
  int64_t page_size = 0;  // Paged only.
  int64_t lead = 0;  // Elements in front of the tensors; the buffers are then flat. STRIDED only.

  bool QIsThd() const;
  bool KvIsThd() const;
  bool IsPaged() const { return page_size > 0; }
};

// The 26 names, then the STRIDED ones.
std::span<const Arrangement> AllArrangements();
const Arrangement& ArrangementOf(Layout layout);

// Whether the arrangement can express the sizes (a packed Q needs h = g, equal lengths, ...).
bool CanHold(const Arrangement& arrangement, const Geometry& geometry);

// Elements of q [sum q_len, h, d_qk], k [sum kv_len, g, d_qk], v [sum kv_len, g, d_v], packed.
struct LogicalTensors {
  DType dtype = DType::kUnspecified;
  std::array<std::span<const std::byte>, 3> qkv;
};

// What a client would send. Bytes that belong to no row of a sequence are 0xFF: NaN in every dtype.
struct PackedRequest {
  AttentionSpec spec;  // Layout, dtype, sizes, views; no mask.
  Sequences sequences;
  InputDescs inputs;
  std::array<std::vector<std::byte>, kNumInputBuffers> buffers;
  std::vector<std::byte> bias, softmax_offset;  // Not Pack's.
  // Shuffled. Entries past a sequence's length are garbage.
  std::vector<int32_t> page_table_k, page_table_v;
};

struct PackOptions {
  bool explicit_sizes = false;  // Say in the spec what the shapes say as well.
  uint64_t seed = 0;            // Of the page tables.
};

PackedRequest Pack(const Arrangement& arrangement, const Geometry& geometry,
                   const LogicalTensors& tensors, const PackOptions& options = {});

// Where an element of Q (tensor 0), K (1) or V (2) lies. Not for paged arrangements.
struct ElementPlace {
  Buffer buffer;
  int64_t element;
};
ElementPlace InputPlace(const Arrangement& arrangement, const Geometry& geometry, int tensor,
                        const std::array<int64_t, 4>& sequence_row_head_component);

// Where outputs lie, by the documented formats: O like Q, LSE [b, h, s_q] or [t_q, h].
std::vector<int64_t> OutShape(const Arrangement& arrangement, const Geometry& geometry);
std::vector<int64_t> LseShape(const Arrangement& arrangement, const Geometry& geometry);
int64_t OutIndex(const Arrangement& arrangement, const Geometry& geometry,
                 const std::array<int64_t, 4>& sequence_row_head_component);
int64_t LseIndex(const Arrangement& arrangement, const Geometry& geometry,
                 const std::array<int64_t, 3>& sequence_row_head);

}  // namespace attnd::testing
