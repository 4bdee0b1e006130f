// From a draft to a request: lengths and positions, page tables, and the shapes that follow.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "client/cli/local_check.h"
#include "tests/bench/support_draft.h"

namespace attnd::support {
namespace {

// Products of a query row, a key row and a component: what one problem may cost the reference loop.
constexpr int64_t kMostWork = 4'000'000;
constexpr int64_t kLongest = 200;
// Of a sequence that is not empty; with FP8 the second. Where a row sees one key, the gradient of
// its logit is 0, and what is left of it is what O was rounded by: enough rows must see more.
constexpr int64_t kShortest = 8;
constexpr int64_t kShortestFloat8 = 32;
// The gradient of a sink is one number, which may be near 0 by chance; of so many heads few are.
constexpr int64_t kSinkHeads = 4;
// Lengths for which backends have plans without lengths.
constexpr int64_t kRoundLength = 128;

// What the arrays of one side say.
struct Side {
  std::vector<int64_t> lengths;
  std::vector<int64_t> starts;  // One more than lengths: the last is the end.
  int64_t axis = 0;             // Of a dense buffer; else a bound of the lengths.
};

class Builder {
 public:
  Builder(const Draft& draft, Random& random) : d_(draft), random_(random) {}

  Problem Build() {
    if (d_.form->shared & kEqualDims) d_.dim_v = d_.dim_qk;
    if (d_.form->shared & kEqualHeads) d_.kv_heads = d_.heads;
    if (d_.is_decode && d_.spec.causal() == v1::CAUSAL_TOP_LEFT) {
      d_.spec.set_causal(v1::CAUSAL_BOTTOM_RIGHT);  // Or each row sees one key.
    }
    if (d_.spec.softmax_kind() == v1::SOFTMAX_KIND_LEARNABLE && d_.heads < kSinkHeads) {
      d_.heads *= kSinkHeads;
      d_.kv_heads *= kSinkHeads;
    }
    if (IsFloat8()) shortest_ = kShortestFloat8;
    DrawSides();
    SetSpec();
    SetSequences();
    if (d_.form->is_paged()) SetPages();
    SetInputs();
    SetFeatureTensors();
    p_.q_is_thd = d_.form->q == 'T';
    for (size_t i = 0; i < q_.lengths.size(); ++i) {
      p_.sequences.push_back({q_.lengths[i], kv_.lengths[i], p_.q_is_thd ? q_.starts[i] : 0,
                              d_.form->kv == 'T' ? kv_.starts[i] : 0});
    }
    p_.out_shape = ShapeOfQ(d_.dim_v);
    p_.lse_shape = p_.q_is_thd ? std::vector<int64_t>{q_.starts.back(), d_.heads}
                               : std::vector<int64_t>{d_.batch, d_.heads, q_.axis};
    p_.seed = random_();
    return std::move(p_);
  }

 private:
  v1::AttentionSpec& spec() { return *p_.request.mutable_spec(); }

  int64_t DrawLength() {
    if (OneIn(random_, 3)) return Uniform(random_, shortest_, 2 * shortest_);
    return OneIn(random_, 2) ? Uniform(random_, 2 * shortest_, 64) : Uniform(random_, 65, kLongest);
  }

  void DrawSides() {
    int64_t q = DrawLength(), kv = DrawLength();
    if (OneIn(random_, 4)) q = kv = kRoundLength;
    if (d_.is_decode) q = 1;
    if (d_.form->shared & kOneAxis) kv = q;
    const int64_t row_work = d_.batch * d_.heads * (d_.dim_qk + d_.dim_v);
    while (q * kv * row_work > kMostWork && std::max(q, kv) >= 2 * shortest_) {
      (q > kv ? q : kv) /= 2;
      if (d_.form->shared & kOneAxis) q = kv = std::min(q, kv);
    }
    q_ = DrawSide(q, d_.form->q == 'T', false);
    kv_ = d_.form->shared & kOneAxis ? q_ : DrawSide(kv, d_.form->kv == 'T', d_.form->is_paged());
  }

