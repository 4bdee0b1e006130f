// Layout STRIDED: buffers of any shape, and the client's own views into them.

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "engine/core/resolve_checks.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

constexpr std::string_view kViewFields[] = {"spec.views.q", "spec.views.k", "spec.views.v"};

std::string Sub(int which, std::string_view name) {
  return absl::StrCat(View(kViewFields[which]), ".", View(name));
}

std::string InputField(Buffer buffer) { return absl::StrCat("inputs.", View(Name(buffer))); }

absl::Status CheckRequiredSpec(const AttentionSpec& spec) {
  const std::pair<bool, std::string_view> required[] = {
      {spec.batch.has_value(), "spec.batch"},
      {spec.max_seqlen_q.has_value(), "spec.max_seqlen_q"},
      {spec.max_seqlen_kv.has_value(), "spec.max_seqlen_kv"},
      {spec.num_heads.has_value(), "spec.num_heads"},
      {spec.num_kv_heads.has_value(), "spec.num_kv_heads"},
      {spec.head_dim_qk.has_value(), "spec.head_dim_qk"},
      {spec.head_dim_v.has_value(), "spec.head_dim_v"},
      {spec.views.has_value(), "spec.views"}};
  for (const auto& [present, field] : required) {
    if (!present) {
      return InvalidField(reason::kMissingField, field, "is required with layout STRIDED");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckView(const RequestedView& view, int which, DType dtype) {
  if (static_cast<int>(view.buffer) >= kNumInputBuffers) {
    return InvalidField(reason::kInvalidField, Sub(which, "buffer"),
                        absl::StrCat("is ", View(Name(view.buffer)), ", which is no input"));
  }
  const size_t rank = view.strides.size();
  if (rank != 3 && rank != 4) {
    return InvalidField(reason::kInvalidField, Sub(which, "strides"),
                        absl::StrCat("has ", rank,
                                     " entries; it needs 4 (batch, seq, head, dim), "
                                     "or 3 (seq, head, dim) on a THD side"));
  }
  for (int64_t stride : view.strides) {
    if (stride < 0) {
      return InvalidField(reason::kInvalidField, Sub(which, "strides"),
                          absl::StrCat("has ", stride, "; strides are not negative"));
    }
  }
  if (view.group_stride && which != 0) {
    return InvalidField(
        reason::kMisplacedField, Sub(which, "group_stride"),
        "is set, but a group has one head of K and of V: strides say where it lies");
  }
  if (view.group_stride && *view.group_stride < 0) {
    return InvalidField(reason::kInvalidField, Sub(which, "group_stride"),
                        absl::StrCat("is ", *view.group_stride, "; strides are not negative"));
  }
  if (view.byte_offset < 0 || view.byte_offset % SizeOf(dtype) != 0) {
    return InvalidField(reason::kInvalidField, Sub(which, "byte_offset"),
                        absl::StrCat("is ", view.byte_offset, "; it must be a multiple of ",
                                     SizeOf(dtype), " (the element size) and not negative"));
  }
  return absl::OkStatus();
}

// What kind of sides the views (and page tables) make.
absl::Status ResolveSides(const AttentionSpec& spec, const Sequences& sequences,
                          AttentionProblem& p) {
  const std::array<RequestedView, 3>& views = *spec.views;
  for (int i = 0; i < 3; ++i) ATTND_RETURN_IF_ERROR(CheckView(views[i], i, spec.dtype));
  if (views[1].strides.size() != views[2].strides.size()) {
    return InvalidField(
        reason::kInvalidField, "spec.views.v.strides",
        absl::StrCat("has ", views[2].strides.size(), " entries, but spec.views.k.strides has ",
                     views[1].strides.size()));
  }
  p.q_is_thd = views[0].strides.size() == 3;
  p.kv_is_thd = views[1].strides.size() == 3;
  p.is_paged = sequences.page_table_k.has_value() || sequences.page_table_v.has_value();
  if (p.is_paged && p.kv_is_thd) {
    return InvalidField(reason::kInvalidField, "spec.views.k.strides",
                        "has 3 entries; with page tables it needs 4 (page, row, head, dim)");
  }
  if (p.is_paged != spec.page_size.has_value()) {
    return p.is_paged ? InvalidField(reason::kMissingField, "spec.page_size",
                                     "is required with layout STRIDED and page tables")
                      : InvalidField(reason::kMisplacedField, "spec.page_size",
                                     "is set, but sequences.page_table_k is not");
  }
  return absl::OkStatus();
}

// Exactly the buffers that the views name, of the spec's dtype; token rows of THD sides.
absl::Status CheckBuffers(const AttentionSpec& spec, const InputDescs& inputs, Sizes& sizes,
                          AttentionProblem& p) {
  std::array<bool, kNumInputBuffers> used{};
  for (int i = 0; i < 3; ++i) {
    const Buffer buffer = (*spec.views)[i].buffer;
    used[static_cast<int>(buffer)] = true;
    if (!inputs.buffers[static_cast<int>(buffer)]) {
      return InvalidField(reason::kMissingField, InputField(buffer),
                          absl::StrCat("is missing: ", Sub(i, "buffer"), " names it"));
    }
  }
  for (int i = 0; i < kNumInputBuffers; ++i) {
    if (!inputs.buffers[i]) continue;
    const std::string field = InputField(static_cast<Buffer>(i));
    if (!used[i]) {
      return InvalidField(reason::kMisplacedField, field,
                          "is set, but no view of spec.views names it");
    }
    ATTND_RETURN_IF_ERROR(CheckDesc(*inputs.buffers[i], spec.dtype, field));
  }
  p.inputs = inputs.buffers;
  for (int i = 0; i < 3; ++i) {
    if ((*spec.views)[i].strides.size() != 3) continue;
    const Buffer buffer = (*spec.views)[i].buffer;
    const TensorDesc& desc = *p.inputs[static_cast<int>(buffer)];
    if (desc.shape.empty()) {
      return InvalidField(reason::kShapeMismatch, InputField(buffer),
                          "has rank 0; the first axis of a THD side's buffer counts its rows");
    }
    ATTND_RETURN_IF_ERROR(
        Learn(i == 0 ? sizes.t_q : sizes.t_kv, desc.shape[0], InputField(buffer), "axis 0 (t)"));
  }
  return absl::OkStatus();
}

void PlaceView(const RequestedView& requested, TensorView& view) {
  const std::vector<int64_t>& s = requested.strides;
  view.buffer = requested.buffer;
  view.byte_offset = requested.byte_offset;
  view.strides = s.size() == 3 ? Strides{0, s[0], s[1], s[2]} : Strides{s[0], s[1], s[2], s[3]};
  view.start_multiplier = s.size() == 3 ? s[0] : 0;
}

// Groups of query heads, where no head stride alone says where these lie.
void PlaceGroups(const RequestedView& requested, int64_t h, int64_t g, TensorView& view) {
  const int64_t heads = h / g;
  if (!requested.group_stride || g == 1 || h % g != 0) return;
  if (heads == 1) {
    view.strides.head = *requested.group_stride;
  } else if (view.strides.head > 0 && *requested.group_stride / view.strides.head == heads &&
             *requested.group_stride % view.strides.head == 0) {
    return;
  } else {
    view.group_heads = heads;
    view.group_stride = *requested.group_stride;
  }
}

// One past the last element that a view touches with these extents, 0 where it touches none;
// nullopt where that passes 2^63.
struct Extents {
  int64_t batch, seq, heads, dims;
};
std::optional<int64_t> End(const TensorView& view, DType dtype, const Extents& n) {
  if (n.batch == 0 || n.seq == 0) return 0;
  int64_t last = view.byte_offset / SizeOf(dtype);
  const int64_t group = view.group_heads == 0 ? n.heads : view.group_heads;
  const std::pair<int64_t, int64_t> axes[] = {{n.batch, view.strides.batch},
                                              {n.seq, view.strides.seq},
                                              {n.heads / group, view.group_stride},
                                              {group, view.strides.head},
                                              {n.dims, view.strides.dim}};
  for (const auto& [extent, stride] : axes) {
    int64_t reach;
    if (__builtin_mul_overflow(extent - 1, stride, &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return std::nullopt;
    }
  }
  int64_t bytes;
  if (__builtin_add_overflow(last, 1, &last) ||
      __builtin_mul_overflow(last, SizeOf(dtype), &bytes)) {
    return std::nullopt;
  }
  return last;
}

// Pages of a pool that lie inside its buffer whole. Without a buffer: as many as the tables have
// entries, a pool without spare pages.
int64_t CountPages(const TensorView& view, const AttentionProblem& p, const Extents& page,
                   const Sequences& sequences) {
  const std::optional<TensorDesc>& desc = p.inputs[static_cast<int>(view.buffer)];
  constexpr int64_t kMostPages = int64_t{1} << 31;  // Tables are INT32.
  if (!desc) {
    const auto& table = view.buffer == p.k.buffer ? sequences.page_table_k : sequences.page_table_v;
    return table ? std::min(NumElements(table->shape).value_or(0), kMostPages) : 0;
  }
  const std::optional<int64_t> first = End(view, p.dtype, page);
  const int64_t room = *NumElements(desc->shape) - first.value_or(INT64_MAX);
  if (room < 0) return 0;
  return view.strides.batch == 0 ? kMostPages : std::min(room / view.strides.batch + 1, kMostPages);
}

// Checks that the view lies inside its buffer; with `derive` (Plan without inputs) makes the buffer
// just large enough instead.
absl::Status CheckBounds(const TensorView& view, int which, const Extents& extents, bool derive,
                         AttentionProblem& p) {
  const std::optional<int64_t> end = End(view, p.dtype, extents);
  if (!end) {
    return InvalidField(reason::kOverflow, kViewFields[which],
                        "reaches past 2^63 bytes with these strides");
  }
  std::optional<TensorDesc>& desc = p.inputs[static_cast<int>(view.buffer)];
  if (derive) {
    if (!desc) desc = TensorDesc{p.dtype, {0}};
    desc->shape[0] = std::max(desc->shape[0], *end);
    return absl::OkStatus();
  }
  const int64_t have = *NumElements(desc->shape);
  if (*end <= have) return absl::OkStatus();
  return InvalidField(
      reason::kOutOfBuffer, kViewFields[which],
      absl::StrCat("reaches element ", *end - 1, " of ", InputField(view.buffer), ", which has ",
                   have, " elements (shape ", ShapeString(desc->shape), ")"));
}

// What each of q, k and v covers of its buffer. A THD side is used up to its last row, a paged one
// as a whole pool.
std::array<Extents, 3> ExtentsOf(const AttentionSpec& spec, const Sequences& sequences,
                                 const AttentionProblem& p) {
  const int64_t h = *spec.num_heads, g = *spec.num_kv_heads;
  const int64_t d_qk = *spec.head_dim_qk, d_v = *spec.head_dim_v;
  auto side = [&](bool is_thd, const std::vector<int64_t>& padded, const std::vector<int64_t>& cu,
                  int64_t max_seqlen) {
    return is_thd ? Extents{1, padded.empty() ? cu.back() : padded.back(), 1, 1}
                  : Extents{p.batch, max_seqlen, 1, 1};
  };
  const Extents q =
      side(p.q_is_thd, sequences.cu_seqlens_q_padded, sequences.cu_seqlens_q, p.max_seqlen_q);
  Extents k =
      side(p.kv_is_thd, sequences.cu_seqlens_kv_padded, sequences.cu_seqlens_kv, p.max_seqlen_kv);
  Extents v = k;
  if (p.is_paged) {
    k = {p.num_pages_k, p.page_size, 1, 1};
    v = {p.num_pages_v, p.page_size, 1, 1};
  }
  return {Extents{q.batch, q.seq, h, d_qk}, {k.batch, k.seq, g, d_qk}, {v.batch, v.seq, g, d_v}};
}

}  // namespace

absl::Status ResolveStrided(const AttentionSpec& spec, const Sequences& sequences,
                            const InputDescs& inputs, bool derive, Sizes& sizes,
                            AttentionProblem& p) {
  ATTND_RETURN_IF_ERROR(CheckRequiredSpec(spec));
  ATTND_RETURN_IF_ERROR(ResolveSides(spec, sequences, p));
  ATTND_RETURN_IF_ERROR(LearnSpecSizes(spec, p, sizes));
  if (derive) {
    ATTND_RETURN_IF_ERROR(DeriveImpliedSizes(sequences, p, Packing::kSeparate, sizes));
  } else {
    ATTND_RETURN_IF_ERROR(CheckBuffers(spec, inputs, sizes, p));
  }
  TensorView* const views[] = {&p.q, &p.k, &p.v};
  for (int i = 0; i < 3; ++i) PlaceView((*spec.views)[i], *views[i]);
  const int64_t g = *spec.num_kv_heads;
  if (p.is_paged) {
    sizes.pages_k.value = CountPages(p.k, p, {1, *spec.page_size, g, *spec.head_dim_qk}, sequences);
    sizes.pages_v.value = CountPages(p.v, p, {1, *spec.page_size, g, *spec.head_dim_v}, sequences);
  }
  ATTND_RETURN_IF_ERROR(ResolveSequences(spec, sequences, false, sizes, p));
  PlaceGroups((*spec.views)[0], *spec.num_heads, g, p.q);
  const std::array<Extents, 3> all = ExtentsOf(spec, sequences, p);
  for (int i = 0; i < 3; ++i) {
    // One row for any number of positions would make a few bytes cost any time.
    if (views[i]->strides.seq > 0 || all[i].seq <= 1) continue;
    return InvalidField(
        reason::kInvalidField, Sub(i, "strides"),
        absl::StrCat("has seq stride 0 for ", all[i].seq, " rows; rows must lie apart"));
  }
  for (int i = 0; i < 3; ++i) {
    ATTND_RETURN_IF_ERROR(CheckBounds(*views[i], i, all[i], derive, p));
  }
  return absl::OkStatus();
}

}  // namespace attnd
