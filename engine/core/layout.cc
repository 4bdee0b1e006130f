// How a request becomes a problem, in this order: sizes (from the spec, then from the buffers, each
// learned once and compared ever after), sequences, views, mask and features. Sizes carry the name
// of the field that first said them, so that a contradiction names both sides.
//
// V's offset in a packed buffer is a whole number of pack strides, so which head dimension it uses
// is not a choice: one buffer has one last axis, and both head dimensions are compared with it.

#include "engine/core/layout.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/layout_table.h"
#include "engine/core/resolve_checks.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

std::string InputField(Buffer buffer) { return absl::StrCat("inputs.", View(Name(buffer))); }

char AxisLetter(Axis axis) {
  switch (axis) {
    case Axis::kBatch: return 'b';
    case Axis::kSeq: return 's';
    case Axis::kToken: return 't';
    case Axis::kPage: return 'P';
    case Axis::kRow: return 'r';
    case Axis::kPack: return 'n';
    case Axis::kHead: return 'h';
    case Axis::kDim: return 'd';
  }
  return '?';
}

// Row-major strides by position. Tensor `index` of a packed buffer starts that many pack strides
// in.
TensorView RowMajorView(const BufferAxes& buffer, const TensorDesc& desc, int64_t index) {
  TensorView view{.buffer = buffer.buffer};
  int64_t stride = 1;
  for (size_t i = desc.shape.size(); i-- > 0; stride *= std::max<int64_t>(desc.shape[i], 1)) {
    switch (buffer.axes[i]) {
      case Axis::kBatch:
      case Axis::kPage: view.strides.batch = stride; break;
      case Axis::kSeq:
      case Axis::kRow: view.strides.seq = stride; break;
      case Axis::kToken: view.strides.seq = view.start_multiplier = stride; break;
      case Axis::kPack: view.byte_offset = index * stride * SizeOf(desc.dtype); break;
      case Axis::kHead: view.strides.head = stride; break;
      case Axis::kDim: view.strides.dim = stride; break;
    }
  }
  return view;
}

class Resolver {
 public:
  Resolver(const AttentionSpec& spec, const Sequences& sequences, const InputDescs& inputs,
           const ResolveOptions& options)
      : spec_(spec), sequences_(sequences), inputs_(inputs), options_(options) {}

  absl::StatusOr<AttentionProblem> Run() {
    ATTND_RETURN_IF_ERROR(CheckSpecScalars(spec_));
    ATTND_RETURN_IF_ERROR(StartProblem());
    if (spec_.layout == Layout::kStrided) {
      q_format_ =
          spec_.views && (*spec_.views)[0].strides.size() == 3 ? Format::kThd : Format::kBshd;
      ATTND_RETURN_IF_ERROR(ResolveStrided(spec_, sequences_, inputs_, Derives(), sizes_, p_));
    } else {
      ATTND_RETURN_IF_ERROR(ResolveNamed(*FindLayout(spec_.layout)));
    }
    ATTND_RETURN_IF_ERROR(DescribeOutputs());
    ATTND_RETURN_IF_ERROR(ResolveMaskAndFeatures(spec_, inputs_, p_));
    return std::move(p_);
  }

 private:
  absl::Status StartProblem();
  bool Derives() const;
  absl::Status ResolveNamed(const LayoutEntry& entry);

  absl::Status CheckPackedSpec(const LayoutEntry& entry) const;
  absl::Status CollectBuffers(const std::vector<BufferAxes>& buffers);
  absl::Status DeriveBuffers(Packing packing, const std::vector<BufferAxes>& buffers);
  absl::Status LearnBuffer(const BufferAxes& buffer);
  absl::Status LearnAxis(const BufferAxes& buffer, size_t position);
  TensorView InputView(const BufferAxes& buffer, int64_t index) const {
    return RowMajorView(buffer, *p_.inputs[static_cast<int>(buffer.buffer)], index);
  }
  absl::Status DescribeOutputs();

  const AttentionSpec& spec_;
  const Sequences& sequences_;
  const InputDescs& inputs_;
  const ResolveOptions& options_;
  Sizes sizes_;
  Format q_format_ = Format::kBshd;
  AttentionProblem p_;
};

