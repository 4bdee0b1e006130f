#include "tests/engine/cpu/attention_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>

namespace attnd::testing {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr auto kGuard = std::byte{0xA5};

// 64-byte aligned bytes with a guard behind them.
class GuardedBytes {
 public:
  GuardedBytes(int64_t size, std::byte fill)
      : size_(static_cast<size_t>(size)), storage_(size_ + kGuardBytes + 64, fill) {
    void* start = storage_.data();
    size_t space = storage_.size();
    data_ = static_cast<std::byte*>(std::align(64, size_ + kGuardBytes, start, space));
    std::fill_n(data_ + size_, kGuardBytes, kGuard);
  }
  std::byte* data() { return data_; }
  size_t size() const { return size_; }
  bool IsIntact() const {
    return std::all_of(data_ + size_, data_ + size_ + kGuardBytes,
                       [](std::byte b) { return b == kGuard; });
  }

 private:
  size_t size_;
  std::vector<std::byte> storage_;
  std::byte* data_;
};

// Strides (batch, seq, head, dim) of a dense buffer of `format` whose components lie dim_stride
// apart.
Strides StridesOf(Format format, int64_t b, int64_t s, int64_t h, int64_t row) {
  switch (format) {
    case Format::kBshd: return {s * h * row, h * row, row, 1};
    case Format::kSbhd: return {h * row, b * h * row, row, 1};
    case Format::kBhsd: return {h * s * row, row, s * row, 1};
    case Format::kThd: return {0, h * row, row, 1};
  }
  return {};
}

}  // namespace

std::string Describe(const CaseOptions& o) {
  std::ostringstream text;
  text << Name(o.dtype) << " h=" << o.heads << "/" << o.kv_heads << " d=" << o.d_qk << "/" << o.d_v
       << " formats=" << static_cast<int>(o.q_format) << static_cast<int>(o.kv_format)
       << " extra=" << o.extra_rows << " dim_stride=" << o.dim_stride << " page=" << o.page_size
       << " left=" << o.mask.left.value_or(-1) << " right=" << o.mask.right.value_or(-1)
       << (o.mask.bottom_right ? " BR" : " TL") << " scale=" << o.scale.value_or(0)
       << " cap=" << o.softcap.value_or(0) << " seed=" << o.seed << " lengths:";
  for (const auto& [q, kv] : o.lengths) text << " " << q << "x" << kv;
  return text.str();
}

AttentionCase::AttentionCase(const CaseOptions& options) : options_(options) {
  AttentionProblem& p = problem_;
  p.dtype = options.dtype;
  p.out_dtype = options.out_dtype.value_or(options.dtype);
  p.batch = static_cast<int64_t>(options.lengths.size());
  p.num_heads = options.heads;
  p.num_kv_heads = options.kv_heads;
  p.head_dim_qk = options.d_qk;
  p.head_dim_v = options.d_v;
  p.q_is_thd = options.q_format == Format::kThd;
  p.kv_is_thd = options.kv_format == Format::kThd;
  p.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(options.d_qk)));
  p.logit_softcap = options.softcap;
  p.mask = options.mask;
  p.batch_invariant = options.batch_invariant;
  MakeSequences();
  p.q = MakeInput(Buffer::kQ, options.q_format, options.heads, options.d_qk);
  p.k = MakeInput(Buffer::kK, options.kv_format, options.kv_heads, options.d_qk);
  p.v = MakeInput(Buffer::kV, options.kv_format, options.kv_heads, options.d_v);
  MakeOutput();
  FillInputs();
}

void AttentionCase::MakeSequences() {
  AttentionProblem& p = problem_;
  for (const auto& [q_len, kv_len] : options_.lengths) {
    p.sequences.push_back({q_len, kv_len, p.q_is_thd ? q_rows_ : 0, p.kv_is_thd ? kv_rows_ : 0});
    p.max_seqlen_q = std::max(p.max_seqlen_q, q_len);
    p.max_seqlen_kv = std::max(p.max_seqlen_kv, kv_len);
    q_rows_ += q_len + options_.extra_rows;
    kv_rows_ += kv_len + options_.extra_rows;
  }
  if (!p.q_is_thd) p.max_seqlen_q += options_.extra_rows;
  if (!p.kv_is_thd) p.max_seqlen_kv += options_.extra_rows;
  p.has_lengths = true;
  if (options_.page_size == 0) return;

  p.is_paged = true;
  p.page_size = options_.page_size;
  p.pages_per_sequence = std::max<int64_t>(1, (p.max_seqlen_kv - 1) / p.page_size + 1);
  p.num_pages_k = p.num_pages_v = p.batch * p.pages_per_sequence + 1;
  std::mt19937_64 random(options_.seed);
  for (std::vector<int32_t>* table : {&page_table_k_, &page_table_v_}) {
    table->resize(static_cast<size_t>(p.num_pages_k));
    std::iota(table->begin(), table->end(), 0);
    std::shuffle(table->begin(), table->end(), random);
    table->pop_back();  // One page stays unused.
  }
}

