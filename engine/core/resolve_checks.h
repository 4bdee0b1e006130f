// The parts of the resolver that do not depend on how a layout places its tensors. Private to it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/core/attention_problem.h"
#include "engine/core/attention_spec.h"
#include "engine/core/layout.h"
#include "engine/core/layout_table.h"

namespace attnd {

// A size that several fields may state: the first one sets it, later ones must agree.
struct KnownSize {
  std::string_view spec_field;  // "spec.batch", or what stands for it in messages.
  int64_t minimum = 0;
  int64_t maximum = INT64_MAX;
  std::optional<int64_t> value = {};
  std::string source = {};  // Who said it: "spec.batch", "axis 0 (b) of inputs.q".
};

struct Sizes {
  KnownSize batch{"spec.batch", 1, kMaxBatch};
  KnownSize s_q{"spec.max_seqlen_q", 0};    // Dense Q only.
  KnownSize s_kv{"spec.max_seqlen_kv", 0};  // Dense K and V only.
  KnownSize t_q{"inputs.q", 0};             // Rows of a THD Q.
  KnownSize t_kv{"inputs.k", 0};
  KnownSize h{"spec.num_heads", 1, kMaxHeads};
  KnownSize g{"spec.num_kv_heads", 1, kMaxHeads};
  KnownSize d_qk{"spec.head_dim_qk", 1, kMaxHeadDim};
  KnownSize d_v{"spec.head_dim_v", 1, kMaxHeadDim};
  KnownSize page_size{"spec.page_size", 1, kMaxPageSize};
  KnownSize pages_k{"inputs.k", 0};
  KnownSize pages_v{"inputs.v", 0};
};

// Sets `size` to `value`, or compares. `field` is at fault where they differ, and `where` says
// which part of it states the size ("axis 0 (b)"; empty: the field itself).
absl::Status Learn(KnownSize& size, int64_t value, std::string_view field, std::string_view where);

// UNIMPLEMENTED for a size above its maximum; after the contradictions, before memory is taken for
// it.
absl::Status CheckLimits(const Sizes& sizes);

// Enums, finite numbers and ranges of the spec, and fields that contradict one another within it.
absl::Status CheckSpecScalars(const AttentionSpec& spec);

// The sizes that the spec states. p's q_is_thd, kv_is_thd and is_paged are set: the maximal length
// of such a side is a bound and no axis.
absl::Status LearnSpecSizes(const AttentionSpec& spec, const AttentionProblem& p, Sizes& sizes);

// Sizes that the sequences and a layout's packing imply where no buffer states them.
absl::Status DeriveImpliedSizes(const Sequences& sequences, const AttentionProblem& p,
                                Packing packing, Sizes& sizes);

// dtype, non-negative dimensions, and bytes (and strides) below 2^63.
absl::Status CheckDesc(const TensorDesc& desc, DType dtype, std::string_view field);

// Checks the arrays and page tables against the sizes and one another, and fills p's batch,
// lengths, rows, maximal lengths and paging. `same_tokens`: Q, K and V share one token axis.
absl::Status ResolveSequences(const AttentionSpec& spec, const Sequences& sequences,
                              bool same_tokens, Sizes& sizes, AttentionProblem& p);

// Scale, soft cap, mask, bias, softmax, dropout. p's sizes and sequences are set.
absl::Status ResolveMaskAndFeatures(const AttentionSpec& spec, const InputDescs& inputs,
                                    AttentionProblem& p);

// Layout STRIDED: fills p's views, inputs and sequences (engine/core/strided_layout.cc).
// `derive`: no buffer is given; make them just large enough.
absl::Status ResolveStrided(const AttentionSpec& spec, const Sequences& sequences,
                            const InputDescs& inputs, bool derive, Sizes& sizes,
                            AttentionProblem& p);

}  // namespace attnd