absl::Status Resolver::StartProblem() {
  p_.dtype = spec_.dtype;
  p_.out_dtype = options_.out_dtype == DType::kUnspecified ? spec_.dtype : options_.out_dtype;
  if (p_.out_dtype != p_.dtype && p_.out_dtype != DType::kFloat32) {
    return InvalidField(reason::kInvalidField, "out_dtype",
                        absl::StrCat("is ", View(Name(p_.out_dtype)), "; it must be spec.dtype (",
                                     View(Name(p_.dtype)), ") or FLOAT32"));
  }
  return absl::OkStatus();
}

// Whether the shapes are to be made from the spec.
bool Resolver::Derives() const {
  return options_.derive_missing_shapes &&
         std::none_of(inputs_.buffers.begin(), inputs_.buffers.end(),
                      [](const auto& desc) { return desc.has_value(); });
}

// ---------------------------------------------------------------------------- named layouts

absl::Status Resolver::ResolveNamed(const LayoutEntry& entry) {
  q_format_ = entry.q_format;
  p_.q_is_thd = entry.q_format == Format::kThd;
  p_.kv_is_thd = entry.kv_format == Format::kThd;
  p_.is_paged = entry.paged;
  if (spec_.views) {
    return InvalidField(reason::kMisplacedField, "spec.views",
                        absl::StrCat("is set, but layout ", View(entry.name),
                                     " says itself where the tensors lie; views go with STRIDED"));
  }
  if (!entry.paged && spec_.page_size) {
    return InvalidField(reason::kMisplacedField, "spec.page_size",
                        absl::StrCat("is set, but layout ", View(entry.name), " is not paged"));
  }
  ATTND_RETURN_IF_ERROR(CheckPackedSpec(entry));
  ATTND_RETURN_IF_ERROR(LearnSpecSizes(spec_, p_, sizes_));
  const std::vector<BufferAxes> buffers = BuffersOf(entry);
  if (Derives()) {
    ATTND_RETURN_IF_ERROR(DeriveBuffers(entry.packing, buffers));
  } else {
    ATTND_RETURN_IF_ERROR(CollectBuffers(buffers));
  }
  for (const BufferAxes& buffer : buffers) ATTND_RETURN_IF_ERROR(LearnBuffer(buffer));
  ATTND_RETURN_IF_ERROR(ResolveSequences(spec_, sequences_, PacksQ(entry.packing), sizes_, p_));
  switch (entry.packing) {
    case Packing::kQkvBeforeHead:
    case Packing::kQkvAfterHead:
      p_.q = InputView(buffers[0], 0);
      p_.k = InputView(buffers[0], 1);
      p_.v = InputView(buffers[0], 2);
      break;
    case Packing::kKvBeforeHead:
    case Packing::kKvAfterHead:
      p_.q = InputView(buffers[0], 0);
      p_.k = InputView(buffers[1], 0);
      p_.v = InputView(buffers[1], 1);
      break;
    case Packing::kSeparate:
      p_.q = InputView(buffers[0], 0);
      p_.k = InputView(buffers[1], 0);
      p_.v = InputView(buffers[2], 0);
      break;
  }
  return absl::OkStatus();
}

// What a packed layout cannot express, said of the spec before any shape is looked at.
absl::Status Resolver::CheckPackedSpec(const LayoutEntry& entry) const {
  auto require_equal = [&](const std::optional<int64_t>& a, std::string_view a_field,
                           const std::optional<int64_t>& b,
                           std::string_view b_field) -> absl::Status {
    if (!a || !b || *a == *b) return absl::OkStatus();
    return InvalidField(
        reason::kShapeMismatch, b_field,
        absl::StrCat("is ", *b, ", but ", View(a_field), " is ", *a, ": layout ", View(entry.name),
                     " (", View(entry.shapes), ") has one axis for both"));
  };
  if (entry.packing == Packing::kSeparate) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(
      require_equal(spec_.head_dim_qk, "spec.head_dim_qk", spec_.head_dim_v, "spec.head_dim_v"));
  if (!PacksQ(entry.packing)) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(
      require_equal(spec_.num_heads, "spec.num_heads", spec_.num_kv_heads, "spec.num_kv_heads"));
  return require_equal(spec_.max_seqlen_q, "spec.max_seqlen_q", spec_.max_seqlen_kv,
                       "spec.max_seqlen_kv");
}

