#include "tests/bench/support_trial.h"

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/local_check.h"
#include "client/cli/request.h"
#include "client/cpp/error_details.h"
#include "tests/bench/support_tensors.h"

namespace attnd::support {
namespace {

using cli::HostTensor;

constexpr client::CallOptions kCallOptions = {.timeout = std::chrono::seconds(60)};
constexpr double kLeaseSeconds = 10;
// Backward starts from O as it is stored, the reference loop from its own. Beside FP8's rounding of
// O, gradients whose sums cancel (a sink's, or those of rows with few keys) differ by some more
// than attnctl's bound.
constexpr double kFloat8OutFactor = 3;

v1::PlanRequest PlanOf(const Problem& problem) {
  const v1::ForwardRequest& request = problem.request;
  v1::PlanRequest plan;
  *plan.mutable_spec() = request.spec();
  *plan.mutable_inputs() = request.inputs();
  if (request.has_sequences()) *plan.mutable_sequences() = request.sequences();
  if (request.sequences().has_page_table_k()) {
    plan.mutable_sequences()->mutable_page_table_k()->clear_data();
    plan.mutable_sequences()->mutable_page_table_v()->clear_data();
  }
  if (request.has_bias()) *plan.mutable_bias() = request.bias();
  if (request.has_softmax_offset()) *plan.mutable_softmax_offset() = request.softmax_offset();
  plan.set_return_lse(request.return_lse() && !problem.backward);
  plan.set_out_dtype(request.out_dtype());
  plan.set_backward(problem.backward);
  return plan;
}

std::string Describe(const grpc::Status& status) {
  return absl::StrCat(client::CodeName(status.error_code()), ": ", status.error_message());
}

template <typename Request>
std::vector<client::TensorBytes> BytesOf(const Request& request, const cli::CallTensors& tensors) {
  std::vector<client::TensorBytes> bytes;
  for (const auto& [slot, tensor] : tensors) {
    bytes.push_back({cli::PathOf(request, slot), tensor.data, tensor.byte_size});
  }
  return bytes;
}

HostTensor CopyOf(const v1::Tensor& tensor) {
  HostTensor copy =
      *cli::MakeTensor(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()});
  std::memcpy(copy.data.get(), tensor.data().data(), tensor.data().size());
  return copy;
}

bool IsWhole(const v1::Tensor& tensor) {
  return cli::NumBytes(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}) ==
         static_cast<int64_t>(tensor.data().size());
}

// What is not 0 although no sequence has it; empty: nothing.
std::string StrayElement(const char* name, const std::vector<bool>& owned,
                         const v1::Tensor& tensor) {
  for (size_t i = 0; i < owned.size(); ++i) {
    const float value =
        cli::LoadFloat(tensor.dtype(), tensor.data().data(), static_cast<int64_t>(i));
    if (!owned[i] && value != 0) {
      return absl::StrCat(name, " has ", value, " at element ", i, ", which no sequence has");
    }
  }
  return "";
}

class Trial {
 public:
  Trial(const Problem& problem, client::Client& client) : problem_(problem), client_(client) {}

  Outcome Run() {
    const grpc::Status status = client_.Plan(PlanOf(problem_), kCallOptions, &plan_);
    if (!status.ok()) {
      outcome_.fault = "Plan: " + Describe(status);
      return outcome_;
    }
    outcome_.runs = plan_.supported();
    outcome_.backend = plan_.backend();
    outcome_.engine = plan_.engine();
    outcome_.reason = plan_.reason();
    views_ = plan_.supported() ? &plan_.resolved() : nullptr;
    tensors_ = MakeTensors(problem_, views_);
    if (!plan_.supported()) {
      outcome_.fault = problem_.backward ? ConfirmBackwardRefusal() : ConfirmForwardRefusal();
    } else {
      outcome_.fault = problem_.backward ? CompareBackward() : CompareForward();
    }
    outcome_.agrees = outcome_.fault.empty();
    return outcome_;
  }

 private:
  // Functions that return a string: the fault, empty where there is none.

  grpc::Status Forward(const v1::ForwardRequest& request, v1::ForwardResponse* reply) {
    return client_.Forward(request, BytesOf(request, tensors_), kCallOptions, reply);
  }

