// The table of layout names: which buffers each has and what their axes mean. Private to the
// resolver.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/attention_spec.h"

namespace attnd {

enum class Axis : uint8_t { kBatch, kSeq, kToken, kPage, kRow, kPack, kHead, kDim };

// The order of a side's axes. A paged pool is kBshd [page, row, g, d] or kSbhd [row, page, g, d].
enum class Format : uint8_t { kBshd, kSbhd, kBhsd, kThd };

// Which tensors share a buffer, and whether the axis that packs them stands before or after heads.
enum class Packing : uint8_t {
  kSeparate,
  kQkvBeforeHead,
  kQkvAfterHead,
  kKvBeforeHead,
  kKvAfterHead
};

struct LayoutEntry {
  Layout layout;
  std::string_view name;
  Format q_format;
  Format kv_format;
  Packing packing;
  bool paged;
  std::string_view shapes;  // For messages.
};

// nullptr for kUnspecified, kStrided and unknown values.
const LayoutEntry* FindLayout(Layout layout);

// One buffer of a layout: the axes in order, and how many tensors its pack axis holds (1: no axis).
struct BufferAxes {
  Buffer buffer;
  std::vector<Axis> axes;
  int64_t packed = 1;
};

// The buffers that the layout names, in the order of QkvBuffers.
std::vector<BufferAxes> BuffersOf(const LayoutEntry& entry);

// Axes of one unpacked tensor.
std::vector<Axis> AxesOf(Format format, bool paged_pool);

inline bool PacksQ(Packing p) {
  return p == Packing::kQkvBeforeHead || p == Packing::kQkvAfterHead;
}

}  // namespace attnd