  Side DrawSide(int64_t longest, bool is_thd, bool is_paged) {
    Side side{.axis = longest};
    const bool varies = is_thd || is_paged || d_.has_lengths;
    const int64_t shortest = std::min(longest, std::max(shortest_, longest / 4));
    int64_t start = is_thd && d_.has_gaps ? Uniform(random_, 0, 3) : 0;
    for (int64_t i = 0; i < d_.batch; ++i) {
      int64_t length = varies ? Uniform(random_, shortest, longest) : longest;
      if (varies && d_.has_empty && OneIn(random_, 2)) length = 0;
      side.lengths.push_back(length);
      side.starts.push_back(start);
      start += length + (is_thd && d_.has_gaps ? Uniform(random_, 0, 9) : 0);
    }
    side.starts.push_back(start);
    return side;
  }

  void SetSpec() {
    spec() = d_.spec;
    spec().set_batch(d_.batch);
    spec().set_max_seqlen_q(q_.axis);
    spec().set_max_seqlen_kv(kv_.axis);
    spec().set_num_heads(d_.heads);
    spec().set_num_kv_heads(d_.kv_heads);
    spec().set_head_dim_qk(d_.dim_qk);
    spec().set_head_dim_v(d_.dim_v);
    if (d_.form->is_paged()) spec().set_page_size(d_.page_size);
    const bool has_diagonal = spec().has_window() || spec().bias_kind() == v1::BIAS_KIND_ALIBI;
    if (spec().causal() == v1::CAUSAL_NONE && has_diagonal) {
      spec().set_window_alignment(OneIn(random_, 2) ? v1::ALIGNMENT_TOP_LEFT
                                                    : v1::ALIGNMENT_BOTTOM_RIGHT);
    }
    if (d_.has_alibi_shard && spec().bias_kind() == v1::BIAS_KIND_ALIBI) {
      const int64_t before = Uniform(random_, 0, 8);
      spec().mutable_alibi()->set_head_offset(before);
      spec().mutable_alibi()->set_total_heads(before + d_.heads + Uniform(random_, 0, 8));
    }
    if (IsFloat8()) SetFp8Scales();
    p_.request.set_out_dtype(d_.out_dtype);
  }

  bool IsFloat8() const { return cli::SizeOf(d_.spec.dtype()) == 1; }

  // Powers of two, so that inputs are as random as their type allows.
  void SetFp8Scales() {
    v1::Fp8Scales& fp8 = *spec().mutable_fp8();
    auto scale = [this] { return static_cast<float>(int64_t{1} << Uniform(random_, 0, 3)); };
    fp8.set_descale_q(1 / scale());
    fp8.set_descale_k(1 / scale());
    fp8.set_descale_v(1 / scale());
    fp8.set_scale_s(128);
    fp8.set_descale_s(1.0F / 128);
    fp8.set_scale_o(4 * scale());
    fp8.set_descale_o(1 / fp8.scale_o());
    fp8.set_descale_d_o(1 / scale());
    fp8.set_scale_d_p(4);
    fp8.set_descale_d_p(0.25F);
    fp8.set_scale_d_q(4 * scale());
    fp8.set_scale_d_k(4 * scale());
    fp8.set_scale_d_v(4 * scale());
  }

  void SetSequences() {
    const Form& form = *d_.form;
    if (form.q != 'T' && form.kv != 'T' && !form.is_paged() && !d_.has_lengths) return;
    v1::Sequences& sequences = *p_.request.mutable_sequences();
    auto set = [this](const Side& side, bool is_thd, auto* cu, auto* padded) {
      int64_t end = 0;
      cu->Add(0);
      for (const int64_t length : side.lengths) cu->Add(end += length);
      if (is_thd && d_.has_gaps) padded->Add(side.starts.begin(), side.starts.end());
    };
    set(q_, form.q == 'T', sequences.mutable_cu_seqlens_q(),
        sequences.mutable_cu_seqlens_q_padded());
    set(kv_, form.kv == 'T', sequences.mutable_cu_seqlens_kv(),
        sequences.mutable_cu_seqlens_kv_padded());
  }

