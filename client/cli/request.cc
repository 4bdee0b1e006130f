#include "client/cli/request.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/local_check.h"
#include "client/cli/npy.h"

namespace attnd::cli {
namespace {

constexpr int64_t kMaxRandomBytes = std::numeric_limits<int32_t>::max();

absl::Status Usage(const std::string& option, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(option, " ", problem));
}

// Appends the numbers of "0,3,7".
template <typename Container>
absl::Status ParseList(const std::string& option, const std::string& text, Container* values) {
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

// Field number of a buffer's name; 0 where there is none.
int InputField(const std::string& name) {
  const auto it = std::find(kInputNames.begin(), kInputNames.end(), name);
  return it == kInputNames.end() ? 0 : static_cast<int>(it - kInputNames.begin()) + 1;
}

v1::Tensor* MutableInput(v1::QkvBuffers* inputs, int field) {
  return static_cast<v1::Tensor*>(inputs->GetReflection()->MutableMessage(
      inputs, inputs->GetDescriptor()->FindFieldByNumber(field)));
}

absl::StatusOr<v1::DataType> ParseDType(const std::string& option, const std::string& text) {
  const std::optional<v1::DataType> dtype = ParseDataType(text);
  if (!dtype) return Usage(option, "is no data type: " + text);
  return *dtype;
}

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
  if (parts.size() != 4 || !absl::SimpleAtoi(parts[2], &byte_offset)) {
    return Usage("--view", "is q|k|v:BUFFER:BYTE_OFFSET:STRIDES, not " + text);
  }
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
  return ParseWindow(options.window, spec);
}

absl::Status SetPageTable(const std::string& path, v1::Tensor* (v1::Sequences::*field)(),
                          v1::Sequences* sequences) {
  if (path.empty()) return absl::OkStatus();
  absl::StatusOr<HostTensor> table = ReadNpy(path, v1::DATA_TYPE_INT32);
  if (!table.ok()) return table.status();
  v1::Tensor* tensor = (sequences->*field)();
  *tensor = Describe(*table);
  tensor->set_data(table->data.get(), static_cast<size_t>(table->byte_size));
  return absl::OkStatus();
}

absl::Status SetSequences(const RequestOptions& o, v1::Sequences* sequences) {
  for (const absl::Status& status :
       {ParseList("--cu-seqlens-q", o.cu_seqlens_q, sequences->mutable_cu_seqlens_q()),
        ParseList("--cu-seqlens-kv", o.cu_seqlens_kv, sequences->mutable_cu_seqlens_kv()),
        ParseList("--cu-seqlens-q-padded", o.cu_seqlens_q_padded,
                  sequences->mutable_cu_seqlens_q_padded()),
        ParseList("--cu-seqlens-kv-padded", o.cu_seqlens_kv_padded,
                  sequences->mutable_cu_seqlens_kv_padded()),
        SetPageTable(o.page_table_k_file, &v1::Sequences::mutable_page_table_k, sequences),
        SetPageTable(o.page_table_v_file, &v1::Sequences::mutable_page_table_v, sequences)}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Reads the files and adds their descriptions, and those of --shape, to the request's inputs.
absl::Status SetInputs(const RequestOptions& options, ForwardCall* call) {
  v1::AttentionSpec* spec = call->request.mutable_spec();
  for (size_t i = 0; i < kInputNames.size(); ++i) {
    if (options.input_files[i].empty()) continue;
    absl::StatusOr<HostTensor> tensor = ReadNpy(options.input_files[i], spec->dtype());
    if (!tensor.ok()) return tensor.status();
    // The first file says what --dtype does not.
    spec->set_dtype(tensor->dtype);
    const int field = static_cast<int>(i) + 1;
    *MutableInput(call->request.mutable_inputs(), field) = Describe(*tensor);
    call->inputs.emplace(field, *std::move(tensor));
  }
  if (spec->dtype() == v1::DATA_TYPE_UNSPECIFIED) spec->set_dtype(v1::DATA_TYPE_FLOAT32);
  for (const std::string& text : options.shapes) {
    const size_t colon = text.find(':');
    const int field = InputField(text.substr(0, colon));
    if (colon == std::string::npos || field == 0) {
      return Usage("--shape", "is BUFFER:D0,D1,... with qkv, q, kv, k or v, not " + text);
    }
    if (call->inputs.count(field) > 0) {
      return Usage("--shape",
                   absl::StrCat("is given for ", kInputNames[static_cast<size_t>(field) - 1],
                                ", whose shape its file says"));
    }
    v1::Tensor* tensor = MutableInput(call->request.mutable_inputs(), field);
    tensor->Clear();
    tensor->set_dtype(spec->dtype());
    absl::Status status = ParseList("--shape", text.substr(colon + 1), tensor->mutable_shape());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Everything that plan and forward have in common.
absl::StatusOr<ForwardCall> MakeCall(const RequestOptions& options) {
  ForwardCall call;
  v1::ForwardRequest& request = call.request;
  if (absl::Status status = SetSpec(options, request.mutable_spec()); !status.ok()) return status;
  if (!options.dtype.empty()) {
    const absl::StatusOr<v1::DataType> dtype = ParseDType("--dtype", options.dtype);
    if (!dtype.ok()) return dtype.status();
    request.mutable_spec()->set_dtype(*dtype);
  }
  if (!options.out_dtype.empty()) {
    const absl::StatusOr<v1::DataType> dtype = ParseDType("--out-dtype", options.out_dtype);
    if (!dtype.ok()) return dtype.status();
    request.set_out_dtype(*dtype);
  }
  request.set_return_lse(options.lse);
  v1::Sequences sequences;
  if (absl::Status status = SetSequences(options, &sequences); !status.ok()) return status;
  if (sequences.ByteSizeLong() > 0) *request.mutable_sequences() = std::move(sequences);
  if (absl::Status status = SetInputs(options, &call); !status.ok()) return status;
  return call;
}

HostTensor RandomTensor(v1::DataType dtype, std::vector<int64_t> shape, std::mt19937_64* random) {
  HostTensor tensor = *MakeTensor(dtype, std::move(shape));
  std::normal_distribution<float> normal;
  const int64_t count = tensor.byte_size / SizeOf(dtype);
  for (int64_t i = 0; i < count; ++i) StoreFloat(dtype, tensor.data.get(), i, normal(*random));
  return tensor;
}

bool NeedsPageTables(const v1::ForwardRequest& request) {
  return ShortName(request.spec().layout()).rfind("PAGED_KV_", 0) == 0 &&
         !request.sequences().has_page_table_k() && !request.sequences().has_page_table_v();
}

// Shapes of tables that hold the longest sequence; the entries come when the pools are known.
absl::Status DescribePageTables(v1::ForwardRequest* request) {
  const v1::AttentionSpec& spec = request->spec();
  const auto& ends = request->sequences().cu_seqlens_kv();
  if (spec.page_size() <= 0 || ends.size() < 2) {
    return absl::InvalidArgumentError(
        "a random paged request needs --page-size and --cu-seqlens-kv");
  }
  int64_t longest = std::max<int64_t>(spec.max_seqlen_kv(), 1);
  for (int i = 1; i < ends.size(); ++i) {
    int64_t length = 0;
    if (__builtin_sub_overflow(ends[i], ends[i - 1], &length))
      continue;  // The resolver's to refuse.
    longest = std::max(longest, length);
  }
  const int64_t pages = longest / spec.page_size() + (longest % spec.page_size() != 0);
  if (pages > kMaxRandomBytes / ends.size()) {
    return absl::InvalidArgumentError("the page tables would have too many entries");
  }
  v1::Tensor table;
  table.set_dtype(v1::DATA_TYPE_INT32);
  table.add_shape(ends.size() - 1);
  table.add_shape(pages);
  *request->mutable_sequences()->mutable_page_table_k() = table;
  *request->mutable_sequences()->mutable_page_table_v() = table;
  return absl::OkStatus();
}

// Every page is used once as long as the pool has enough of them.
void FillPageTable(int64_t num_pages, std::mt19937_64* random, v1::Tensor* table) {
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), *random);
  std::vector<int32_t> entries(static_cast<size_t>(table->shape(0) * table->shape(1)));
  for (size_t i = 0; i < entries.size(); ++i) entries[i] = pages[i % pages.size()];
  table->set_data(entries.data(), entries.size() * sizeof(int32_t));
}

// Before anything is allocated.
absl::Status CheckMessageSize(const ResolvedShapes& shapes) {
  int64_t total = 0;
  for (const auto& [field, desc] : shapes.inputs) {
    const std::optional<int64_t> bytes = NumBytes(desc.dtype, desc.shape);
    if (!bytes || __builtin_add_overflow(total, *bytes, &total) || total > kMaxRandomBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the inputs have more than the ", kMaxRandomBytes, " bytes that one message can hold"));
    }
  }
  return absl::OkStatus();
}

absl::Status MakeRandomInputs(uint64_t seed, ForwardCall* call) {
  std::mt19937_64 random(seed);
  const bool make_tables = NeedsPageTables(call->request);
  if (make_tables) {
    if (absl::Status status = DescribePageTables(&call->request); !status.ok()) return status;
  }
  absl::StatusOr<ResolvedShapes> shapes = ResolveShapes(call->request);
  if (!shapes.ok()) return shapes.status();
  if (make_tables && (shapes->num_pages_k <= 0 || shapes->num_pages_v <= 0)) {
    return absl::InvalidArgumentError("the page pools have no pages");
  }
  if (absl::Status status = CheckMessageSize(*shapes); !status.ok()) return status;
  for (auto& [field, desc] : shapes->inputs) {
    if (SizeOf(desc.dtype) == 0) {
      return Usage("--dtype", "cannot be made at random: " + ShortName(desc.dtype));
    }
    HostTensor tensor = RandomTensor(desc.dtype, std::move(desc.shape), &random);
    *MutableInput(call->request.mutable_inputs(), field) = Describe(tensor);
    call->inputs.emplace(field, std::move(tensor));
  }
  if (make_tables) {
    v1::Sequences* sequences = call->request.mutable_sequences();
    FillPageTable(shapes->num_pages_k, &random, sequences->mutable_page_table_k());
    FillPageTable(shapes->num_pages_v, &random, sequences->mutable_page_table_v());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::PlanRequest> MakePlanRequest(const RequestOptions& options) {
  absl::StatusOr<ForwardCall> call = MakeCall(options);
  if (!call.ok()) return call.status();
  v1::ForwardRequest& forward = call->request;
  v1::PlanRequest plan;
  *plan.mutable_spec() = std::move(*forward.mutable_spec());
  if (forward.has_sequences()) {
    *plan.mutable_sequences() = std::move(*forward.mutable_sequences());
    if (plan.sequences().has_page_table_k()) {
      plan.mutable_sequences()->mutable_page_table_k()->clear_data();
    }
    if (plan.sequences().has_page_table_v()) {
      plan.mutable_sequences()->mutable_page_table_v()->clear_data();
    }
  }
  if (forward.has_inputs()) *plan.mutable_inputs() = std::move(*forward.mutable_inputs());
  plan.set_return_lse(forward.return_lse());
  plan.set_out_dtype(forward.out_dtype());
  return plan;
}

absl::StatusOr<ForwardCall> MakeForwardCall(const RequestOptions& options) {
  absl::StatusOr<ForwardCall> call = MakeCall(options);
  if (!call.ok()) return call;
  if (options.random) {
    if (!call->inputs.empty()) {
      return absl::InvalidArgumentError("--random makes all inputs; no file of one goes with it");
    }
    absl::Status status = MakeRandomInputs(options.seed, &*call);
    if (!status.ok()) return status;
  } else if (!options.shapes.empty()) {
    return Usage("--shape", "goes with --random; files say their own shapes");
  } else if (call->inputs.empty()) {
    return absl::InvalidArgumentError("forward needs its inputs: .npy files, or --random");
  }
  return call;
}

}  // namespace attnd::cli
