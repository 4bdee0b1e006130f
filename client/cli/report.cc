#include "client/cli/report.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/table.h"
#include "client/cpp/error_details.h"

namespace attnd::cli {
namespace {

constexpr int64_t kShownElements = 6;

template <typename Range>
std::vector<int64_t> ToVector(const Range& range) {
  return {range.begin(), range.end()};
}

// A JSON string; `text` may hold anything.
std::string Quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      json += absl::StrFormat("\\u%04x", static_cast<int>(c));
    } else {
      json += c;
    }
  }
  return json + "\"";
}

// JSON has no infinity and no NaN: as proto JSON does, they go as strings.
std::string Number(double value) {
  if (std::isnan(value)) return "\"NaN\"";
  if (std::isinf(value)) return value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  return absl::StrFormat("%.9g", value);
}

std::string FirstElements(const v1::Tensor& tensor) {
  const int64_t size = SizeOf(tensor.dtype());
  const int64_t count = size > 0 ? static_cast<int64_t>(tensor.data().size()) / size : 0;
  std::string text;
  for (int64_t i = 0; i < std::min(count, kShownElements); ++i) {
    absl::StrAppendFormat(&text, "%s%.5g", i == 0 ? "" : " ",
                          LoadFloat(tensor.dtype(), tensor.data().data(), i));
  }
  return count > kShownElements ? text + " ..." : text;
}

std::string GradientName(int slot) { return absl::StrCat("d_", SlotName(slot)); }

std::vector<std::string> TensorRow(const std::string& name, v1::DataType dtype,
                                   const std::vector<int64_t>& shape, int64_t bytes) {
  return {"  " + name, ShapeString(shape), ShortName(dtype), BytesString(bytes)};
}

std::string TensorTable(const std::vector<std::vector<std::string>>& rows) {
  return RenderTable({{"  tensor"}, {"shape"}, {"dtype"}, {"size", Align::kRight}}, rows);
}

std::string InfoText(const v1::ExecutionInfo& info) {
  std::string text = "ran on " + (info.backend().empty() ? "an unnamed backend" : info.backend());
  if (!info.device().empty()) text += " (" + info.device() + ")";
  if (!info.engine().empty()) text += ", engine " + info.engine();
  absl::StrAppend(&text, ", batch of ", info.batch_size(), ", transport ", info.transport(), "\n");
  absl::StrAppendFormat(&text,
                        "  queue %.0f us, copy in %.0f us, compute %.0f us, copy out %.0f us\n",
                        info.queue_us(), info.copy_in_us(), info.compute_us(), info.copy_out_us());
  return text;
}

std::string CheckText(const CheckResult& check) {
  std::string text =
      absl::StrFormat("check %s: relative RMS error of O %.2e (bound %.2e)",
                      check.passed ? "PASS" : "FAIL", check.out_error, check.out_bound);
  if (check.lse_error) {
    absl::StrAppendFormat(&text, ", max abs error of LSE %.2e (bound %.2e)", *check.lse_error,
                          check.lse_bound);
  }
  return text + "\n";
}

std::string CheckJson(const CheckResult& check) {
  std::string json = absl::StrCat("{\"passed\":", check.passed ? "true" : "false",
                                  ",\"out_relative_rms_error\":", Number(check.out_error),
                                  ",\"out_bound\":", Number(check.out_bound));
  if (check.lse_error) {
    absl::StrAppend(&json, ",\"lse_max_abs_error\":", Number(*check.lse_error),
                    ",\"lse_bound\":", Number(check.lse_bound));
  }
  return json + "}";
}

std::string CheckText(const GradientCheck& check) {
  std::string text = absl::StrCat("check ", check.passed ? "PASS" : "FAIL", ": RMS error of");
  const char* separator = " ";
  for (const GradientError& gradient : check.gradients) {
    absl::StrAppendFormat(&text, "%s%s %.2e", separator, GradientName(gradient.slot),
                          gradient.error);
    separator = ", ";
  }
  return text + absl::StrFormat(" (bound %.2e)\n", check.bound);
}

std::string CheckJson(const GradientCheck& check) {
  std::string json = absl::StrCat("{\"passed\":", check.passed ? "true" : "false",
                                  ",\"bound\":", Number(check.bound), ",\"rms_errors\":{");
  const char* separator = "";
  for (const GradientError& gradient : check.gradients) {
    absl::StrAppend(&json, separator, Quoted(GradientName(gradient.slot)), ":",
                    Number(gradient.error));
    separator = ",";
  }
  return json + "}}";
}

