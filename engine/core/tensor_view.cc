#include "engine/core/tensor_view.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace attnd {

std::string_view Name(Buffer buffer) {
  switch (buffer) {
    case Buffer::kQkv: return "qkv";
    case Buffer::kQ: return "q";
    case Buffer::kKv: return "kv";
    case Buffer::kK: return "k";
    case Buffer::kV: return "v";
    case Buffer::kOut: return "out";
  }
  return "";
}

std::optional<int64_t> NumElements(const std::vector<int64_t>& shape) {
  bool empty = false;
  for (int64_t dim : shape) {
    if (dim < 0) return std::nullopt;
    empty = empty || dim == 0;
  }
  if (empty) return 0;
  int64_t product = 1;
  for (int64_t dim : shape) {
    if (__builtin_mul_overflow(product, dim, &product)) return std::nullopt;
  }
  return product;
}

std::optional<int64_t> NumBytes(const TensorDesc& desc) {
  std::optional<int64_t> bytes = NumElements(desc.shape);
  if (!bytes || __builtin_mul_overflow(*bytes, SizeOf(desc.dtype), &*bytes)) return std::nullopt;
  return bytes;
}

std::string ShapeString(const std::vector<int64_t>& shape) {
  constexpr size_t kMostShown = 8;  // A client may send any number of dimensions.
  if (shape.size() <= kMostShown) return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
  return absl::StrCat("[", absl::StrJoin(shape.begin(), shape.begin() + kMostShown, ", "),
                      ", ...]");
}

}  // namespace attnd
