#include "client/cli/host_tensor.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <utility>

namespace attnd::cli {
namespace {

constexpr char kDataTypePrefix[] = "DATA_TYPE_";
constexpr char kLayoutPrefix[] = "QKV_LAYOUT_";

std::string WithoutPrefix(const std::string& name, const std::string& prefix) {
  return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name;
}

std::string UpperCase(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace

int64_t SizeOf(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
    case v1::DATA_TYPE_INT32: return 4;
    case v1::DATA_TYPE_FLOAT16:
    case v1::DATA_TYPE_BFLOAT16: return 2;
    case v1::DATA_TYPE_FLOAT8_E4M3:
    case v1::DATA_TYPE_FLOAT8_E5M2: return 1;
    default: return 0;
  }
}

std::optional<int64_t> NumElements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  if (std::any_of(shape.begin(), shape.end(), [](int64_t dim) { return dim < 0; })) {
    return std::nullopt;
  }
  for (int64_t dim : shape) {
    if (__builtin_mul_overflow(count, dim, &count)) return std::nullopt;
  }
  return count;
}

std::optional<int64_t> NumBytes(v1::DataType dtype, const std::vector<int64_t>& shape) {
  const std::optional<int64_t> count = NumElements(shape);
  int64_t bytes = 0;
  if (!count || __builtin_mul_overflow(*count, SizeOf(dtype), &bytes)) return std::nullopt;
  return bytes;
}

std::optional<HostTensor> MakeTensor(v1::DataType dtype, std::vector<int64_t> shape) {
  const std::optional<int64_t> bytes = NumBytes(dtype, shape);
  if (!bytes) return std::nullopt;
  auto data = std::make_shared_for_overwrite<std::byte[]>(static_cast<size_t>(*bytes));
  return HostTensor{dtype, std::move(shape), std::move(data), *bytes};
}

v1::Tensor Describe(const HostTensor& tensor) {
  v1::Tensor message;
  message.set_dtype(tensor.dtype);
  message.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  return message;
}

std::string ShapeString(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::string ShortName(v1::DataType dtype) {
  return WithoutPrefix(v1::DataType_Name(dtype), kDataTypePrefix);
}

std::string ShortName(v1::QkvLayout layout) {
  return WithoutPrefix(v1::QkvLayout_Name(layout), kLayoutPrefix);
}

std::optional<v1::DataType> ParseDataType(const std::string& name) {
  v1::DataType dtype;
  if (!v1::DataType_Parse(kDataTypePrefix + UpperCase(name), &dtype)) return std::nullopt;
  return dtype;
}

std::optional<v1::QkvLayout> ParseLayout(const std::string& name) {
  v1::QkvLayout layout;
  if (!v1::QkvLayout_Parse(kLayoutPrefix + UpperCase(name), &layout)) return std::nullopt;
  return layout;
}

std::string BytesString(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace attnd::cli