// A tensor of a reply, by its name in the text.
using NamedTensor = std::pair<std::string, const v1::Tensor*>;

std::string CallText(const std::string& title, const CallTensors& tensors,
                     const std::vector<NamedTensor>& reply) {
  std::vector<std::vector<std::string>> sent, received;
  for (const auto& [slot, tensor] : tensors) {
    sent.push_back(TensorRow(SlotName(slot), tensor.dtype, tensor.shape, tensor.byte_size));
  }
  std::string beginnings;
  for (const auto& [name, tensor] : reply) {
    received.push_back(TensorRow(name, tensor->dtype(), ToVector(tensor->shape()),
                                 static_cast<int64_t>(tensor->data().size())));
    absl::StrAppend(&beginnings, "  ", name, " begins  ", FirstElements(*tensor), "\n");
  }
  return absl::StrCat("sent ", title, "\n", TensorTable(sent), "received\n", TensorTable(received),
                      beginnings);
}

std::string TrafficText(const Traffic& traffic) {
  const double bytes = static_cast<double>(traffic.sent_bytes + traffic.received_bytes);
  return absl::StrFormat(
      "took %.3f ms, %s/s of tensors there and back\n", traffic.seconds * 1e3,
      BytesString(static_cast<int64_t>(bytes / std::max(traffic.seconds, 1e-9))));
}

std::string CallJson(const google::protobuf::Message& reply, const Traffic& traffic) {
  return absl::StrCat("{\"reply\":", MessageJson(reply), ",\"sent_bytes\":", traffic.sent_bytes,
                      ",\"received_bytes\":", traffic.received_bytes,
                      ",\"seconds\":", Number(traffic.seconds));
}

void DropElements(v1::Tensor* tensor) {
  tensor->clear_data();
  tensor->clear_values();
}

}  // namespace

std::string ErrorLine(const grpc::Status& status) {
  const client::ErrorDetails details = client::ParseErrorDetails(status);
  std::vector<std::string> notes;
  if (!details.field.empty()) notes.push_back("field " + details.field);
  if (!details.reason.empty()) notes.push_back("reason " + details.reason);
  if (details.retry_after) {
    notes.push_back(absl::StrCat("retry after ", details.retry_after->count(), " ms"));
  }
  std::string line = client::CodeName(status.error_code()) + ": " + status.error_message();
  std::replace(line.begin(), line.end(), '\n', ' ');
  return notes.empty() ? line : absl::StrCat(line, " (", absl::StrJoin(notes, ", "), ")");
}

std::string ErrorJson(const grpc::Status& status) {
  const client::ErrorDetails details = client::ParseErrorDetails(status);
  std::string json = "{\"error\":{\"code\":" + Quoted(client::CodeName(status.error_code())) +
                     ",\"message\":" + Quoted(status.error_message());
  if (!details.field.empty()) json += ",\"field\":" + Quoted(details.field);
  if (!details.reason.empty()) json += ",\"reason\":" + Quoted(details.reason);
  if (details.retry_after) {
    absl::StrAppend(&json, ",\"retry_after_ms\":", details.retry_after->count());
  }
  return json + "}}";
}

std::string MessageJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (status.ok()) return json;
  return "{\"error\":{\"message\":" + Quoted(status.ToString()) + "}}";
}

std::string CapabilitiesText(const v1::GetCapabilitiesResponse& reply) {
  std::string text;
  for (const v1::Version& version : reply.versions()) {
    absl::StrAppend(&text, version.component(), " ", version.version(), "\n");
  }
  for (const v1::BackendCapabilities& backend : reply.backends()) {
    absl::StrAppend(&text, "backend ", backend.name(), "\n  engines   ",
                    absl::StrJoin(backend.engines(), ", "), "\n");
    for (const v1::Device& device : backend.devices()) {
      absl::StrAppend(&text, "  device    ", device.name(), ", ",
                      BytesString(device.memory_bytes()), ", ", device.compute_units(),
                      " compute units\n");
    }
    std::vector<std::string> dtypes, layouts;
    for (int dtype : backend.dtypes())
      dtypes.push_back(ShortName(static_cast<v1::DataType>(dtype)));
    for (int layout : backend.layouts()) {
      layouts.push_back(ShortName(static_cast<v1::QkvLayout>(layout)));
    }
    absl::StrAppend(&text, "  dtypes    ", absl::StrJoin(dtypes, ", "), "\n  features  ",
                    absl::StrJoin(backend.features(), ", "), "\n  layouts   ",
                    absl::StrJoin(layouts, "\n            "), "\n");
  }
  const v1::Limits& limits = reply.limits();
  absl::StrAppend(&text, "limits\n  message   ", BytesString(limits.message_bytes()),
                  "\n  pool      ", BytesString(limits.pool_bytes()), "\n  queue     ",
                  BytesString(limits.queue_bytes()), "\n  values    ", limits.values_elements(),
                  " elements\n");
  absl::StrAppend(&text, "LSE base ", reply.lse_base(), ", incarnation ", reply.incarnation(),
                  "\n");
  return text;
}

