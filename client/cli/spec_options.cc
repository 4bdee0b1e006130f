#include "client/cli/spec_options.h"

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/host_tensor.h"

namespace attnd::cli {

absl::Status Usage(const std::string& option, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(option, " ", problem));
}

absl::Status ParseList(const std::string& option, const std::string& text,
                       google::protobuf::RepeatedField<int64_t>* values) {
  if (text.empty()) return absl::OkStatus();
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(part, &value)) {
      return Usage(option, absl::StrCat("has '", part, "' where a whole number is expected"));
    }
    values->Add(value);
  }
  return absl::OkStatus();
}

namespace {

absl::StatusOr<v1::Alignment> ParseAlignment(const std::string& text) {
  if (text.empty()) return v1::ALIGNMENT_UNSPECIFIED;
  if (text == "top-left") return v1::ALIGNMENT_TOP_LEFT;
  if (text == "bottom-right") return v1::ALIGNMENT_BOTTOM_RIGHT;
  return Usage("--window-alignment", "is top-left or bottom-right, not " + text);
}

absl::StatusOr<v1::Causal> ParseCausal(const std::string& text) {
  if (text.empty() || text == "none") return v1::CAUSAL_NONE;
  if (text == "top-left") return v1::CAUSAL_TOP_LEFT;
  if (text == "bottom-right") return v1::CAUSAL_BOTTOM_RIGHT;
  return Usage("--causal", "is none, top-left or bottom-right, not " + text);
}

absl::StatusOr<v1::BiasKind> ParseBiasKind(const std::string& text) {
  if (text.empty() || text == "none") return v1::BIAS_KIND_NONE;
  if (text == "pre-scale") return v1::BIAS_KIND_PRE_SCALE;
  if (text == "post-scale") return v1::BIAS_KIND_POST_SCALE;
  if (text == "alibi") return v1::BIAS_KIND_ALIBI;
  return Usage("--bias-kind", "is none, pre-scale, post-scale or alibi, not " + text);
}

absl::StatusOr<v1::SoftmaxKind> ParseSoftmax(const std::string& text) {
  if (text.empty() || text == "vanilla") return v1::SOFTMAX_KIND_VANILLA;
  if (text == "off-by-one") return v1::SOFTMAX_KIND_OFF_BY_ONE;
  if (text == "learnable") return v1::SOFTMAX_KIND_LEARNABLE;
  return Usage("--softmax", "is vanilla, off-by-one or learnable, not " + text);
}

absl::Status ParseWindow(const std::string& text, v1::AttentionSpec* spec) {
  if (text.empty()) return absl::OkStatus();
  google::protobuf::RepeatedField<int64_t> bounds;
  if (absl::Status status = ParseList("--window", text, &bounds); !status.ok()) return status;
  if (bounds.size() != 2) return Usage("--window", "is LEFT,RIGHT, not " + text);
  spec->mutable_window()->set_left(bounds[0]);
  spec->mutable_window()->set_right(bounds[1]);
  return absl::OkStatus();
}

absl::Status ParseView(const std::string& text, v1::Views* views) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  v1::View view;
  int64_t byte_offset = 0;
  int64_t group_stride = 0;
  if (parts.size() < 4 || parts.size() > 5 || !absl::SimpleAtoi(parts[2], &byte_offset) ||
      (parts.size() == 5 && !absl::SimpleAtoi(parts[4], &group_stride))) {
    return Usage("--view", "is q|k|v:BUFFER:BYTE_OFFSET:STRIDES[:GROUP_STRIDE], not " + text);
  }
  if (parts.size() == 5) view.set_group_stride(group_stride);
  view.set_buffer(parts[1]);
  view.set_byte_offset(byte_offset);
  absl::Status status = ParseList("--view", parts[3], view.mutable_strides());
  if (!status.ok()) return status;
  const auto* field = v1::Views::descriptor()->FindFieldByName(parts[0]);
  if (field == nullptr) return Usage("--view", "is of q, k or v, not of " + parts[0]);
  if (views->GetReflection()->HasField(*views, field)) {
    return Usage("--view", "is given twice for " + parts[0]);
  }
  views->GetReflection()->MutableMessage(views, field)->CopyFrom(view);
  return absl::OkStatus();
}