  int64_t PagesOf(int64_t rows) const { return (rows + d_.page_size - 1) / d_.page_size; }

  // Each sequence has pages of its own, in any order; the pool has some that nobody has.
  void SetPages() {
    const int64_t columns = PagesOf(kv_.axis) + Uniform(random_, 0, 2);
    int64_t used = 0;
    for (const int64_t length : kv_.lengths) used += PagesOf(length);
    num_pages_ = used + Uniform(random_, 1, 4);
    FillTable(columns, p_.request.mutable_sequences()->mutable_page_table_k());
    FillTable(columns, p_.request.mutable_sequences()->mutable_page_table_v());
  }

  void FillTable(int64_t columns, v1::Tensor* table) {
    std::vector<int32_t> pages(static_cast<size_t>(num_pages_));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random_);
    // Entries behind a sequence's end are not read.
    std::vector<int32_t> entries(static_cast<size_t>(d_.batch * columns), -1);
    auto next = pages.begin();
    for (size_t i = 0; i < kv_.lengths.size(); ++i) {
      const int64_t count = PagesOf(kv_.lengths[i]);
      std::copy_n(next, count, entries.begin() + static_cast<int64_t>(i) * columns);
      next += count;
    }
    table->set_dtype(v1::DATA_TYPE_INT32);
    table->add_shape(d_.batch);
    table->add_shape(columns);
    table->set_data(entries.data(), entries.size() * sizeof(int32_t));
  }

  std::vector<int64_t> ShapeOfQ(int64_t dim) const {
    switch (d_.form->q) {
      case 'T': return {q_.starts.back(), d_.heads, dim};
      case 'S': return {q_.axis, d_.batch, d_.heads, dim};
      case 'H': return {d_.batch, d_.heads, q_.axis, dim};
      default: return {d_.batch, q_.axis, d_.heads, dim};
    }
  }

  void SetShape(int slot, const std::vector<int64_t>& shape) {
    v1::Tensor* tensor = cli::MutableTensor(&p_.request, slot);
    tensor->set_dtype(d_.spec.dtype());
    tensor->mutable_shape()->Assign(shape.begin(), shape.end());
  }

  void SetInputs() {
    if (d_.form->strided != Strided::kNone) {
      SetStrided();
    } else if (d_.form->is_paged()) {
      SetShape(v1::QkvBuffers::kQFieldNumber, ShapeOfQ(d_.dim_qk));
      SetShape(v1::QkvBuffers::kKFieldNumber, PoolShape(d_.dim_qk));
      SetShape(v1::QkvBuffers::kVFieldNumber, PoolShape(d_.dim_v));
    } else {
      const auto shapes = cli::ResolveShapes(p_.request);
      if (!shapes.ok()) {
        std::fprintf(stderr, "support_matrix: a contradiction: %s in %s\n",
                     std::string(shapes.status().message()).c_str(),
                     p_.request.ShortDebugString().c_str());
        std::abort();
      }
      for (const auto& [slot, desc] : shapes->inputs) SetShape(slot, desc.shape);
    }
  }

  std::vector<int64_t> PoolShape(int64_t dim) const {
    if (d_.form->kv == 'P') return {num_pages_, d_.page_size, d_.kv_heads, dim};
    return {d_.page_size, num_pages_, d_.kv_heads, dim};
  }

  void SetView(v1::View* view, const char* buffer, int64_t offset, std::vector<int64_t> strides) {
    if (strides.size() == 4 && strides[0] == 0) strides.erase(strides.begin());
    view->set_buffer(buffer);
    view->set_byte_offset(offset * cli::SizeOf(d_.spec.dtype()));
    view->mutable_strides()->Assign(strides.begin(), strides.end());
  }

