#include "tests/conformance/pack.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

namespace attnd::testing {
namespace {

constexpr Arrangement kArrangements[] = {
    // layout, name, {qkv, q, kv, k, v}, out
    {Layout::kSb3hd, "SB3HD", {"sb3hd"}, "sbhd"},
    {Layout::kSbh3d, "SBH3D", {"sbh3d"}, "sbhd"},
    {Layout::kSbhdSb2hd, "SBHD_SB2HD", {"", "sbhd", "sb2hd"}, "sbhd"},
    {Layout::kSbhdSbh2d, "SBHD_SBH2D", {"", "sbhd", "sbh2d"}, "sbhd"},
    {Layout::kSbhdSbhdSbhd, "SBHD_SBHD_SBHD", {"", "sbhd", "", "sbhd", "sbhd"}, "sbhd"},
    {Layout::kBs3hd, "BS3HD", {"bs3hd"}, "bshd"},
    {Layout::kBsh3d, "BSH3D", {"bsh3d"}, "bshd"},
    {Layout::kBshdBs2hd, "BSHD_BS2HD", {"", "bshd", "bs2hd"}, "bshd"},
    {Layout::kBshdBsh2d, "BSHD_BSH2D", {"", "bshd", "bsh2d"}, "bshd"},
    {Layout::kBshdBshdBshd, "BSHD_BSHD_BSHD", {"", "bshd", "", "bshd", "bshd"}, "bshd"},
    {Layout::kT3hd, "T3HD", {"t3hd"}, "thd"},
    {Layout::kTh3d, "TH3D", {"th3d"}, "thd"},
    {Layout::kThdT2hd, "THD_T2HD", {"", "thd", "t2hd"}, "thd"},
    {Layout::kThdTh2d, "THD_TH2D", {"", "thd", "th2d"}, "thd"},
    {Layout::kThdThdThd, "THD_THD_THD", {"", "thd", "", "thd", "thd"}, "thd"},
    {Layout::kSbhdBshdBshd, "SBHD_BSHD_BSHD", {"", "sbhd", "", "bshd", "bshd"}, "sbhd"},
    {Layout::kBshdSbhdSbhd, "BSHD_SBHD_SBHD", {"", "bshd", "", "sbhd", "sbhd"}, "bshd"},
    {Layout::kThdBshdBshd, "THD_BSHD_BSHD", {"", "thd", "", "bshd", "bshd"}, "thd"},
    {Layout::kThdSbhdSbhd, "THD_SBHD_SBHD", {"", "thd", "", "sbhd", "sbhd"}, "thd"},
    {Layout::kPagedKvBshdBshdBshd,
     "PAGED_KV_BSHD_BSHD_BSHD",
     {"", "bshd", "", "prhd", "prhd"},
     "bshd",
     4},
    {Layout::kPagedKvBshdSbhdSbhd,
     "PAGED_KV_BSHD_SBHD_SBHD",
     {"", "bshd", "", "rphd", "rphd"},
     "bshd",
     4},
    {Layout::kPagedKvSbhdBshdBshd,
     "PAGED_KV_SBHD_BSHD_BSHD",
     {"", "sbhd", "", "prhd", "prhd"},
     "sbhd",
     16},
    {Layout::kPagedKvSbhdSbhdSbhd,
     "PAGED_KV_SBHD_SBHD_SBHD",
     {"", "sbhd", "", "rphd", "rphd"},
     "sbhd",
     16},
    {Layout::kPagedKvThdBshdBshd,
     "PAGED_KV_THD_BSHD_BSHD",
     {"", "thd", "", "prhd", "prhd"},
     "thd",
     1},
    {Layout::kPagedKvThdSbhdSbhd,
     "PAGED_KV_THD_SBHD_SBHD",
     {"", "thd", "", "rphd", "rphd"},
     "thd",
     64},
    {Layout::kBhsdBhsdBhsd, "BHSD_BHSD_BHSD", {"", "bhsd", "", "bhsd", "bhsd"}, "bhsd"},
    // What no name covers.
    {Layout::kStrided, "STRIDED_fused_tokens", {"tHd"}, "thd"},
    {Layout::kStrided, "STRIDED_fused_dense", {"bsHd"}, "bshd"},
    {Layout::kStrided, "STRIDED_groups", {"sbGMd"}, "bshd"},
    {Layout::kStrided, "STRIDED_groups_of_tokens", {"tGMd"}, "thd"},
    {Layout::kStrided, "STRIDED_stacked", {"3bshd"}, "bshd"},
    {Layout::kStrided, "STRIDED_head_major", {"", "htd", "2htd"}, "thd"},
    {Layout::kStrided, "STRIDED_head_major_pages", {"", "bshd", "", "phrd", "phrd"}, "bshd", 8},
    {Layout::kStrided, "STRIDED_pages_of_3", {"", "thd", "", "rhpd", "prhd"}, "thd", 3},
    {Layout::kStrided, "STRIDED_dim_not_last", {"", "bsdh", "", "bdhs", "dbsh"}, "bshd", 0, 1},
    {Layout::kStrided, "STRIDED_mixed", {"", "bhsd", "", "thd", "dth"}, "bshd"},
};

bool Has(std::string_view axes, char axis) { return axes.find(axis) != std::string_view::npos; }

// The buffer that holds tensor 0 (Q), 1 (K) or 2 (V).
Buffer BufferOf(const Arrangement& a, int tensor) {
  if (!a.axes[static_cast<int>(Buffer::kQkv)].empty()) return Buffer::kQkv;
  if (tensor == 0) return Buffer::kQ;
  if (!a.axes[static_cast<int>(Buffer::kKv)].empty()) return Buffer::kKv;
  return tensor == 1 ? Buffer::kK : Buffer::kV;
}

std::string_view AxesOf(const Arrangement& a, int tensor) {
  return a.axes[static_cast<int>(BufferOf(a, tensor))];
}

struct Element {
  int tensor;
  int64_t sequence, row, head, component;
};

struct Pages {
  int64_t size = 0;
  int64_t per_sequence = 0;
  std::array<int64_t, 3> count{};  // By tensor.
  std::array<std::vector<int32_t>, 3> table;
};

// Size of an axis of the buffer that holds `tensor`.
int64_t Extent(char axis, int tensor, const Geometry& g, const Pages& pages) {
  switch (axis) {
    case 'b': return g.batch;
    case 's': return tensor == 0 ? g.s_q : g.s_kv;
    case 't': return tensor == 0 ? g.t_q : g.t_kv;
    case 'h': return tensor == 0 ? g.h : g.g;
    case 'H': return g.h + 2 * g.g;
    case 'G': return g.g;
    case 'M': return g.h / g.g + 2;
    case 'd': return tensor == 2 ? g.d_v : g.d_qk;
    case '3': return 3;
    case '2': return 2;
    case 'p': return pages.count[tensor];
    case 'r': return pages.size;
  }
  return 0;
}

int64_t Coordinate(char axis, const Element& e, const Geometry& g, const Pages& pages) {
  switch (axis) {
    case 'b': return e.sequence;
    case 's': return e.row;
    case 't': return (e.tensor == 0 ? g.q_row : g.kv_row)[e.sequence] + e.row;
    case 'h': return e.head;
    case 'H': return e.head + (e.tensor == 0 ? 0 : e.tensor == 1 ? g.h : g.h + g.g);
    case 'G': return e.tensor == 0 ? e.head / (g.h / g.g) : e.head;
    case 'M': return e.tensor == 0 ? e.head % (g.h / g.g) : g.h / g.g + e.tensor - 1;
    case 'd': return e.component;
    case '3': return e.tensor;
    case '2': return e.tensor - 1;
    case 'p': return pages.table[e.tensor][e.sequence * pages.per_sequence + e.row / pages.size];
    case 'r': return e.row % pages.size;
  }
  return 0;
}

int64_t IndexOf(std::string_view axes, const Element& e, const Geometry& g, const Pages& pages) {
  int64_t index = 0;
  for (char axis : axes) {
    index = index * Extent(axis, e.tensor, g, pages) + Coordinate(axis, e, g, pages);
  }
  return index;
}

std::vector<int64_t> Extents(std::string_view axes, int tensor, const Geometry& g,
                             const Pages& pages) {
  std::vector<int64_t> shape;
  for (char axis : axes) shape.push_back(Extent(axis, tensor, g, pages));
  return shape;
}

int64_t Product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// A pool with some pages that no sequence has, given out in random order.
void DealPages(const Geometry& g, int tensor, std::mt19937_64& random, Pages& pages) {
  std::vector<int64_t> need;
  for (int64_t len : g.kv_len) need.push_back((len + pages.size - 1) / pages.size);
  const int64_t used = std::accumulate(need.begin(), need.end(), int64_t{0});
  pages.count[tensor] = used + 1 + tensor;
  std::vector<int32_t> order(pages.count[tensor]);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const int32_t garbage[] = {-1, std::numeric_limits<int32_t>::max(),
                             static_cast<int32_t>(pages.count[tensor])};
  auto next = order.begin();
  for (int64_t i = 0; i < g.batch; ++i) {
    for (int64_t j = 0; j < pages.per_sequence; ++j) {
      pages.table[tensor].push_back(j < need[i] ? *next++ : garbage[j % 3]);
    }
  }
}

Pages MakePages(const Arrangement& a, const Geometry& g, uint64_t seed) {
  Pages pages;
  if (!a.IsPaged()) return pages;
  pages.size = a.page_size;
  pages.per_sequence = (g.s_kv + a.page_size - 1) / a.page_size + static_cast<int64_t>(seed % 2);
  std::mt19937_64 random(seed);
  DealPages(g, 1, random, pages);
  DealPages(g, 2, random, pages);
  return pages;
}

// The view a client of STRIDED writes: how far the index moves along each axis of the tensor.
RequestedView DescribeView(const Arrangement& a, int tensor, const Geometry& g, const Pages& pages,
                           int64_t element_size) {
  const std::string_view axes = AxesOf(a, tensor);
  RequestedView view{.buffer = BufferOf(a, tensor)};
  int64_t origin = 0;
  const Element first{tensor, 0, 0, 0, 0};
  for (char axis : axes) {
    const bool inner = axis == '3' || axis == '2' || axis == 'H' || axis == 'M';
    origin =
        origin * Extent(axis, tensor, g, pages) + (inner ? Coordinate(axis, first, g, pages) : 0);
  }
  view.byte_offset = (a.lead + origin) * element_size;
  auto stride_of = [&](std::string_view letters) {
    const size_t position = axes.find_first_of(letters);
    return Product(Extents(axes.substr(position + 1), tensor, g, pages));
  };
  if (!Has(axes, 't')) view.strides.push_back(stride_of("bp"));
  view.strides.push_back(stride_of("str"));
  view.strides.push_back(stride_of(tensor == 0 ? "hHM" : "hHG"));
  if (tensor == 0 && Has(axes, 'G')) view.group_stride = stride_of("G");
  view.strides.push_back(stride_of("d"));
  return view;
}

std::vector<int64_t> RunningSum(const std::vector<int64_t>& lens) {
  std::vector<int64_t> sums{0};
  for (int64_t len : lens) sums.push_back(sums.back() + len);
  return sums;
}

void SaySizes(const Geometry& g, AttentionSpec& spec) {
  spec.batch = g.batch;
  spec.max_seqlen_q = g.s_q;
  spec.max_seqlen_kv = g.s_kv;
  spec.num_heads = g.h;
  spec.num_kv_heads = g.g;
  spec.head_dim_qk = g.d_qk;
  spec.head_dim_v = g.d_v;
}

void SaySequences(const Arrangement& a, const Geometry& g, Pages& pages, PackedRequest& request) {
  const bool needed = a.QIsThd() || a.KvIsThd() || a.IsPaged();
  if (needed || g.has_lengths) {
    request.sequences.cu_seqlens_q = RunningSum(g.q_len);
    request.sequences.cu_seqlens_kv = RunningSum(g.kv_len);
  }
  if (g.has_gaps && a.QIsThd()) request.sequences.cu_seqlens_q_padded = g.q_row;
  if (g.has_gaps && a.KvIsThd()) request.sequences.cu_seqlens_kv_padded = g.kv_row;
  if (!a.IsPaged()) return;
  const TensorDesc table{DType::kInt32, {g.batch, pages.per_sequence}};
  request.sequences.page_table_k = table;
  request.sequences.page_table_v = table;
  request.page_table_k = std::move(pages.table[1]);
  request.page_table_v = std::move(pages.table[2]);
}

// A named layout's shape is its axes. STRIDED takes any shape of the right size, but the first
// dimension of a THD side's buffer is its rows.
std::vector<int64_t> DeclaredShape(const Arrangement& a, int tensor, const Geometry& g,
                                   const Pages& pages) {
  const std::string_view axes = AxesOf(a, tensor);
  std::vector<int64_t> shape = Extents(axes, tensor, g, pages);
  if (a.lead > 0) return {a.lead + Product(shape)};
  const size_t rows = axes.find('t');
  if (rows != std::string_view::npos && rows > 0) std::swap(shape[0], shape[rows]);
  return shape;
}

// Copies one logical tensor, element by element, to where the axes say.
void Place(const Arrangement& a, int tensor, const Geometry& g, const Pages& pages,
           const LogicalTensors& tensors, std::vector<std::byte>& buffer) {
  const auto size = static_cast<size_t>(SizeOf(tensors.dtype));
  const std::string_view axes = AxesOf(a, tensor);
  const std::byte* source = tensors.qkv[tensor].data();
  const std::vector<int64_t>& lens = tensor == 0 ? g.q_len : g.kv_len;
  const int64_t heads = Extent('h', tensor, g, pages);
  const int64_t components = Extent('d', tensor, g, pages);
  for (int64_t i = 0; i < g.batch; ++i) {
    for (int64_t j = 0; j < lens[i]; ++j) {
      for (int64_t n = 0; n < heads; ++n) {
        for (int64_t c = 0; c < components; ++c, source += size) {
          const int64_t index = a.lead + IndexOf(axes, {tensor, i, j, n, c}, g, pages);
          std::memcpy(&buffer.at(index * size), source, size);
        }
      }
    }
  }
}

}  // namespace

bool Arrangement::QIsThd() const { return Has(AxesOf(*this, 0), 't'); }
bool Arrangement::KvIsThd() const { return Has(AxesOf(*this, 1), 't'); }

std::span<const Arrangement> AllArrangements() { return kArrangements; }

const Arrangement& ArrangementOf(Layout layout) {
  return *std::find_if(std::begin(kArrangements), std::end(kArrangements),
                       [&](const Arrangement& a) { return a.layout == layout; });
}

bool CanHold(const Arrangement& a, const Geometry& g) {
  const std::string_view qkv = a.axes[static_cast<int>(Buffer::kQkv)];
  const bool one_dim = !qkv.empty() || !a.axes[static_cast<int>(Buffer::kKv)].empty();
  if (one_dim && g.d_qk != g.d_v) return false;
  if (Has(qkv, '3') && g.h != g.g) return false;
  return qkv.empty() ||
         (g.s_q == g.s_kv && g.t_q == g.t_kv && g.q_len == g.kv_len && g.q_row == g.kv_row);
}

PackedRequest Pack(const Arrangement& a, const Geometry& g, const LogicalTensors& tensors,
                   const PackOptions& options) {
  PackedRequest request;
  request.spec.layout = a.layout;
  request.spec.dtype = tensors.dtype;
  Pages pages = MakePages(a, g, options.seed);
  std::array<RequestedView, 3> views;
  for (int tensor = 0; tensor < 3; ++tensor) {
    const auto at = static_cast<int>(BufferOf(a, tensor));
    std::vector<int64_t> shape = DeclaredShape(a, tensor, g, pages);
    request.buffers[at].resize(Product(shape) * SizeOf(tensors.dtype), std::byte{0xFF});
    request.inputs.buffers[at] = TensorDesc{tensors.dtype, std::move(shape)};
    Place(a, tensor, g, pages, tensors, request.buffers[at]);
    views[tensor] = DescribeView(a, tensor, g, pages, SizeOf(tensors.dtype));
  }
  SaySequences(a, g, pages, request);
  if (a.layout == Layout::kStrided) {
    request.spec.views = views;
    if (a.IsPaged()) request.spec.page_size = a.page_size;
  }
  if (options.explicit_sizes || a.layout == Layout::kStrided) SaySizes(g, request.spec);
  return request;
}

ElementPlace InputPlace(const Arrangement& a, const Geometry& g, int tensor,
                        const std::array<int64_t, 4>& at) {
  const Element element{tensor, at[0], at[1], at[2], at[3]};
  return {BufferOf(a, tensor), a.lead + IndexOf(AxesOf(a, tensor), element, g, {})};
}

std::vector<int64_t> OutShape(const Arrangement& a, const Geometry& g) {
  std::vector<int64_t> shape = Extents(a.out_axes, 0, g, {});
  shape.back() = g.d_v;
  return shape;
}

std::vector<int64_t> LseShape(const Arrangement& a, const Geometry& g) {
  return Extents(a.QIsThd() ? "th" : "bhs", 0, g, {});
}

int64_t OutIndex(const Arrangement& a, const Geometry& g, const std::array<int64_t, 4>& at) {
  // O has Q's axes in front of its own last one.
  const std::string_view rows = a.out_axes.substr(0, a.out_axes.size() - 1);
  return IndexOf(rows, {0, at[0], at[1], at[2], 0}, g, {}) * g.d_v + at[3];
}

int64_t LseIndex(const Arrangement& a, const Geometry& g, const std::array<int64_t, 3>& at) {
  return IndexOf(a.QIsThd() ? "th" : "bhs", {0, at[0], at[1], at[2], 0}, g, {});
}

}  // namespace attnd::testing