TensorView AttentionCase::MakeInput(Buffer buffer, Format format, int64_t heads, int64_t dim) {
  AttentionProblem& p = problem_;
  const bool is_q = buffer == Buffer::kQ;
  int64_t b = p.batch;
  int64_t s = is_q ? p.max_seqlen_q : p.max_seqlen_kv;
  if (format == Format::kThd) {
    b = 1;
    s = is_q ? q_rows_ : kv_rows_;
  }
  if (!is_q && p.is_paged) {
    b = p.num_pages_k;
    s = p.page_size;
  }
  const int64_t row = dim * options_.dim_stride;
  TensorView view;
  view.buffer = buffer;
  view.strides = StridesOf(format, b, s, heads, row);
  view.strides.dim = options_.dim_stride;
  view.start_multiplier = format == Format::kThd ? view.strides.seq : 0;
  view.byte_offset = 4 * SizeOf(p.dtype);
  const int64_t elements = 4 + b * s * heads * row;
  p.inputs[static_cast<size_t>(buffer)] = TensorDesc{p.dtype, {elements}};
  // All bits set are a NaN of each type.
  inputs_[static_cast<size_t>(buffer)].assign(static_cast<size_t>(elements * SizeOf(p.dtype)),
                                              std::byte{0xFF});
  return view;
}

void AttentionCase::MakeOutput() {
  AttentionProblem& p = problem_;
  const int64_t h = p.num_heads;
  const int64_t s = p.q_is_thd ? q_rows_ : p.max_seqlen_q;
  p.out.buffer = Buffer::kOut;
  p.out.strides = StridesOf(options_.q_format, p.q_is_thd ? 1 : p.batch, s, h, p.head_dim_v);
  p.out.start_multiplier = p.q_is_thd ? p.out.strides.seq : 0;
  if (p.q_is_thd) {
    p.out_desc = {p.out_dtype, {s, h, p.head_dim_v}};
    p.lse_desc = {DType::kFloat32, {s, h}};
    p.lse = {0, h, 1, 0};
  } else {
    p.out_desc = {p.out_dtype, {p.batch, s, h, p.head_dim_v}};
    p.lse_desc = {DType::kFloat32, {p.batch, h, s}};
    p.lse = {h * s, 1, s, 0};
  }
}

void AttentionCase::FillInputs() {
  std::mt19937_64 random(options_.seed);
  std::normal_distribution<float> normal;
  const AttentionProblem& p = problem_;
  for (const TensorView* view : {&p.q, &p.k, &p.v}) {
    const bool is_q = view == &p.q;
    for (int64_t i = 0; i < p.batch; ++i) {
      const SequenceExtent& extent = p.sequences[static_cast<size_t>(i)];
      for (int64_t j = 0; j < (is_q ? extent.q_len : extent.kv_len); ++j) {
        for (int64_t n = 0; n < (is_q ? p.num_heads : p.num_kv_heads); ++n) {
          const int64_t dim = view == &p.v ? p.head_dim_v : p.head_dim_qk;
          for (int64_t c = 0; c < dim; ++c) Set(*view, i, j, n, c, normal(random));
        }
      }
    }
  }
}

int64_t AttentionCase::ElementOf(const TensorView& view, int64_t i, int64_t j, int64_t n,
                                 int64_t c) const {
  const Strides& s = view.strides;
  const int64_t in_row = n * s.head + c * s.dim;
  const bool is_q = view.buffer == Buffer::kQ;
  if (!is_q && problem_.is_paged) {
    const std::vector<int32_t>& table = view.buffer == Buffer::kK ? page_table_k_ : page_table_v_;
    const auto entry =
        static_cast<size_t>(i * problem_.pages_per_sequence + j / problem_.page_size);
    return table[entry] * s.batch + (j % problem_.page_size) * s.seq + in_row;
  }
  const SequenceExtent& extent = problem_.sequences[static_cast<size_t>(i)];
  return i * s.batch + (is_q ? extent.q_row : extent.kv_row) * view.start_multiplier + j * s.seq +
         in_row;
}

