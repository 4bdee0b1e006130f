#include "engine/core/layout_table.h"

#include <algorithm>

#include "engine/core/layout.h"

namespace attnd {
namespace {

constexpr Format B = Format::kBshd, S = Format::kSbhd, H = Format::kBhsd, T = Format::kThd;
constexpr Packing kSep = Packing::kSeparate;
constexpr Packing k3hd = Packing::kQkvBeforeHead, kH3d = Packing::kQkvAfterHead;
constexpr Packing k2hd = Packing::kKvBeforeHead, kH2d = Packing::kKvAfterHead;

// Ordered as the enum, from 1.
constexpr LayoutEntry kLayouts[] = {
    {Layout::kSb3hd, "SB3HD", S, S, k3hd, false, "qkv [s, b, 3, h, d]"},
    {Layout::kSbh3d, "SBH3D", S, S, kH3d, false, "qkv [s, b, h, 3, d]"},
    {Layout::kSbhdSb2hd, "SBHD_SB2HD", S, S, k2hd, false,
     "q [s_q, b, h, d], kv [s_kv, b, 2, g, d]"},
    {Layout::kSbhdSbh2d, "SBHD_SBH2D", S, S, kH2d, false,
     "q [s_q, b, h, d], kv [s_kv, b, g, 2, d]"},
    {Layout::kSbhdSbhdSbhd, "SBHD_SBHD_SBHD", S, S, kSep, false,
     "q [s_q, b, h, d_qk], k [s_kv, b, g, d_qk], v [s_kv, b, g, d_v]"},
    {Layout::kBs3hd, "BS3HD", B, B, k3hd, false, "qkv [b, s, 3, h, d]"},
    {Layout::kBsh3d, "BSH3D", B, B, kH3d, false, "qkv [b, s, h, 3, d]"},
    {Layout::kBshdBs2hd, "BSHD_BS2HD", B, B, k2hd, false,
     "q [b, s_q, h, d], kv [b, s_kv, 2, g, d]"},
    {Layout::kBshdBsh2d, "BSHD_BSH2D", B, B, kH2d, false,
     "q [b, s_q, h, d], kv [b, s_kv, g, 2, d]"},
    {Layout::kBshdBshdBshd, "BSHD_BSHD_BSHD", B, B, kSep, false,
     "q [b, s_q, h, d_qk], k [b, s_kv, g, d_qk], v [b, s_kv, g, d_v]"},
    {Layout::kT3hd, "T3HD", T, T, k3hd, false, "qkv [t, 3, h, d]"},
    {Layout::kTh3d, "TH3D", T, T, kH3d, false, "qkv [t, h, 3, d]"},
    {Layout::kThdT2hd, "THD_T2HD", T, T, k2hd, false, "q [t_q, h, d], kv [t_kv, 2, g, d]"},
    {Layout::kThdTh2d, "THD_TH2D", T, T, kH2d, false, "q [t_q, h, d], kv [t_kv, g, 2, d]"},
    {Layout::kThdThdThd, "THD_THD_THD", T, T, kSep, false,
     "q [t_q, h, d_qk], k [t_kv, g, d_qk], v [t_kv, g, d_v]"},
    {Layout::kSbhdBshdBshd, "SBHD_BSHD_BSHD", S, B, kSep, false,
     "q [s_q, b, h, d_qk], k [b, s_kv, g, d_qk], v [b, s_kv, g, d_v]"},
    {Layout::kBshdSbhdSbhd, "BSHD_SBHD_SBHD", B, S, kSep, false,
     "q [b, s_q, h, d_qk], k [s_kv, b, g, d_qk], v [s_kv, b, g, d_v]"},
    {Layout::kThdBshdBshd, "THD_BSHD_BSHD", T, B, kSep, false,
     "q [t_q, h, d_qk], k [b, s_kv, g, d_qk], v [b, s_kv, g, d_v]"},
    {Layout::kThdSbhdSbhd, "THD_SBHD_SBHD", T, S, kSep, false,
     "q [t_q, h, d_qk], k [s_kv, b, g, d_qk], v [s_kv, b, g, d_v]"},
    {Layout::kPagedKvBshdBshdBshd, "PAGED_KV_BSHD_BSHD_BSHD", B, B, kSep, true,
     "q [b, s_q, h, d_qk], k [pages, rows, g, d_qk], v [pages, rows, g, d_v]"},
    {Layout::kPagedKvBshdSbhdSbhd, "PAGED_KV_BSHD_SBHD_SBHD", B, S, kSep, true,
     "q [b, s_q, h, d_qk], k [rows, pages, g, d_qk], v [rows, pages, g, d_v]"},
    {Layout::kPagedKvSbhdBshdBshd, "PAGED_KV_SBHD_BSHD_BSHD", S, B, kSep, true,
     "q [s_q, b, h, d_qk], k [pages, rows, g, d_qk], v [pages, rows, g, d_v]"},
    {Layout::kPagedKvSbhdSbhdSbhd, "PAGED_KV_SBHD_SBHD_SBHD", S, S, kSep, true,
     "q [s_q, b, h, d_qk], k [rows, pages, g, d_qk], v [rows, pages, g, d_v]"},
    {Layout::kPagedKvThdBshdBshd, "PAGED_KV_THD_BSHD_BSHD", T, B, kSep, true,
     "q [t_q, h, d_qk], k [pages, rows, g, d_qk], v [pages, rows, g, d_v]"},
    {Layout::kPagedKvThdSbhdSbhd, "PAGED_KV_THD_SBHD_SBHD", T, S, kSep, true,
     "q [t_q, h, d_qk], k [rows, pages, g, d_qk], v [rows, pages, g, d_v]"},
    {Layout::kBhsdBhsdBhsd, "BHSD_BHSD_BHSD", H, H, kSep, false,
     "q [b, h, s_q, d_qk], k [b, g, s_kv, d_qk], v [b, g, s_kv, d_v]"},
};
static_assert(std::size(kLayouts) == kNumLayouts - 2);

}  // namespace

const LayoutEntry* FindLayout(Layout layout) {
  const int index = static_cast<int>(layout) - 1;
  if (index < 0 || index >= static_cast<int>(std::size(kLayouts))) return nullptr;
  return &kLayouts[index];
}

std::string_view LayoutShapes(Layout layout) {
  const LayoutEntry* entry = FindLayout(layout);
  return entry == nullptr ? std::string_view() : entry->shapes;
}

std::vector<Axis> AxesOf(Format format, bool paged_pool) {
  const Axis batch = paged_pool ? Axis::kPage : Axis::kBatch;
  const Axis seq = paged_pool ? Axis::kRow : Axis::kSeq;
  switch (format) {
    case Format::kBshd: return {batch, seq, Axis::kHead, Axis::kDim};
    case Format::kSbhd: return {seq, batch, Axis::kHead, Axis::kDim};
    case Format::kBhsd: return {batch, Axis::kHead, seq, Axis::kDim};
    case Format::kThd: return {Axis::kToken, Axis::kHead, Axis::kDim};
  }
  return {};
}

std::vector<BufferAxes> BuffersOf(const LayoutEntry& entry) {
  const bool before =
      entry.packing == Packing::kQkvBeforeHead || entry.packing == Packing::kKvBeforeHead;
  auto packed = [&](Buffer buffer, Format format, int64_t count) {
    BufferAxes result{buffer, AxesOf(format, false), count};
    auto head = std::find(result.axes.begin(), result.axes.end(), Axis::kHead);
    result.axes.insert(before ? head : head + 1, Axis::kPack);
    return result;
  };
  switch (entry.packing) {
    case Packing::kQkvBeforeHead:
    case Packing::kQkvAfterHead: return {packed(Buffer::kQkv, entry.q_format, 3)};
    case Packing::kKvBeforeHead:
    case Packing::kKvAfterHead:
      return {{Buffer::kQ, AxesOf(entry.q_format, false)}, packed(Buffer::kKv, entry.kv_format, 2)};
    case Packing::kSeparate:
      return {{Buffer::kQ, AxesOf(entry.q_format, false)},
              {Buffer::kK, AxesOf(entry.kv_format, entry.paged)},
              {Buffer::kV, AxesOf(entry.kv_format, entry.paged)}};
  }
  return {};
}

}  // namespace attnd
