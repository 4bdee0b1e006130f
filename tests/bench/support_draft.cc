#include "tests/bench/support_draft.h"

#include <algorithm>
#include <iterator>

namespace attnd::support {
namespace {

constexpr unsigned kPacked3 = kOneAxis | kEqualHeads | kEqualDims;

constexpr Form kForms[] = {
    {"3HD", v1::QKV_LAYOUT_BS3HD, 'B', 'B', kPacked3},
    {"3HD", v1::QKV_LAYOUT_SB3HD, 'S', 'S', kPacked3},
    {"3HD", v1::QKV_LAYOUT_T3HD, 'T', 'T', kPacked3},
    {"H3D", v1::QKV_LAYOUT_BSH3D, 'B', 'B', kPacked3},
    {"H3D", v1::QKV_LAYOUT_SBH3D, 'S', 'S', kPacked3},
    {"H3D", v1::QKV_LAYOUT_TH3D, 'T', 'T', kPacked3},
    {"HD_2HD", v1::QKV_LAYOUT_BSHD_BS2HD, 'B', 'B', kEqualDims},
    {"HD_2HD", v1::QKV_LAYOUT_SBHD_SB2HD, 'S', 'S', kEqualDims},
    {"HD_2HD", v1::QKV_LAYOUT_THD_T2HD, 'T', 'T', kEqualDims},
    {"HD_H2D", v1::QKV_LAYOUT_BSHD_BSH2D, 'B', 'B', kEqualDims},
    {"HD_H2D", v1::QKV_LAYOUT_SBHD_SBH2D, 'S', 'S', kEqualDims},
    {"HD_H2D", v1::QKV_LAYOUT_THD_TH2D, 'T', 'T', kEqualDims},
    {"HD_HD_HD", v1::QKV_LAYOUT_BSHD_BSHD_BSHD, 'B', 'B'},
    {"HD_HD_HD", v1::QKV_LAYOUT_SBHD_SBHD_SBHD, 'S', 'S'},
    {"HD_HD_HD", v1::QKV_LAYOUT_THD_THD_THD, 'T', 'T'},
    {"HD_HD_HD", v1::QKV_LAYOUT_SBHD_BSHD_BSHD, 'S', 'B'},
    {"HD_HD_HD", v1::QKV_LAYOUT_BSHD_SBHD_SBHD, 'B', 'S'},
    {"HD_HD_HD", v1::QKV_LAYOUT_THD_BSHD_BSHD, 'T', 'B'},
    {"HD_HD_HD", v1::QKV_LAYOUT_THD_SBHD_SBHD, 'T', 'S'},
    {"SD_SD_SD", v1::QKV_LAYOUT_BHSD_BHSD_BHSD, 'H', 'H'},
    {"paged", v1::QKV_LAYOUT_PAGED_KV_BSHD_BSHD_BSHD, 'B', 'P'},
    {"paged", v1::QKV_LAYOUT_PAGED_KV_BSHD_SBHD_SBHD, 'B', 'Q'},
    {"paged", v1::QKV_LAYOUT_PAGED_KV_SBHD_BSHD_BSHD, 'S', 'P'},
    {"paged", v1::QKV_LAYOUT_PAGED_KV_SBHD_SBHD_SBHD, 'S', 'Q'},
    {"paged", v1::QKV_LAYOUT_PAGED_KV_THD_BSHD_BSHD, 'T', 'P'},
    {"paged", v1::QKV_LAYOUT_PAGED_KV_THD_SBHD_SBHD, 'T', 'Q'},
    {"STRIDED", v1::QKV_LAYOUT_STRIDED, 'B', 'B', kOneAxis | kEqualDims, Strided::kProjection},
    {"STRIDED", v1::QKV_LAYOUT_STRIDED, 'T', 'T', kOneAxis | kEqualDims, Strided::kProjection},
    {"STRIDED", v1::QKV_LAYOUT_STRIDED, 'B', 'B', kPacked3, Strided::kStacked},
    {"STRIDED", v1::QKV_LAYOUT_STRIDED, 'B', 'B', 0, Strided::kWideRows},
    {"STRIDED", v1::QKV_LAYOUT_STRIDED, 'T', 'T', 0, Strided::kWideRows},
    {"STRIDED", v1::QKV_LAYOUT_STRIDED, 'B', 'P', 0, Strided::kPagesByHead},
};

template <typename T, size_t n>
T OneOf(Random& random, const T (&values)[n]) {
  return values[Uniform(random, 0, n - 1)];
}

void SetDims(Draft& d, int64_t dim_qk, int64_t dim_v) {
  d.dim_qk = dim_qk;
  d.dim_v = dim_v;
}

void Gqa(Draft& d, Random& random) {
  constexpr int64_t kHeads[][2] = {{2, 1}, {4, 2}, {6, 2}, {6, 3}, {8, 1}};
  const auto& [h, g] = kHeads[Uniform(random, 0, std::size(kHeads) - 1)];
  d.heads = h;
  d.kv_heads = g;
}

void UnequalDims(Draft& d, Random& random) {
  constexpr int64_t kDims[][2] = {{64, 32}, {32, 64}, {128, 64}, {64, 128}, {48, 16}, {192, 128}};
  const auto& [qk, v] = kDims[Uniform(random, 0, std::size(kDims) - 1)];
  SetDims(d, qk, v);
}

void OddDims(Draft& d, Random& random) {
  constexpr int64_t kOdd[] = {1, 3, 5, 12, 20, 33, 50, 100};
  const int64_t dim = OneOf(random, kOdd);
  SetDims(d, dim, OneIn(random, 2) ? dim : OneOf(random, kOdd));
}

void WideDims(Draft& d, Random& random) {
  const int64_t dim = OneOf(random, {136, 160, 192, 256, 320});
  SetDims(d, dim, dim);
}

void Window(Draft& d, Random& random) {
  if (OneIn(random, 2)) {
    d.spec.set_causal(OneIn(random, 2) ? v1::CAUSAL_TOP_LEFT : v1::CAUSAL_BOTTOM_RIGHT);
  } else {
    d.spec.mutable_window()->set_right(Uniform(random, 1, 40));
  }
  d.spec.mutable_window()->set_left(Uniform(random, 1, 40));
}

// Letters of the axes that are not broadcast.
void Bias(Draft& d, v1::BiasKind kind, const char* shape) {
  d.spec.set_bias_kind(kind);
  d.bias_shape = shape;
}

template <char... letters>
void BiasShape(Draft& d, Random&) {
  constexpr char kShape[] = {letters..., '\0'};
  Bias(d, v1::BIAS_KIND_POST_SCALE, kShape);
}

template <v1::BiasKind kind>
void AnyBias(Draft& d, Random& random) {
  Bias(d, kind, OneOf<const char*>(random, {"11ss", "1hss", "b1ss", "bhss", "111s"}));
}

void Alibi(Draft& d, Random& random) {
  d.spec.set_bias_kind(v1::BIAS_KIND_ALIBI);
  d.spec.set_causal(OneOf(random, {v1::CAUSAL_NONE, v1::CAUSAL_TOP_LEFT, v1::CAUSAL_BOTTOM_RIGHT}));
}

template <v1::DataType dtype>
void OfType(Draft& d, Random&) {
  d.spec.set_dtype(dtype);
}

template <v1::SoftmaxKind kind>
void Softmax(Draft& d, Random&) {
  d.spec.set_softmax_kind(kind);
}

template <v1::Causal causal>
void CausalMask(Draft& d, Random&) {
  d.spec.set_causal(causal);
}

void Dropout(Draft& d, Random& random) {
  v1::Dropout& dropout = *d.spec.mutable_dropout();
  dropout.set_probability(Real(random, 0.05, 0.6));
  dropout.set_seed(Uniform(random, 0, int64_t{1} << 40));
  dropout.set_offset(Uniform(random, 0, 1000));
}

void Decode(Draft& d, Random& random) {
  d.is_decode = true;
  d.spec.set_causal(OneIn(random, 2) ? v1::CAUSAL_NONE : v1::CAUSAL_BOTTOM_RIGHT);
}

void Scale(Draft& d, Random& random) {
  d.spec.set_scale(OneIn(random, 3) ? 0 : Real(random, -0.5, 0.5));
}

constexpr Feature kFeatures[] = {
    {"plain", 0, [](Draft&, Random&) {}},
    {"causal, top left", 0, CausalMask<v1::CAUSAL_TOP_LEFT>},
    {"causal, bottom right", 0, CausalMask<v1::CAUSAL_BOTTOM_RIGHT>},
    {"window", 0, Window},
    {"lengths (padded rows)", kNeedsDense, [](Draft& d, Random&) { d.has_lengths = true; }},
    {"gaps (THD)", kNeedsThd, [](Draft& d, Random&) { d.has_gaps = true; }},
    {"empty sequences", 0, [](Draft& d, Random&) { d.has_lengths = d.has_empty = true; }},
    {"decode (s_q = 1)", kNeedsTwoAxes, Decode},
    {"GQA", kNeedsFreeHeads, Gqa},
    {"d_qk != d_v", kNeedsFreeDims, UnequalDims},
    {"head dim not 8n", 0, OddDims},
    {"head dim > 128", 0, WideDims},
    {"page size not 2^n", kNeedsPages,
     [](Draft& d, Random& random) {
       d.page_size = OneOf(random, {3, 12, 24, 100});
     }},
    {"FLOAT32", 0, OfType<v1::DATA_TYPE_FLOAT32>},
    {"FLOAT16", 0, OfType<v1::DATA_TYPE_FLOAT16>},
    {"BFLOAT16", 0, OfType<v1::DATA_TYPE_BFLOAT16>},
    {"FLOAT8_E4M3", 0, OfType<v1::DATA_TYPE_FLOAT8_E4M3>},
    {"FLOAT8_E5M2", 0, OfType<v1::DATA_TYPE_FLOAT8_E5M2>},
    {"O in FLOAT32", 0, [](Draft& d, Random&) { d.out_dtype = v1::DATA_TYPE_FLOAT32; }},
    {"scale of any sign, or 0", 0, Scale},
    {"bias PRE_SCALE", 0, AnyBias<v1::BIAS_KIND_PRE_SCALE>},
    {"bias POST_SCALE", 0, AnyBias<v1::BIAS_KIND_POST_SCALE>},
    {"bias 11ss", 0, BiasShape<'1', '1', 's', 's'>},
    {"bias 1hss", 0, BiasShape<'1', 'h', 's', 's'>},
    {"bias b1ss", 0, BiasShape<'b', '1', 's', 's'>},
    {"bias bhss", 0, BiasShape<'b', 'h', 's', 's'>},
    {"bias 111s", 0, BiasShape<'1', '1', '1', 's'>},
    {"ALiBi", 0, Alibi},
    {"ALiBi of a shard of heads", 0,
     [](Draft& d, Random& random) {
       Alibi(d, random);
       d.has_alibi_shard = true;
     }},
    {"soft cap", 0, [](Draft& d, Random& random) { d.spec.set_logit_softcap(Real(random, 1, 8)); }},
    {"softmax OFF_BY_ONE", 0, Softmax<v1::SOFTMAX_KIND_OFF_BY_ONE>},
    {"softmax LEARNABLE", 0, Softmax<v1::SOFTMAX_KIND_LEARNABLE>},
    {"dropout", 0, Dropout},
    {"deterministic", 0, [](Draft& d, Random&) { d.spec.set_deterministic(true); }},
    {"batch_invariant", 0, [](Draft& d, Random&) { d.spec.set_batch_invariant(true); }},
};

}  // namespace

int64_t Uniform(Random& random, int64_t first, int64_t last) {
  return std::uniform_int_distribution<int64_t>(first, last)(random);
}

double Real(Random& random, double first, double last) {
  return std::uniform_real_distribution<double>(first, last)(random);
}

bool OneIn(Random& random, int64_t n) { return Uniform(random, 1, n) == 1; }

std::span<const Form> Forms() { return kForms; }
std::span<const Feature> FeatureTable() { return kFeatures; }

bool Meets(const Form& form, unsigned needs) {
  const bool has_thd = form.q == 'T' || form.kv == 'T';
  const bool has_dense = form.q != 'T' || (form.kv != 'T' && !form.is_paged());
  return (!(needs & kNeedsThd) || has_thd) && (!(needs & kNeedsDense) || has_dense) &&
         (!(needs & kNeedsTwoAxes) || !(form.shared & kOneAxis)) &&
         (!(needs & kNeedsFreeHeads) || !(form.shared & kEqualHeads)) &&
         (!(needs & kNeedsFreeDims) || !(form.shared & kEqualDims)) &&
         (!(needs & kNeedsPages) || form.is_paged());
}

Draft DrawPlain(const Form& form, Random& random) {
  Draft d;
  d.form = &form;
  d.spec.set_layout(form.layout);
  d.spec.set_dtype(OneIn(random, 2) ? v1::DATA_TYPE_FLOAT16 : v1::DATA_TYPE_BFLOAT16);
  d.batch = Uniform(random, 1, 3);
  d.heads = d.kv_heads = OneOf(random, {1, 2, 3, 4, 6});
  d.dim_qk = d.dim_v = OneOf(random, {8, 16, 24, 32, 40, 64, 64, 80, 96, 128});
  d.page_size = OneOf(random, {1, 8, 16, 32, 64, 128});
  return d;
}

}  // namespace attnd::support
