// Tensors in this program's memory, and the names that the contract gives types and layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attnd/v1/types.pb.h"

namespace attnd::cli {

// Row-major, contiguous, little-endian. Copies share the bytes.
struct HostTensor {
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  std::shared_ptr<std::byte[]> data;
  int64_t byte_size = 0;
};

// Bytes of one element; 0 for a type that this program does not know.
int64_t SizeOf(v1::DataType dtype);

// Elements of a shape, or bytes of a tensor; nullopt where a dimension is negative or the product
// passes 2^63.
std::optional<int64_t> NumElements(const std::vector<int64_t>& shape);
std::optional<int64_t> NumBytes(v1::DataType dtype, const std::vector<int64_t>& shape);

// Memory for the shape, its contents undefined; nullopt where NumBytes is.
std::optional<HostTensor> MakeTensor(v1::DataType dtype, std::vector<int64_t> shape);

// A message with the tensor's dtype and shape, and no source.
v1::Tensor Describe(const HostTensor& tensor);

// "[2, 3, 64]"
std::string ShapeString(const std::vector<int64_t>& shape);

// "FLOAT32" of DATA_TYPE_FLOAT32, "BS3HD" of QKV_LAYOUT_BS3HD.
std::string ShortName(v1::DataType dtype);
std::string ShortName(v1::QkvLayout layout);

// The reverse, in upper or lower case; nullopt where there is no such name.
std::optional<v1::DataType> ParseDataType(const std::string& name);
std::optional<v1::QkvLayout> ParseLayout(const std::string& name);

// "12 B", "1.5 MiB"
std::string BytesString(int64_t bytes);

}  // namespace attnd::cli