absl::Status Resolver::CollectBuffers(const std::vector<BufferAxes>& buffers) {
  for (int i = 0; i < kNumInputBuffers; ++i) {
    const auto buffer = static_cast<Buffer>(i);
    const bool needed = std::any_of(buffers.begin(), buffers.end(),
                                    [&](const BufferAxes& b) { return b.buffer == buffer; });
    if (needed == inputs_.buffers[i].has_value()) continue;
    return InvalidField(needed ? reason::kMissingField : reason::kMisplacedField,
                        InputField(buffer),
                        absl::StrCat(needed ? "is missing: layout " : "is set, but layout ",
                                     View(Name(spec_.layout)), needed ? " needs " : " has only ",
                                     View(LayoutShapes(spec_.layout))));
  }
  p_.inputs = inputs_.buffers;
  return absl::OkStatus();
}

// Plan without inputs: the shapes that the spec's sizes (and the sequences' ends) imply.
absl::Status Resolver::DeriveBuffers(Packing packing, const std::vector<BufferAxes>& buffers) {
  ATTND_RETURN_IF_ERROR(DeriveImpliedSizes(sequences_, p_, packing, sizes_));
  for (const BufferAxes& buffer : buffers) {
    const bool is_q = buffer.buffer == Buffer::kQ || buffer.buffer == Buffer::kQkv;
    TensorDesc desc{spec_.dtype, {}};
    for (Axis axis : buffer.axes) {
      const KnownSize* size = nullptr;
      switch (axis) {
        case Axis::kPack: desc.shape.push_back(buffer.packed); continue;
        case Axis::kBatch: size = &sizes_.batch; break;
        case Axis::kSeq: size = is_q ? &sizes_.s_q : &sizes_.s_kv; break;
        case Axis::kToken: size = is_q ? &sizes_.t_q : &sizes_.t_kv; break;
        case Axis::kPage: size = &sizes_.pages_k; break;
        case Axis::kRow: size = &sizes_.page_size; break;
        case Axis::kHead: size = is_q ? &sizes_.h : &sizes_.g; break;
        case Axis::kDim: size = buffer.buffer == Buffer::kV ? &sizes_.d_v : &sizes_.d_qk; break;
      }
      if (!size->value) {
        return InvalidField(reason::kMissingField, size->spec_field,
                            "is required where inputs are absent");
      }
      desc.shape.push_back(*size->value);
    }
    p_.inputs[static_cast<int>(buffer.buffer)] = std::move(desc);
  }
  return absl::OkStatus();
}

absl::Status Resolver::LearnBuffer(const BufferAxes& buffer) {
  const std::string field = InputField(buffer.buffer);
  const TensorDesc& desc = *p_.inputs[static_cast<int>(buffer.buffer)];
  ATTND_RETURN_IF_ERROR(CheckDesc(desc, spec_.dtype, field));
  if (desc.shape.size() != buffer.axes.size()) {
    return InvalidField(
        reason::kShapeMismatch, field,
        absl::StrCat("has rank ", desc.shape.size(), " (shape ", ShapeString(desc.shape),
                     "), but layout ", View(Name(spec_.layout)), " needs rank ", buffer.axes.size(),
                     ": ", View(LayoutShapes(spec_.layout))));
  }
  for (size_t i = 0; i < buffer.axes.size(); ++i) ATTND_RETURN_IF_ERROR(LearnAxis(buffer, i));
  return absl::OkStatus();
}

