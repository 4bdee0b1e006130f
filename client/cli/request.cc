#include "client/cli/request.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cli/local_check.h"
#include "client/cli/npy.h"
#include "client/cli/random_tensors.h"
#include "client/cli/spec_options.h"

namespace attnd::cli {
namespace {

// Slot of a buffer's name; 0 where there is none.
int InputSlot(const std::string& name) {
  const auto it = std::find(kInputNames.begin(), kInputNames.end(), name);
  return it == kInputNames.end() ? 0 : static_cast<int>(it - kInputNames.begin()) + 1;
}

absl::StatusOr<v1::DataType> ParseDType(const std::string& option, const std::string& text) {
  const std::optional<v1::DataType> dtype = ParseDataType(text);
  if (!dtype) return Usage(option, "is no data type: " + text);
  return *dtype;
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

// Reads a file of the type (unspecified: the file's) into the call and its request.
absl::Status ReadTensor(const std::string& path, v1::DataType dtype, int slot, ForwardCall* call) {
  if (path.empty()) return absl::OkStatus();
  absl::StatusOr<HostTensor> tensor = ReadNpy(path, dtype);
  if (!tensor.ok()) return tensor.status();
  *MutableTensor(&call->request, slot) = Describe(*tensor);
  call->tensors.emplace(slot, *std::move(tensor));
  return absl::OkStatus();
}

// Reads the files and adds their descriptions, and those of --shape, to the request's inputs.
absl::Status SetInputs(const RequestOptions& options, ForwardCall* call) {
  v1::AttentionSpec* spec = call->request.mutable_spec();
  for (size_t i = 0; i < kInputNames.size(); ++i) {
    const int slot = static_cast<int>(i) + 1;
    absl::Status status = ReadTensor(options.input_files[i], spec->dtype(), slot, call);
    if (!status.ok()) return status;
    // The first file says what --dtype does not.
    const auto read = call->tensors.find(slot);
    if (read != call->tensors.end()) spec->set_dtype(read->second.dtype);
  }
  if (spec->dtype() == v1::DATA_TYPE_UNSPECIFIED) spec->set_dtype(v1::DATA_TYPE_FLOAT32);
  for (const std::string& text : options.shapes) {
    const size_t colon = text.find(':');
    const int slot = InputSlot(text.substr(0, colon));
    if (colon == std::string::npos || slot == 0) {
      return Usage("--shape", "is BUFFER:D0,D1,... with qkv, q, kv, k or v, not " + text);
    }
    if (call->tensors.count(slot) > 0) {
      return Usage("--shape",
                   absl::StrCat("is given for ", SlotName(slot), ", whose shape its file says"));
    }
    v1::Tensor* tensor = MutableTensor(&call->request, slot);
    tensor->Clear();
    tensor->set_dtype(spec->dtype());
    absl::Status status = ParseList("--shape", text.substr(colon + 1), tensor->mutable_shape());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

bool HasDenseBias(const v1::AttentionSpec& spec) {
  return spec.bias_kind() == v1::BIAS_KIND_PRE_SCALE ||
         spec.bias_kind() == v1::BIAS_KIND_POST_SCALE;
}

// Sets the description of a bias of the shape "1hss", where b, h and s stand for the sizes.
absl::Status DescribeBias(const std::string& text, const ResolvedShapes& sizes,
                          v1::ForwardRequest* request) {
  const std::string letters = text.empty() ? "1hss" : text;
  const int64_t axes[] = {sizes.batch, sizes.num_heads, sizes.max_seqlen_q, sizes.max_seqlen_kv};
  v1::Tensor* bias = request->mutable_bias();
  bias->set_dtype(request->spec().dtype());
  for (size_t i = 0; i < 4 && letters.size() == 4; ++i) {
    if (letters[i] != '1' && letters[i] != "bhss"[i]) break;
    bias->add_shape(letters[i] == '1' ? 1 : axes[i]);
  }
  if (bias->shape_size() == 4 && letters[3] == 's') return absl::OkStatus();
  return Usage("--bias-shape", "is 11ss, 1hss, b1ss, bhss, 111s or the like, not " + text);
}

// Bias and softmax offset: their files; without one the shapes that the spec asks for, with no
// elements yet.
absl::Status SetFeatureTensors(const RequestOptions& options, ForwardCall* call) {
  v1::ForwardRequest& request = call->request;
  for (const absl::Status& status :
       {ReadTensor(options.bias_file, request.spec().dtype(), kBiasSlot, call),
        ReadTensor(options.softmax_offset_file, v1::DATA_TYPE_FLOAT32, kSoftmaxOffsetSlot, call)}) {
    if (!status.ok()) return status;
  }
  const bool needs_bias = HasDenseBias(request.spec()) && !request.has_bias();
  if (!options.bias_shape.empty() && !needs_bias) {
    return Usage("--bias-shape", "goes with --bias-kind pre-scale or post-scale, and no --bias");
  }
  const bool needs_offset =
      request.spec().softmax_kind() == v1::SOFTMAX_KIND_LEARNABLE && !request.has_softmax_offset();
  if (!needs_bias && !needs_offset) return absl::OkStatus();
  const absl::StatusOr<ResolvedShapes> sizes = ResolveShapes(request);
  if (!sizes.ok()) return sizes.status();
  if (needs_offset) {
    request.mutable_softmax_offset()->set_dtype(v1::DATA_TYPE_FLOAT32);
    request.mutable_softmax_offset()->add_shape(sizes->num_heads);
  }
  return needs_bias ? DescribeBias(options.bias_shape, *sizes, &request) : absl::OkStatus();
}

// Everything that plan and forward have in common, but for bias and softmax offset.
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

// The fields that every kind of request has.
template <typename Request>
void MoveCommonFields(v1::ForwardRequest* from, Request* to) {
  *to->mutable_spec() = std::move(*from->mutable_spec());
  if (from->has_sequences()) *to->mutable_sequences() = std::move(*from->mutable_sequences());
  if (from->has_inputs()) *to->mutable_inputs() = std::move(*from->mutable_inputs());
  if (from->has_bias()) *to->mutable_bias() = std::move(*from->mutable_bias());
  if (from->has_softmax_offset()) {
    *to->mutable_softmax_offset() = std::move(*from->mutable_softmax_offset());
  }
}

bool HasInputs(const ForwardCall& call) {
  return !call.tensors.empty() && call.tensors.begin()->first <= kNumInputSlots;
}

}  // namespace

absl::StatusOr<v1::PlanRequest> MakePlanRequest(const RequestOptions& options) {
  absl::StatusOr<ForwardCall> call = MakeCall(options);
  if (!call.ok()) return call.status();
  if (absl::Status status = SetFeatureTensors(options, &*call); !status.ok()) return status;
  v1::PlanRequest plan;
  MoveCommonFields(&call->request, &plan);
  if (plan.sequences().has_page_table_k()) {
    plan.mutable_sequences()->mutable_page_table_k()->clear_data();
  }
  if (plan.sequences().has_page_table_v()) {
    plan.mutable_sequences()->mutable_page_table_v()->clear_data();
  }
  plan.set_return_lse(call->request.return_lse());
  plan.set_out_dtype(call->request.out_dtype());
  plan.set_backward(options.backward);
  return plan;
}

absl::StatusOr<ForwardCall> MakeForwardCall(const RequestOptions& options) {
  absl::StatusOr<ForwardCall> call = MakeCall(options);
  if (!call.ok()) return call;
  if (options.random && HasInputs(*call)) {
    return absl::InvalidArgumentError("--random makes all inputs; no file of one goes with it");
  }
  if (!options.random && !options.shapes.empty()) {
    return Usage("--shape", "goes with --random; files say their own shapes");
  }
  if (!options.random && !HasInputs(*call)) {
    return absl::InvalidArgumentError("the call needs its inputs: .npy files, or --random");
  }
  if (options.random) {
    if (absl::Status status = DescribePageTables(&call->request); !status.ok()) return status;
  }
  if (absl::Status status = SetFeatureTensors(options, &*call); !status.ok()) return status;
  if (options.random) {
    absl::Status status = MakeRandomTensors(options.seed, &*call);
    if (!status.ok()) return status;
  }
  for (const int slot : {kBiasSlot, kSoftmaxOffsetSlot}) {
    const bool described =
        slot == kBiasSlot ? call->request.has_bias() : call->request.has_softmax_offset();
    if (!described || call->tensors.count(slot) > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the call needs its ", SlotName(slot), ": a .npy file, or --random"));
  }
  return call;
}

absl::StatusOr<CallTensors> ReadBackwardFiles(const RequestOptions& options,
                                              v1::DataType out_dtype) {
  const struct {
    const std::string& path;
    int slot;
    v1::DataType dtype;
  } files[] = {{options.saved_out_file, kOutSlot, out_dtype},
               {options.saved_lse_file, kLseSlot, v1::DATA_TYPE_FLOAT32},
               {options.d_out_file, kOutGradientSlot, out_dtype}};
  CallTensors tensors;
  for (const auto& [path, slot, dtype] : files) {
    if (path.empty()) continue;
    absl::StatusOr<HostTensor> tensor = ReadNpy(path, dtype);
    if (!tensor.ok()) return tensor.status();
    tensors.emplace(slot, *std::move(tensor));
  }
  if (tensors.count(kOutSlot) != tensors.count(kLseSlot)) {
    return Usage("--out", "and --lse go together; without either, forward is computed first");
  }
  if (!options.random && tensors.count(kOutGradientSlot) == 0) {
    return absl::InvalidArgumentError("backward needs --d-out, or --random");
  }
  return tensors;
}

BackwardCall MakeBackwardCall(ForwardCall forward, CallTensors results) {
  BackwardCall call;
  MoveCommonFields(&forward.request, &call.request);
  call.tensors = std::move(forward.tensors);
  for (auto& [slot, tensor] : results) {
    *MutableTensor(&call.request, slot) = Describe(tensor);
    call.tensors.emplace(slot, std::move(tensor));
  }
  return call;
}

BackwardCall MakeRetainedCall(const v1::Handle& context, const HostTensor& d_out) {
  BackwardCall call;
  *call.request.mutable_context() = context;
  *call.request.mutable_d_out() = Describe(d_out);
  call.tensors.emplace(kOutGradientSlot, d_out);
  return call;
}

}  // namespace attnd::cli