absl::Status SetFeatures(const RequestOptions& options, v1::AttentionSpec* spec) {
  const absl::StatusOr<v1::BiasKind> bias_kind = ParseBiasKind(options.bias_kind);
  if (!bias_kind.ok()) return bias_kind.status();
  spec->set_bias_kind(*bias_kind);
  const absl::StatusOr<v1::SoftmaxKind> softmax = ParseSoftmax(options.softmax);
  if (!softmax.ok()) return softmax.status();
  spec->set_softmax_kind(*softmax);
  if (options.dropout) {
    spec->mutable_dropout()->set_probability(*options.dropout);
    spec->mutable_dropout()->set_seed(options.dropout_seed);
    spec->mutable_dropout()->set_offset(options.dropout_offset);
  }
  spec->set_deterministic(options.deterministic);
  spec->set_batch_invariant(options.batch_invariant);
  if (options.alibi.empty()) return absl::OkStatus();
  google::protobuf::RepeatedField<int64_t> heads;
  if (absl::Status status = ParseList("--alibi", options.alibi, &heads); !status.ok()) {
    return status;
  }
  if (heads.size() != 2) return Usage("--alibi", "is FIRST,TOTAL, not " + options.alibi);
  spec->mutable_alibi()->set_head_offset(heads[0]);
  spec->mutable_alibi()->set_total_heads(heads[1]);
  return absl::OkStatus();
}

absl::Status ParseFp8Scale(const std::string& text, v1::Fp8Scales* scales) {
  const std::vector<std::string> parts = absl::StrSplit(text, '=');
  float value = 0;
  if (parts.size() != 2 || !absl::SimpleAtof(parts[1], &value)) {
    return Usage("--fp8-scale", "is NAME=VALUE, not " + text);
  }
  const auto* field = v1::Fp8Scales::descriptor()->FindFieldByName(parts[0]);
  if (field == nullptr) return Usage("--fp8-scale", "has no scale named " + parts[0]);
  scales->GetReflection()->SetFloat(scales, field, value);
  return absl::OkStatus();
}

}  // namespace

absl::Status SetSpec(const RequestOptions& options, v1::AttentionSpec* spec) {
  const std::optional<v1::QkvLayout> layout = ParseLayout(options.layout);
  if (!layout) return Usage("--layout", "is no layout: " + options.layout);
  spec->set_layout(*layout);
  if (options.batch) spec->set_batch(*options.batch);
  if (options.seqlen_q) spec->set_max_seqlen_q(*options.seqlen_q);
  if (options.seqlen_kv) spec->set_max_seqlen_kv(*options.seqlen_kv);
  if (options.heads) spec->set_num_heads(*options.heads);
  if (options.kv_heads) spec->set_num_kv_heads(*options.kv_heads);
  if (options.head_dim) spec->set_head_dim_qk(*options.head_dim);
  if (options.head_dim_v) spec->set_head_dim_v(*options.head_dim_v);
  if (options.page_size) spec->set_page_size(*options.page_size);
  if (options.scale) spec->set_scale(*options.scale);
  if (options.softcap) spec->set_logit_softcap(*options.softcap);
  const absl::StatusOr<v1::Causal> causal = ParseCausal(options.causal);
  if (!causal.ok()) return causal.status();
  spec->set_causal(*causal);
  const absl::StatusOr<v1::Alignment> alignment = ParseAlignment(options.window_alignment);
  if (!alignment.ok()) return alignment.status();
  spec->set_window_alignment(*alignment);
  for (const std::string& view : options.views) {
    if (absl::Status status = ParseView(view, spec->mutable_views()); !status.ok()) return status;
  }
  for (const std::string& scale : options.fp8_scales) {
    absl::Status status = ParseFp8Scale(scale, spec->mutable_fp8());
    if (!status.ok()) return status;
  }
  if (absl::Status status = SetFeatures(options, spec); !status.ok()) return status;
  return ParseWindow(options.window, spec);
}

}  // namespace attnd::cli