absl::Status Resolver::LearnAxis(const BufferAxes& buffer, size_t position) {
  const bool is_q = buffer.buffer == Buffer::kQ;
  const bool is_qkv = buffer.buffer == Buffer::kQkv;
  const bool is_kv = buffer.buffer == Buffer::kKv;
  const Axis axis = buffer.axes[position];
  const int64_t value = p_.inputs[static_cast<int>(buffer.buffer)]->shape[position];
  const std::string field = InputField(buffer.buffer);
  const std::string where =
      absl::StrCat("axis ", position, " (", std::string(1, AxisLetter(axis)), ")");
  auto learn = [&](KnownSize& size) { return Learn(size, value, field, where); };
  switch (axis) {
    case Axis::kPack:
      if (value == buffer.packed) return absl::OkStatus();
      return InvalidField(reason::kShapeMismatch, field,
                          absl::StrCat("has ", value, " in axis ", position, ", but layout ",
                                       View(Name(spec_.layout)), " needs ", buffer.packed,
                                       " there: ", View(LayoutShapes(spec_.layout))));
    case Axis::kBatch: return learn(sizes_.batch);
    case Axis::kPage: return learn(buffer.buffer == Buffer::kV ? sizes_.pages_v : sizes_.pages_k);
    case Axis::kRow: return learn(sizes_.page_size);
    case Axis::kSeq:
      if (is_q || is_qkv) ATTND_RETURN_IF_ERROR(learn(sizes_.s_q));
      return is_q ? absl::OkStatus() : learn(sizes_.s_kv);
    case Axis::kToken:
      if (is_q || is_qkv) ATTND_RETURN_IF_ERROR(learn(sizes_.t_q));
      return is_q ? absl::OkStatus() : learn(sizes_.t_kv);
    case Axis::kHead:
      if (is_q || is_qkv) ATTND_RETURN_IF_ERROR(learn(sizes_.h));
      return is_q ? absl::OkStatus() : learn(sizes_.g);
    case Axis::kDim:
      if (buffer.buffer != Buffer::kV) ATTND_RETURN_IF_ERROR(learn(sizes_.d_qk));
      return is_qkv || is_kv || buffer.buffer == Buffer::kV ? learn(sizes_.d_v) : absl::OkStatus();
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------- outputs

absl::Status Resolver::DescribeOutputs() {
  p_.batch = *sizes_.batch.value;
  p_.num_heads = *sizes_.h.value;
  p_.num_kv_heads = *sizes_.g.value;
  p_.head_dim_qk = *sizes_.d_qk.value;
  p_.head_dim_v = *sizes_.d_v.value;
  if (p_.num_heads % p_.num_kv_heads != 0) {
    return InvalidField(
        reason::kShapeMismatch, "spec.num_kv_heads",
        absl::StrCat("is ", p_.num_kv_heads, " (", sizes_.g.source, "), which does not divide ",
                     "spec.num_heads, ", p_.num_heads, " (", sizes_.h.source, ")"));
  }
  const BufferAxes axes{Buffer::kOut, AxesOf(q_format_, false)};
  p_.out_desc.dtype = p_.out_dtype;
  for (Axis axis : axes.axes) {
    p_.out_desc.shape.push_back(axis == Axis::kBatch   ? p_.batch
                                : axis == Axis::kSeq   ? p_.max_seqlen_q
                                : axis == Axis::kToken ? *sizes_.t_q.value
                                : axis == Axis::kHead  ? p_.num_heads
                                                       : p_.head_dim_v);
  }
  const int64_t h = p_.num_heads, s = p_.max_seqlen_q;
  p_.lse_desc.dtype = DType::kFloat32;
  p_.lse_desc.shape = p_.q_is_thd ? std::vector<int64_t>{*sizes_.t_q.value, h}
                                  : std::vector<int64_t>{p_.batch, h, s};
  ATTND_RETURN_IF_ERROR(CheckDesc(p_.out_desc, p_.out_dtype, "out"));
  ATTND_RETURN_IF_ERROR(CheckDesc(p_.lse_desc, DType::kFloat32, "lse"));
  p_.lse = p_.q_is_thd ? Strides{0, h, 1, 0} : Strides{h * s, 1, s, 0};
  p_.out = RowMajorView(axes, p_.out_desc, 0);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AttentionProblem> Resolve(const AttentionSpec& spec, const Sequences& sequences,
                                         const InputDescs& inputs, const ResolveOptions& options) {
  return Resolver(spec, sequences, inputs, options).Run();
}

absl::Status CheckPageTable(const AttentionProblem& problem, std::span<const int32_t> page_table,
                            int64_t num_pages, std::string_view field) {
  for (int64_t i = 0; i < problem.batch; ++i) {
    const int64_t rows = problem.sequences[i].kv_len;
    const int64_t used = rows / problem.page_size + (rows % problem.page_size != 0);
    for (int64_t j = 0; j < used; ++j) {
      const int32_t page = page_table[i * problem.pages_per_sequence + j];
      if (page < 0 || page >= num_pages) {
        return InvalidField(reason::kOutOfBuffer, field,
                            absl::StrCat("has page ", page, " at [", i, ", ", j,
                                         "]; the pool has pages 0 to ", num_pages - 1));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSoftmaxOffset(std::span<const float> softmax_offset) {
  for (size_t head = 0; head < softmax_offset.size(); ++head) {
    const float value = softmax_offset[head];
    if (value < std::numeric_limits<float>::infinity()) continue;
    return InvalidField(
        reason::kInvalidField, "softmax_offset",
        absl::StrCat("is ", value, " for head ", head, "; it must be finite, or -inf for no sink"));
  }
  return absl::OkStatus();
}

}  // namespace attnd
