// Lengths, positions and page tables. cu_seqlens_* are lengths (as differences) and, where no
// padded array says otherwise, positions too; gaps and tails belong to nobody.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/core/resolve_checks.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

// One side (Q, or K and V) of the sequences.
struct Side {
  const std::vector<int64_t>& cu;
  const std::vector<int64_t>& padded;
  std::string_view cu_field;
  std::string_view padded_field;
  bool is_thd;
  bool is_paged;
  const std::optional<int64_t>& axis;    // Dense: the allocated length.
  const std::optional<int64_t>& tokens;  // THD: rows of the buffer.
  const std::optional<int64_t>& bound;   // spec.max_seqlen_*
  std::string_view bound_field;
};

absl::Status CheckCuSeqlens(const Side& side) {
  if (side.cu.front() != 0) {
    return InvalidField(reason::kInvalidField, side.cu_field,
                        absl::StrCat("starts at ", side.cu.front(), "; it must start at 0"));
  }
  for (size_t i = 1; i < side.cu.size(); ++i) {
    if (side.cu[i] < side.cu[i - 1]) {
      return InvalidField(
          reason::kInvalidField, side.cu_field,
          absl::StrCat("decreases from ", side.cu[i - 1], " to ", side.cu[i], " at entry ", i));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPadded(const Side& side) {
  const std::vector<int64_t>& pad = side.padded;
  if (!side.is_thd) {
    return InvalidField(reason::kMisplacedField, side.padded_field,
                        "is set, but this side is not THD: only token buffers have positions");
  }
  if (pad.size() != side.cu.size()) {
    return InvalidField(reason::kSizeMismatch, side.padded_field,
                        absl::StrCat("has ", pad.size(), " entries, but ", View(side.cu_field),
                                     " has ", side.cu.size()));
  }
  if (pad.front() < 0) {
    return InvalidField(reason::kInvalidField, side.padded_field,
                        absl::StrCat("starts at ", pad.front(), "; it must not be negative"));
  }
  for (size_t i = 1; i < pad.size(); ++i) {
    const int64_t length = side.cu[i] - side.cu[i - 1];
    if (pad[i] < pad[i - 1] || pad[i] - pad[i - 1] < length) {
      return InvalidField(
          reason::kInvalidField, side.padded_field,
          absl::StrCat("goes from ", pad[i - 1], " to ", pad[i], " at entry ", i,
                       ", which leaves no room for sequence ", i - 1, " of length ", length));
    }
  }
  return absl::OkStatus();
}

// Lengths against what holds them: the axis, the token buffer, and the spec's bound.
absl::Status CheckLengths(const Side& side, int64_t longest) {
  if (side.is_thd) {
    const bool padded = !side.padded.empty();
    const int64_t end = padded ? side.padded.back() : side.cu.back();
    if (side.tokens && end > *side.tokens) {
      return InvalidField(
          reason::kOutOfBuffer, padded ? side.padded_field : side.cu_field,
          absl::StrCat("ends at row ", end, ", but the token buffer has ", *side.tokens, " rows"));
    }
  } else if (!side.is_paged && longest > *side.axis) {
    return InvalidField(reason::kOutOfBuffer, side.cu_field,
                        absl::StrCat("has a sequence of length ", longest,
                                     ", but the buffer's sequence axis is ", *side.axis));
  }
  if ((side.is_thd || side.is_paged) && side.bound && longest > *side.bound) {
    return InvalidField(reason::kInvalidField, side.bound_field,
                        absl::StrCat("is ", *side.bound, ", but ", View(side.cu_field),
                                     " has a sequence of length ", longest));
  }
  return absl::OkStatus();
}

absl::Status CheckSide(const Side& side, int64_t& longest) {
  if (side.cu.empty()) {
    if (!side.padded.empty()) return CheckPadded(side);
    return absl::OkStatus();
  }
  ATTND_RETURN_IF_ERROR(CheckCuSeqlens(side));
  if (!side.padded.empty()) ATTND_RETURN_IF_ERROR(CheckPadded(side));
  longest = 0;
  for (size_t i = 1; i < side.cu.size(); ++i) {
    longest = std::max(longest, side.cu[i] - side.cu[i - 1]);
  }
  return CheckLengths(side, longest);
}

absl::Status CheckPresence(const Sequences& sequences, const AttentionProblem& p) {
  const bool has_q = !sequences.cu_seqlens_q.empty();
  const bool has_kv = !sequences.cu_seqlens_kv.empty();
  const bool required = p.q_is_thd || p.kv_is_thd || p.is_paged;
  if ((required || has_kv) && !has_q) {
    return InvalidField(reason::kMissingField, "sequences.cu_seqlens_q",
                        required ? "is required for THD and paged layouts"
                                 : "is missing: it is set wherever cu_seqlens_kv is");
  }
  if ((required || has_q) && !has_kv) {
    return InvalidField(reason::kMissingField, "sequences.cu_seqlens_kv",
                        required ? "is required for THD and paged layouts"
                                 : "is missing: it is set wherever cu_seqlens_q is");
  }
  return absl::OkStatus();
}

absl::Status CheckSameTokens(const Sequences& sequences) {
  if (sequences.cu_seqlens_q != sequences.cu_seqlens_kv) {
    return InvalidField(reason::kInvalidField, "sequences.cu_seqlens_kv",
                        "differs from cu_seqlens_q, but Q, K and V share one axis in this layout");
  }
  if (sequences.cu_seqlens_q_padded != sequences.cu_seqlens_kv_padded) {
    return InvalidField(reason::kInvalidField, "sequences.cu_seqlens_kv_padded",
                        "differs from cu_seqlens_q_padded, but Q, K and V share one axis in this "
                        "layout");
  }
  return absl::OkStatus();
}

absl::Status ResolvePaging(const Sequences& sequences, const Sizes& sizes, AttentionProblem& p) {
  const struct {
    const std::optional<TensorDesc>& table;
    std::string_view field;
  } tables[] = {{sequences.page_table_k, "sequences.page_table_k"},
                {sequences.page_table_v, "sequences.page_table_v"}};
  for (const auto& [table, field] : tables) {
    if (table.has_value() != p.is_paged) {
      return p.is_paged
                 ? InvalidField(reason::kMissingField, field, "is required with paged K and V")
                 : InvalidField(reason::kMisplacedField, field,
                                "is set, but the layout is not paged");
    }
    if (!p.is_paged) continue;
    ATTND_RETURN_IF_ERROR(CheckDesc(*table, DType::kInt32, field));
    if (table->shape.size() != 2 || table->shape[0] != *sizes.batch.value) {
      return InvalidField(reason::kShapeMismatch, field,
                          absl::StrCat("has shape ", ShapeString(table->shape),
                                       "; it must be [b, pages] with b = ", *sizes.batch.value));
    }
  }
  if (!p.is_paged) return absl::OkStatus();
  if (sequences.page_table_v->shape != sequences.page_table_k->shape) {
    return InvalidField(
        reason::kShapeMismatch, "sequences.page_table_v",
        absl::StrCat("has shape ", ShapeString(sequences.page_table_v->shape),
                     ", but page_table_k has ", ShapeString(sequences.page_table_k->shape)));
  }
  p.page_size = *sizes.page_size.value;
  p.pages_per_sequence = sequences.page_table_k->shape[1];
  p.num_pages_k = *sizes.pages_k.value;
  p.num_pages_v = *sizes.pages_v.value;
  // A table names pages by INT32, so its capacity in rows is small enough to compute only where it
  // does not pass 2^63.
  int64_t capacity = 0;
  if (__builtin_mul_overflow(p.pages_per_sequence, p.page_size, &capacity)) {
    return InvalidField(reason::kOverflow, "spec.page_size",
                        "times the pages of a sequence passes 2^63");
  }
  if (p.max_seqlen_kv > capacity) {
    return InvalidField(
        reason::kOutOfBuffer, "sequences.page_table_k",
        absl::StrCat("has ", p.pages_per_sequence, " pages of ", p.page_size,
                     " rows for each sequence, but max_seqlen_kv is ", p.max_seqlen_kv));
  }
  return absl::OkStatus();
}

void FillSequences(const Sequences& sequences, AttentionProblem& p) {
  auto row = [](const std::vector<int64_t>& padded, const std::vector<int64_t>& cu, size_t i) {
    return padded.empty() ? cu[i] : padded[i];
  };
  p.sequences.resize(p.batch);
  for (size_t i = 0; i < p.sequences.size(); ++i) {
    SequenceExtent& s = p.sequences[i];
    if (sequences.cu_seqlens_q.empty()) {
      s = {p.max_seqlen_q, p.max_seqlen_kv, 0, 0};
      continue;
    }
    s.q_len = sequences.cu_seqlens_q[i + 1] - sequences.cu_seqlens_q[i];
    s.kv_len = sequences.cu_seqlens_kv[i + 1] - sequences.cu_seqlens_kv[i];
    if (p.q_is_thd) s.q_row = row(sequences.cu_seqlens_q_padded, sequences.cu_seqlens_q, i);
    if (p.kv_is_thd) s.kv_row = row(sequences.cu_seqlens_kv_padded, sequences.cu_seqlens_kv, i);
  }
}

// Whether every row of the sides that have axes or token buffers belongs to a sequence.
bool EveryRowIsUsed(const AttentionProblem& p, const Sizes& sizes) {
  int64_t q = 0, kv = 0;
  for (const SequenceExtent& s : p.sequences) {
    if (!p.q_is_thd && s.q_len != p.max_seqlen_q) return false;
    if (!p.kv_is_thd && s.kv_len != p.max_seqlen_kv) return false;
    if (p.q_is_thd) q += s.q_len;
    if (p.kv_is_thd) kv += s.kv_len;
  }
  return (!p.q_is_thd || q == *sizes.t_q.value) && (!p.kv_is_thd || kv == *sizes.t_kv.value);
}

}  // namespace

absl::Status ResolveSequences(const AttentionSpec& spec, const Sequences& sequences,
                              bool same_tokens, Sizes& sizes, AttentionProblem& p) {
  ATTND_RETURN_IF_ERROR(CheckPresence(sequences, p));
  if (same_tokens) ATTND_RETURN_IF_ERROR(CheckSameTokens(sequences));
  const Side q{sequences.cu_seqlens_q,
               sequences.cu_seqlens_q_padded,
               "sequences.cu_seqlens_q",
               "sequences.cu_seqlens_q_padded",
               p.q_is_thd,
               false,
               sizes.s_q.value,
               sizes.t_q.value,
               spec.max_seqlen_q,
               "spec.max_seqlen_q"};
  const Side kv{sequences.cu_seqlens_kv,
                sequences.cu_seqlens_kv_padded,
                "sequences.cu_seqlens_kv",
                "sequences.cu_seqlens_kv_padded",
                p.kv_is_thd,
                p.is_paged,
                sizes.s_kv.value,
                sizes.t_kv.value,
                spec.max_seqlen_kv,
                "spec.max_seqlen_kv"};
  for (const Side* side : {&q, &kv}) {
    if (side->cu.empty()) continue;
    ATTND_RETURN_IF_ERROR(Learn(sizes.batch, static_cast<int64_t>(side->cu.size()) - 1,
                                side->cu_field, "its number of sequences"));
  }
  int64_t longest_q = 0, longest_kv = 0;
  ATTND_RETURN_IF_ERROR(CheckSide(q, longest_q));
  ATTND_RETURN_IF_ERROR(CheckSide(kv, longest_kv));
  p.batch = *sizes.batch.value;
  p.max_seqlen_q = p.q_is_thd ? spec.max_seqlen_q.value_or(longest_q) : *sizes.s_q.value;
  p.max_seqlen_kv =
      p.kv_is_thd || p.is_paged ? spec.max_seqlen_kv.value_or(longest_kv) : *sizes.s_kv.value;
  ATTND_RETURN_IF_ERROR(ResolvePaging(sequences, sizes, p));
  ATTND_RETURN_IF_ERROR(CheckLimits(sizes));
  FillSequences(sequences, p);
  p.has_lengths = !EveryRowIsUsed(p, sizes);
  return absl::OkStatus();
}

}  // namespace attnd
