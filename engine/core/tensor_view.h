// Where a logical tensor lies in a buffer: offset and strides, and nothing about layouts.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/dtype.h"

namespace attnd {

// The buffers of a request and of its reply. The first five are the fields of QkvBuffers.
enum class Buffer : uint8_t { kQkv = 0, kQ, kKv, kK, kV, kOut };
inline constexpr int kNumInputBuffers = 5;

// "qkv", "q", "kv", "k", "v", "out".
std::string_view Name(Buffer buffer);

// Shape and type of a row-major, contiguous buffer.
struct TensorDesc {
  DType dtype = DType::kUnspecified;
  std::vector<int64_t> shape;

  bool operator==(const TensorDesc&) const = default;
};

// Elements, or bytes, of a shape; nullopt where a dimension is negative or the product passes 2^63.
std::optional<int64_t> NumElements(const std::vector<int64_t>& shape);
std::optional<int64_t> NumBytes(const TensorDesc& desc);

// "[2, 3, 64]".
std::string ShapeString(const std::vector<int64_t>& shape);

// In elements.
struct Strides {
  int64_t batch = 0;  // Of a sequence; of a page on a paged side; 0 on a THD side.
  int64_t seq = 0;
  int64_t head = 0;
  int64_t dim = 0;

  bool operator==(const Strides&) const = default;
};

// Element (sequence i, row j, head n, component c) of the logical tensor is at
//   buffer + byte_offset + E * (i * batch + (row(i) + j) * seq + HeadStart(n) + c * dim)
// where row(i) is the sequence's row in a token buffer (SequenceExtent), 0 on a dense side. On a
// paged side `i * batch + (row(i) + j) * seq` is `page * batch + (j % page_size) * seq` instead,
// with page = page_table[i][j / page_size].
struct TensorView {
  Buffer buffer = Buffer::kQ;
  int64_t byte_offset = 0;
  Strides strides;
  // What a sequence's row in the token buffer is multiplied with to get its start, in elements: the
  // seq stride on a THD side, 0 elsewhere. (cuDNN's ragged offset of sequence i is this times its
  // row; the byte offset stays in the pointer.)
  int64_t start_multiplier = 0;
  // Query heads that lie in groups (a projection [s, b, g, (h/g + 2), d]): so many heads of a group
  // are `head` apart, and groups group_stride. 0: there are no groups.
  int64_t group_heads = 0;
  int64_t group_stride = 0;

  int64_t HeadStart(int64_t n) const {
    return group_heads == 0 ? n * strides.head
                            : n / group_heads * group_stride + n % group_heads * strides.head;
  }

  bool operator==(const TensorView&) const = default;
};

}  // namespace attnd