  std::string ExpectRefusal(const grpc::Status& status) const {
    if (status.ok()) return "Plan refuses it, and it runs: " + outcome_.reason;
    const std::string field = client::ParseErrorDetails(status).field;
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && !field.empty() &&
        outcome_.reason.rfind(field + " ", 0) == 0) {
      return "";
    }
    return absl::StrCat("Plan refuses it (", outcome_.reason,
                        "), and its execution differently: ", Describe(status));
  }

  std::string ConfirmForwardRefusal() {
    v1::ForwardResponse reply;
    return ExpectRefusal(Forward(problem_.request, &reply));
  }

  std::string ConfirmBackwardRefusal() {
    const HostTensor gradient = MakeOutGradient(problem_, nullptr);
    HostTensor lse = *cli::MakeTensor(v1::DATA_TYPE_FLOAT32, problem_.lse_shape);
    std::memset(lse.data.get(), 0, static_cast<size_t>(lse.byte_size));
    const cli::BackwardCall call = Resent(gradient, lse, gradient);
    v1::BackwardResponse reply;
    return ExpectRefusal(Backward(call, &reply));
  }

  cli::BackwardCall Resent(const HostTensor& out, const HostTensor& lse,
                           const HostTensor& gradient) const {
    return cli::MakeBackwardCall(
        {problem_.request, tensors_},
        {{cli::kOutSlot, out}, {cli::kLseSlot, lse}, {cli::kOutGradientSlot, gradient}});
  }

  grpc::Status Backward(const cli::BackwardCall& call, v1::BackwardResponse* reply) {
    return client_.Backward(call.request, BytesOf(call.request, call.tensors), kCallOptions, reply);
  }

  std::string CheckEngine(const v1::ExecutionInfo& info) const {
    if (info.engine() == plan_.engine() && info.backend() == plan_.backend()) return "";
    return absl::StrCat("planned on ", plan_.backend(), " ", plan_.engine(), ", ran on ",
                        info.backend(), " ", info.engine());
  }

  std::string CompareForward() {
    v1::ForwardResponse reply;
    const grpc::Status status = Forward(problem_.request, &reply);
    if (!status.ok()) return "Plan accepts it, Forward does not: " + Describe(status);
    if (!IsWhole(reply.out()) || !IsWhole(reply.lse())) return "the reply is not whole";
    const auto check = cli::CheckForward(problem_.request, tensors_, reply);
    if (!check.ok()) return std::string(check.status().message());
    if (!check->passed) {
      return absl::StrCat("O is off by ", check->out_error, " (bound ", check->out_bound,
                          "), LSE by ", check->lse_error.value_or(0), " (bound ", check->lse_bound,
                          ")");
    }
    std::string fault = StrayElement("O", OwnedOut(problem_, *views_), reply.out());
    if (fault.empty()) fault = CheckEngine(reply.info());
    if (!fault.empty() || !problem_.request.spec().deterministic()) return fault;
    v1::ForwardResponse again;
    if (!Forward(problem_.request, &again).ok()) return "its repetition fails";
    const bool same = again.out().data() == reply.out().data();
    return same ? "" : "its repetition gives other bytes";
  }

  // Forward's reply, for the call that backward is; or why there is none.
  std::string RunForward(v1::ForwardResponse* reply) {
    v1::ForwardRequest request = problem_.request;
    if (problem_.retained) request.mutable_retain_for_backward()->set_seconds(kLeaseSeconds);
    const grpc::Status status = Forward(request, reply);
    if (!status.ok()) return "its forward call: " + Describe(status);
    if (!IsWhole(reply->out()) || !IsWhole(reply->lse())) return "the reply is not whole";
    return "";
  }

  std::string CompareBackward() {
    v1::ForwardResponse forward;
    if (std::string fault = RunForward(&forward); !fault.empty()) return fault;
    HostTensor out = CopyOf(forward.out()), lse = CopyOf(forward.lse());
    PoisonOut(problem_, *views_, &out);
    PoisonLse(problem_, &lse);
    const HostTensor gradient = MakeOutGradient(problem_, views_);
    const cli::BackwardCall whole = Resent(out, lse, gradient);
    const cli::BackwardCall call =
        problem_.retained ? cli::MakeRetainedCall(forward.context(), gradient) : whole;
    v1::BackwardResponse reply;
    const grpc::Status status = Backward(call, &reply);
    if (!status.ok()) return "Plan accepts it, Backward does not: " + Describe(status);
    std::string fault = CheckGradients(whole, reply);
    if (fault.empty()) fault = CheckEngine(reply.info());
    if (!fault.empty() || !problem_.request.spec().deterministic()) return fault;
    v1::BackwardResponse again;
    if (!Backward(call, &again).ok()) return "its repetition fails";
    reply.clear_info();
    again.clear_info();
    return again.SerializeAsString() == reply.SerializeAsString()
               ? ""
               : "its repetition gives other bytes";
  }

  std::string CheckGradients(const cli::BackwardCall& whole, const v1::BackwardResponse& reply) {
    for (const auto& [slot, tensor] : cli::GradientsOf(reply)) {
      if (!IsWhole(*tensor)) return "the reply is not whole";
    }
    const auto check = cli::CheckBackward(whole.request, whole.tensors, reply);
    if (!check.ok()) return std::string(check.status().message());
    const bool out_is_float8 = cli::SizeOf(OutType(problem_)) == 1;
    const double bound = check->bound * (out_is_float8 ? kFloat8OutFactor : 1);
    std::string fault;
    for (const cli::GradientError& gradient : check->gradients) {
      if (gradient.error <= bound) continue;  // False for NaN.
      absl::StrAppend(&fault, fault.empty() ? "" : ", ", "the gradient of ",
                      cli::SlotName(gradient.slot), " is off by ", gradient.error, " (bound ",
                      bound, ")");
    }
    for (const auto& [slot, tensor] : cli::GradientsOf(reply)) {
      if (!fault.empty()) break;
      fault = StrayElement(cli::SlotName(slot), OwnedGradient(problem_, *views_, slot), *tensor);
    }
    return fault;
  }

  const Problem& problem_;
  client::Client& client_;
  v1::PlanResponse plan_;
  const v1::ResolvedViews* views_ = nullptr;
  cli::CallTensors tensors_;
  Outcome outcome_;
};

}  // namespace

Outcome Try(const Problem& problem, client::Client& client) { return Trial(problem, client).Run(); }

}  // namespace attnd::support
