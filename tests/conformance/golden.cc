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

GoldenCase ReadCase(Reader& reader) {
  GoldenCase c;
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
  for (auto* number : {&c.scale, &c.softcap}) {
    if (const auto value = reader.Number<double>(); !std::isnan(value)) *number = value;
  }
  g.q_len = reader.Numbers<int64_t>(g.batch);
  g.kv_len = reader.Numbers<int64_t>(g.batch);
  g.q_row = reader.Numbers<int64_t>(g.batch + 1);
  g.kv_row = reader.Numbers<int64_t>(g.batch + 1);
  const int64_t queries = Sum(g.q_len), keys = Sum(g.kv_len), size = SizeOf(c.dtype);
  c.tensors.dtype = c.dtype;
  c.tensors.qkv = {reader.Take(queries * g.h * g.d_qk * size),
                   reader.Take(keys * g.g * g.d_qk * size), reader.Take(keys * g.g * g.d_v * size)};
  c.out = reader.Numbers<double>(queries * g.h * g.d_v);
  c.lse = reader.Numbers<double>(queries * g.h);
  return c;
}

std::vector<GoldenCase> ReadFile() {
  static Reader reader(ATTND_GOLDEN_FILE);
  if (reader.Text(8) != "ATGOLD01") Reader::Fail("is no golden file");
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