float AttentionCase::Get(const TensorView& view, int64_t i, int64_t j, int64_t n, int64_t c) const {
  const std::byte* base = inputs_[static_cast<size_t>(view.buffer)].data() + view.byte_offset;
  return LoadElement(problem_.dtype, base, ElementOf(view, i, j, n, c));
}

void AttentionCase::Set(const TensorView& view, int64_t i, int64_t j, int64_t n, int64_t c,
                        float value) {
  std::byte* base = inputs_[static_cast<size_t>(view.buffer)].data() + view.byte_offset;
  StoreElement(problem_.dtype, base, ElementOf(view, i, j, n, c), value);
}

int64_t AttentionCase::OutIndex(int64_t i, int64_t j, int64_t n, int64_t c) const {
  const Strides& s = problem_.out.strides;
  const int64_t row = problem_.sequences[static_cast<size_t>(i)].q_row + j;
  return i * s.batch + row * s.seq + n * s.head + c;
}

int64_t AttentionCase::LseIndex(int64_t i, int64_t j, int64_t n) const {
  const int64_t row = problem_.sequences[static_cast<size_t>(i)].q_row + j;
  return i * problem_.lse.batch + row * problem_.lse.seq + n * problem_.lse.head;
}

ForwardBuffers AttentionCase::Inputs() const {
  ForwardBuffers buffers;
  for (size_t k = 0; k < inputs_.size(); ++k) buffers.inputs[k] = inputs_[k].data();
  if (problem_.is_paged) {
    buffers.page_table_k = page_table_k_.data();
    buffers.page_table_v = page_table_v_.data();
  }
  return buffers;
}

Output AttentionCase::Run(AttentionBackend& backend, bool want_lse) const {
  auto plan = backend.BuildPlan(problem_);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return {};
  const int64_t out_size = *NumElements(problem_.out_desc.shape);
  const int64_t lse_size = want_lse ? *NumElements(problem_.lse_desc.shape) : 0;
  GuardedBytes out(out_size * SizeOf(problem_.out_dtype), std::byte{0xFF});
  GuardedBytes lse(lse_size * 4, std::byte{0xFF});
  GuardedBytes workspace((*plan)->workspace_bytes(), std::byte{0xFF});

  ForwardBuffers buffers = Inputs();
  buffers.out = out.data();
  buffers.lse = want_lse ? reinterpret_cast<float*>(lse.data()) : nullptr;
  buffers.workspace = {workspace.data(), workspace.size()};
  const absl::Status status = (*plan)->Forward(problem_, buffers);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(out.IsIntact() && lse.IsIntact() && workspace.IsIntact());

  Output output;
  for (int64_t k = 0; k < out_size; ++k) {
    output.out.push_back(LoadElement(problem_.out_dtype, out.data(), k));
  }
  output.lse.resize(static_cast<size_t>(lse_size));
  if (lse_size > 0) std::memcpy(output.lse.data(), lse.data(), lse.size());
  return output;
}

double RelativeRms(const std::vector<float>& actual, const std::vector<float>& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double error = 0;
  double norm = 0;
  for (size_t k = 0; k < actual.size(); ++k) {
    if (std::isnan(actual[k]) != std::isnan(expected[k])) {
      return std::numeric_limits<double>::infinity();
    }
    if (std::isnan(expected[k])) continue;
    const double difference = static_cast<double>(actual[k]) - static_cast<double>(expected[k]);
    error += difference * difference;
    norm += static_cast<double>(expected[k]) * static_cast<double>(expected[k]);
  }
  if (norm == 0) return error == 0 ? 0 : std::numeric_limits<double>::infinity();
  return std::sqrt(error / norm);
}

double MaxDifference(const std::vector<float>& actual, const std::vector<float>& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double max = 0;
  for (size_t k = 0; k < actual.size(); ++k) {
    if (actual[k] == expected[k]) continue;  // Equal infinities, too.
    if (std::isnan(actual[k]) && std::isnan(expected[k])) continue;
    const double difference = std::abs(static_cast<double>(actual[k] - expected[k]));
    if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
    max = std::max(max, difference);
  }
  return max;
}

}  // namespace attnd::testing