std::string PlanText(const v1::PlanResponse& reply) {
  std::string text;
  if (reply.has_resolved()) {
    std::vector<std::vector<std::string>> rows;
    const bool has_groups = reply.resolved().q().has_group_stride();
    const auto add = [&](const char* name, const v1::ResolvedView& view) {
      rows.push_back({name, view.buffer(), absl::StrCat(view.byte_offset())});
      for (int i = 0; i < 4; ++i) {
        rows.back().push_back(i < view.strides_size() ? absl::StrCat(view.strides(i)) : "-");
      }
      if (has_groups) {
        rows.back().push_back(view.has_group_stride() ? absl::StrCat(view.group_stride()) : "-");
      }
    };
    add("q", reply.resolved().q());
    add("k", reply.resolved().k());
    add("v", reply.resolved().v());
    add("out", reply.resolved().out());
    std::vector<Column> columns = {{"tensor"},
                                   {"buffer"},
                                   {"byte offset", Align::kRight},
                                   {"batch stride", Align::kRight},
                                   {"seq stride", Align::kRight},
                                   {"head stride", Align::kRight},
                                   {"dim stride", Align::kRight}};
    if (has_groups) columns.push_back({"group stride", Align::kRight});
    text += RenderTable(columns, rows) + "\n";
  }
  if (!reply.supported()) return text + "not supported: " + reply.reason() + "\n";
  absl::StrAppend(&text, "supported by ", reply.backend(), ", engine ", reply.engine(), "\n");
  absl::StrAppend(&text, "workspace ", BytesString(reply.workspace_bytes()), ", device memory ",
                  BytesString(reply.device_bytes()), ", deterministic ",
                  reply.deterministic_available() ? "available" : "not available", "\n");
  return text;
}

std::string ForwardText(const ForwardCall& call, const v1::ForwardResponse& reply,
                        const Traffic& traffic, const std::optional<CheckResult>& check) {
  std::vector<NamedTensor> received = {{"out", &reply.out()}};
  if (reply.has_lse()) received.emplace_back("lse", &reply.lse());
  return CallText(ShortName(call.request.spec().layout()), call.tensors, received) +
         InfoText(reply.info()) + TrafficText(traffic) + (check ? CheckText(*check) : "");
}

std::string BackwardText(const BackwardCall& call, const v1::BackwardResponse& reply,
                         const Traffic& traffic, const std::optional<GradientCheck>& check) {
  std::vector<NamedTensor> received;
  for (const auto& [slot, tensor] : GradientsOf(reply)) {
    received.emplace_back(GradientName(slot), tensor);
  }
  const std::string title = call.request.has_context()
                                ? "for context " + call.request.context().id()
                                : ShortName(call.request.spec().layout());
  return CallText(title, call.tensors, received) + InfoText(reply.info()) + TrafficText(traffic) +
         (check ? CheckText(*check) : "");
}

std::string ForwardJson(v1::ForwardResponse reply, const Traffic& traffic,
                        const std::optional<CheckResult>& check) {
  DropElements(reply.mutable_out());
  if (reply.has_lse()) DropElements(reply.mutable_lse());
  const std::string json = CallJson(reply, traffic);
  return check ? absl::StrCat(json, ",\"check\":", CheckJson(*check), "}") : json + "}";
}

std::string BackwardJson(v1::BackwardResponse reply, const Traffic& traffic,
                         const std::optional<GradientCheck>& check) {
  for (const auto& [slot, tensor] : GradientsOf(reply)) {
    DropElements(const_cast<v1::Tensor*>(tensor));  // Of our own copy.
  }
  const std::string json = CallJson(reply, traffic);
  return check ? absl::StrCat(json, ",\"check\":", CheckJson(*check), "}") : json + "}";
}

}  // namespace attnd::cli