  void SetStrided() {
    const int64_t b = d_.batch, h = d_.heads, g = d_.kv_heads, dim = d_.dim_qk, s = q_.axis;
    v1::Views& views = *spec().mutable_views();
    if (d_.form->strided == Strided::kProjection) {
      const int64_t row = (h + 2 * g) * dim;
      const bool is_thd = d_.form->q == 'T';
      const std::vector<int64_t> strides = {is_thd ? 0 : s * row, row, dim, 1};
      SetShape(v1::QkvBuffers::kQkvFieldNumber,
               is_thd ? std::vector<int64_t>{q_.starts.back(), h + 2 * g, dim}
                      : std::vector<int64_t>{b, s, h + 2 * g, dim});
      SetView(views.mutable_q(), "qkv", 0, strides);
      SetView(views.mutable_k(), "qkv", h * dim, strides);
      SetView(views.mutable_v(), "qkv", (h + g) * dim, strides);
      return;
    }
    if (d_.form->strided == Strided::kStacked) {
      const std::vector<int64_t> strides = {s * h * dim, h * dim, dim, 1};
      SetShape(v1::QkvBuffers::kQkvFieldNumber, {3, b, s, h, dim});
      SetView(views.mutable_q(), "qkv", 0, strides);
      SetView(views.mutable_k(), "qkv", b * s * h * dim, strides);
      SetView(views.mutable_v(), "qkv", 2 * b * s * h * dim, strides);
      return;
    }
    SetWide(v1::QkvBuffers::kQFieldNumber, views.mutable_q(), q_, {d_.form->q == 'T', h, dim});
    if (d_.form->is_paged()) {
      SetPool(v1::QkvBuffers::kKFieldNumber, views.mutable_k(), dim);
      SetPool(v1::QkvBuffers::kVFieldNumber, views.mutable_v(), d_.dim_v);
      return;
    }
    const bool is_thd = d_.form->kv == 'T';
    SetWide(v1::QkvBuffers::kKFieldNumber, views.mutable_k(), kv_, {is_thd, g, dim});
    SetWide(v1::QkvBuffers::kVFieldNumber, views.mutable_v(), kv_, {is_thd, g, d_.dim_v});
  }

  struct Heads {
    bool is_thd;
    int64_t count;
    int64_t dim;
  };

  void SetWide(int slot, v1::View* view, const Side& side, const Heads& heads) {
    const int64_t dim = heads.dim + (heads.is_thd ? 0 : 8), row = heads.count * dim;
    SetShape(slot, heads.is_thd ? std::vector<int64_t>{side.starts.back(), heads.count, dim}
                                : std::vector<int64_t>{d_.batch, side.axis, heads.count, dim});
    SetView(view, cli::SlotName(slot), 0, {heads.is_thd ? 0 : side.axis * row, row, dim, 1});
  }

  void SetPool(int slot, v1::View* view, int64_t dim) {
    SetShape(slot, {num_pages_, d_.kv_heads, d_.page_size, dim});
    SetView(view, cli::SlotName(slot), 0,
            {d_.kv_heads * d_.page_size * dim, dim, d_.page_size * dim, 1});
  }

  void SetFeatureTensors() {
    const v1::BiasKind kind = d_.spec.bias_kind();
    if (kind == v1::BIAS_KIND_PRE_SCALE || kind == v1::BIAS_KIND_POST_SCALE) {
      std::vector<int64_t> shape = {d_.batch, d_.heads, q_.axis, kv_.axis};
      for (size_t i = 0; i < shape.size(); ++i) {
        if (d_.bias_shape[i] == '1') shape[i] = 1;
      }
      SetShape(cli::kBiasSlot, shape);
    }
    if (d_.spec.softmax_kind() == v1::SOFTMAX_KIND_LEARNABLE) {
      SetShape(cli::kSoftmaxOffsetSlot, {d_.heads});
      p_.request.mutable_softmax_offset()->set_dtype(v1::DATA_TYPE_FLOAT32);
    }
  }

  Draft d_;
  Random& random_;
  Problem p_;
  Side q_, kv_;
  int64_t num_pages_ = 0;
  int64_t shortest_ = kShortest;
};

}  // namespace

Problem BuildProblem(const Draft& draft, Random& random) { return Builder(draft, random).Build(); }

}  // namespace attnd::support
