#include "tests/conformance/golden.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <numeric>

namespace attnd::testing {
namespace {

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!file) Fail("cannot open");
    bytes_.resize(file.tellg());
    file.seekg(0);
    if (!file.read(reinterpret_cast<char*>(bytes_.data()), bytes_.size())) Fail("cannot read");
  }

  // The next `count` bytes.
  std::span<const std::byte> Take(size_t count) {
    if (count > bytes_.size() - at_) Fail("ends early");
    at_ += count;
    return std::span(bytes_).subspan(at_ - count, count);
  }

  template <typename T>
  T Number() {
    T value;
    std::memcpy(&value, Take(sizeof(T)).data(), sizeof(T));
    return value;
  }

  template <typename T>
  std::vector<T> Numbers(size_t count) {
    std::vector<T> values(count);
    for (T& value : values) value = Number<T>();
    return values;
  }

  // `count` elements of `dtype`, widened.
  std::vector<double> Answers(DType dtype, int64_t count) {
    const std::byte* bytes = Take(count * SizeOf(dtype)).data();
    std::vector<double> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = LoadElement(dtype, bytes, i);
    return values;
  }

  std::string Text(size_t size) {
    const auto* text = reinterpret_cast<const char*>(Take(size).data());
    return std::string(text, strnlen(text, size));
  }

  bool AtEnd() const { return at_ == bytes_.size(); }

  [[noreturn]] static void Fail(const char* what) {
    std::cerr << ATTND_GOLDEN_FILE << ": " << what << std::endl;
    std::abort();
  }

 private:
  std::vector<std::byte> bytes_;
  size_t at_ = 0;
};

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

int64_t Product(const std::vector<int64_t>& shape) {
  return shape.empty() ? 0 : *NumElements(shape);
}

void ReadHeader(Reader& reader, GoldenCase& c) {
  Geometry& g = c.geometry;
  c.group = reader.Text(32);
  c.name = reader.Text(96);
  c.dtype = static_cast<DType>(reader.Number<int64_t>());
  for (int64_t* size : {&g.batch, &g.h, &g.g, &g.d_qk, &g.d_v, &g.s_q, &g.s_kv, &g.t_q, &g.t_kv}) {
    *size = reader.Number<int64_t>();
  }
  g.has_lengths = reader.Number<int64_t>() != 0;
  g.has_gaps = reader.Number<int64_t>() != 0;
  c.causal = static_cast<Causal>(reader.Number<int64_t>());
  c.alignment = static_cast<Alignment>(reader.Number<int64_t>());
  for (auto* bound : {&c.window_left, &c.window_right}) {
    if (const auto value = reader.Number<int64_t>(); value >= 0) *bound = value;
  }
  c.bias_kind = static_cast<BiasKind>(reader.Number<int64_t>());
  c.bias_shape = reader.Numbers<int64_t>(4);
  if (c.bias_shape[0] == 0) c.bias_shape.clear();
  const auto alibi = reader.Numbers<int64_t>(2);
  if (alibi[1] > 0) c.alibi = AlibiShard{alibi[0], alibi[1]};
  c.softmax_kind = static_cast<SoftmaxKind>(reader.Number<int64_t>());
  const auto state = reader.Numbers<int64_t>(2);
  c.has_gradients = reader.Number<int64_t>() != 0;
  for (auto* number : {&c.scale, &c.softcap}) {
    if (const auto value = reader.Number<double>(); !std::isnan(value)) *number = value;
  }
  if (const auto p = reader.Number<double>(); p > 0) c.dropout = Dropout{p, state[0], state[1]};
  c.largest_logit = reader.Number<double>();
  g.q_len = reader.Numbers<int64_t>(g.batch);
  g.kv_len = reader.Numbers<int64_t>(g.batch);
  g.q_row = reader.Numbers<int64_t>(g.batch + 1);
  g.kv_row = reader.Numbers<int64_t>(g.batch + 1);
}

void ReadFp8(Reader& reader, GoldenCase& c) {
  c.fp8.emplace();
  for (const Fp8ScaleField& field : kFp8ScaleFields) {
    (*c.fp8).*field.member = reader.Number<float>();
  }
  c.amax = reader.Numbers<float>(6);
}

GoldenCase ReadCase(Reader& reader) {
  GoldenCase c;
  ReadHeader(reader, c);
  const Geometry& g = c.geometry;
  const int64_t queries = Sum(g.q_len), keys = Sum(g.kv_len), size = SizeOf(c.dtype);
  const int64_t counts[] = {queries * g.h * g.d_qk, keys * g.g * g.d_qk, keys * g.g * g.d_v};
  const int64_t outs = queries * g.h * g.d_v;
  const int64_t sinks = c.softmax_kind == SoftmaxKind::kLearnable ? g.h : 0;
  const DType answer = c.dtype == DType::kFloat32 ? DType::kFloat32 : DType::kFloat16;
  const DType out_answer = IsFloat8(c.dtype) ? DType::kFloat32 : answer;
  if (IsFloat8(c.dtype)) ReadFp8(reader, c);
  c.tensors.dtype = c.dtype;
  for (int i = 0; i < 3; ++i) c.tensors.qkv[i] = reader.Take(counts[i] * size);
  c.bias = reader.Take(Product(c.bias_shape) * size);
  c.softmax_offset = reader.Take(sinks * sizeof(float));
  c.out = reader.Answers(out_answer, outs);
  c.lse = reader.Answers(DType::kFloat32, queries * g.h);
  if (!c.has_gradients) return c;
  c.d_out = reader.Take(outs * size);
  for (int i = 0; i < 3; ++i) c.dqkv[i] = reader.Answers(answer, counts[i]);
  c.d_bias = reader.Answers(answer, Product(c.bias_shape));
  c.d_softmax_offset = reader.Answers(DType::kFloat32, sinks);
  return c;
}

std::vector<GoldenCase> ReadFile() {
  static Reader reader(ATTND_GOLDEN_FILE);
  if (reader.Text(8) != "ATGOLD04") Reader::Fail("is no golden file");
  std::vector<GoldenCase> cases(reader.Number<int64_t>());
  for (GoldenCase& c : cases) c = ReadCase(reader);
  if (!reader.AtEnd()) Reader::Fail("goes on past its last case");
  return cases;
}

}  // namespace

const std::vector<GoldenCase>& GoldenCases() {
  static const std::vector<GoldenCase> cases = ReadFile();
  return cases;
}

}  // namespace attnd::testing
