#include "client/cli/commands.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/cli/local_check.h"
#include "client/cli/npy.h"
#include "client/cli/progress_bar.h"
#include "client/cli/random_tensors.h"
#include "client/cli/report.h"
#include "client/cli/request.h"
#include "client/cpp/client.h"
#include "client/cpp/counted_connection.h"

namespace attnd::cli {
namespace {

using Clock = std::chrono::steady_clock;
using ::grpc::health::v1::HealthCheckResponse;

// Transfers above this show a bar on a terminal.
constexpr int64_t kProgressBytes = int64_t{8} << 20;
constexpr auto kHealthPollInterval = std::chrono::milliseconds(100);

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

client::CallOptions MakeCallOptions(const Options& options) {
  return {.timeout = std::max(Milliseconds(options.timeout_seconds), std::chrono::milliseconds(1))};
}

void Print(const std::string& text) { std::fputs(text.c_str(), stdout); }

int Fail(int exit_code, const std::string& line) {
  std::fprintf(stderr, "attnctl: %s\n", line.c_str());
  return exit_code;
}

int Fail(int exit_code, const absl::Status& status) {
  return Fail(exit_code, std::string(status.message()));
}

int Refused(const Options& options, const grpc::Status& status) {
  if (options.json) Print(ErrorJson(status) + "\n");
  return Fail(kExitRefused, ErrorLine(status));
}

int RunHealth(const Options& options, client::Client& client) {
  const Clock::time_point end = Clock::now() + Milliseconds(options.wait_seconds);
  client::CallOptions call = MakeCallOptions(options);
  HealthCheckResponse reply;
  grpc::Status status;
  while (true) {
    status = client.CheckHealth(options.service, call, &reply);
    const bool serving = status.ok() && reply.status() == HealthCheckResponse::SERVING;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (serving || left <= kHealthPollInterval) break;
    std::this_thread::sleep_for(kHealthPollInterval);
    call.timeout = std::min(call.timeout, left);
  }
  if (!status.ok()) return Refused(options, status);
  Print((options.json ? MessageJson(reply)
                      : HealthCheckResponse::ServingStatus_Name(reply.status())) +
        "\n");
  return reply.status() == HealthCheckResponse::SERVING ? kExitOk : kExitRefused;
}

int RunCapabilities(const Options& options, client::Client& client) {
  v1::GetCapabilitiesResponse reply;
  const grpc::Status status = client.GetCapabilities(MakeCallOptions(options), &reply);
  if (!status.ok()) return Refused(options, status);
  Print(options.json ? MessageJson(reply) + "\n" : CapabilitiesText(reply));
  return kExitOk;
}

int RunPlan(const Options& options, client::Client& client) {
  const absl::StatusOr<v1::PlanRequest> request = MakePlanRequest(options.request);
  if (!request.ok()) return Fail(kExitUsage, request.status());
  v1::PlanResponse reply;
  const grpc::Status status = client.Plan(*request, MakeCallOptions(options), &reply);
  if (!status.ok()) return Refused(options, status);
  Print(options.json ? MessageJson(reply) + "\n" : PlanText(reply));
  return reply.supported() ? kExitOk : kExitRefused;
}

// Which method takes which request.
constexpr auto MethodOf(const v1::ForwardRequest*) { return &client::Client::Forward; }
constexpr auto MethodOf(const v1::BackwardRequest*) { return &client::Client::Backward; }

// Sends a ForwardCall or BackwardCall, under a bar where one is wanted and can be had.
template <typename Call, typename Response>
grpc::Status Send(const Options& options, const Call& call, client::Client& client, Response* reply,
                  Traffic* traffic) {
  std::vector<client::TensorBytes> tensors;
  for (const auto& [slot, tensor] : call.tensors) {
    tensors.push_back({PathOf(call.request, slot), tensor.data, tensor.byte_size});
    traffic->sent_bytes += tensor.byte_size;
  }
  const client::CallOptions call_options = MakeCallOptions(options);
  std::unique_ptr<client::CountedConnection> counted;
  if (options.progress || (traffic->sent_bytes > kProgressBytes && isatty(STDERR_FILENO) != 0)) {
    counted = client::CountedConnection::Connect(options.address, call_options.timeout);
  }
  const auto method = MethodOf(&call.request);
  const Clock::time_point start = Clock::now();
  grpc::Status status;
  if (counted != nullptr) {
    const ProgressBar bar([&counted] { return counted->sent_bytes(); }, traffic->sent_bytes);
    client::Client watched(counted->channel());
    status = (watched.*method)(call.request, tensors, call_options, reply);
  } else {
    // Also where nobody could be reached: this call then says why.
    status = (client.*method)(call.request, tensors, call_options, reply);
  }
  traffic->seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return status;
}

// Every tensor of the reply has come in full.
bool IsWhole(const v1::Tensor& tensor) {
  return NumBytes(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}) ==
         static_cast<int64_t>(tensor.data().size());
}

int FailUnlessWhole() {
  return Fail(kExitRefused, "INTERNAL: the reply's tensors do not have the bytes of their shapes");
}

bool IsWhole(const v1::ForwardResponse& reply, bool lse) {
  return IsWhole(reply.out()) && (!lse || IsWhole(reply.lse()));
}

absl::Status Write(const std::string& path, const v1::Tensor& tensor) {
  if (path.empty()) return absl::OkStatus();
  return WriteNpy(path, tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()},
                  tensor.data());
}

int RunForward(const Options& options, client::Client& client) {
  const absl::StatusOr<ForwardCall> call = MakeForwardCall(options.request);
  if (!call.ok()) return Fail(kExitUsage, call.status());
  v1::ForwardResponse reply;
  Traffic traffic;
  const grpc::Status status = Send(options, *call, client, &reply, &traffic);
  if (!status.ok()) return Refused(options, status);
  traffic.received_bytes =
      static_cast<int64_t>(reply.out().data().size() + reply.lse().data().size());
  if (!IsWhole(reply, options.request.lse)) return FailUnlessWhole();
  for (const absl::Status& written :
       {Write(options.out_file, reply.out()), Write(options.lse_out_file, reply.lse())}) {
    if (!written.ok()) return Fail(kExitRefused, written);
  }
  std::optional<CheckResult> check;
  if (options.check) {
    absl::StatusOr<CheckResult> result = CheckForward(call->request, call->tensors, reply);
    if (!result.ok()) return Fail(kExitRefused, result.status());
    check = *result;
  }
  Print(options.json ? ForwardJson(reply, traffic, check) + "\n"
                     : ForwardText(*call, reply, traffic, check));
  return check && !check->passed ? kExitRefused : kExitOk;
}

HostTensor CopyOf(const v1::Tensor& tensor) {
  HostTensor copy = *MakeTensor(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()});
  std::memcpy(copy.data.get(), tensor.data().data(), tensor.data().size());
  return copy;
}

// Adds what `results` lacks of forward's results and of d_out: the former from the server, whose
// reply is left in `reply`, the latter at random. Returns the exit code where that ends the
// program.
std::optional<int> CompleteResults(const Options& options, const ForwardCall& forward,
                                   client::Client& client, v1::ForwardResponse* reply,
                                   CallTensors* results) {
  if (results->count(kOutSlot) == 0) {
    Traffic traffic;
    const grpc::Status status = Send(options, forward, client, reply, &traffic);
    if (!status.ok()) return Refused(options, status);
    if (!IsWhole(*reply, true)) return FailUnlessWhole();
    results->emplace(kOutSlot, CopyOf(reply->out()));
    results->emplace(kLseSlot, CopyOf(reply->lse()));
  }
  if (results->count(kOutGradientSlot) == 0) {
    const HostTensor& out = results->at(kOutSlot);
    // Another seed than that of the inputs.
    results->emplace(kOutGradientSlot,
                     RandomTensor(out.dtype, out.shape, options.request.seed + 1));
  }
  return std::nullopt;
}

// Sends `call`, and reports on it. `whole` says all of what it is about.
int FinishBackward(const Options& options, const BackwardCall& whole, const BackwardCall& call,
                   client::Client& client) {
  v1::BackwardResponse reply;
  Traffic traffic;
  const grpc::Status status = Send(options, call, client, &reply, &traffic);
  if (!status.ok()) return Refused(options, status);
  for (const auto& [slot, tensor] : GradientsOf(reply)) {
    if (!IsWhole(*tensor)) return FailUnlessWhole();
    traffic.received_bytes += static_cast<int64_t>(tensor->data().size());
    if (options.grads_prefix.empty()) continue;
    const absl::Status written =
        Write(options.grads_prefix + "." + SlotName(slot) + ".npy", *tensor);
    if (!written.ok()) return Fail(kExitRefused, written);
  }
  std::optional<GradientCheck> check;
  if (options.check) {
    absl::StatusOr<GradientCheck> result = CheckBackward(whole.request, whole.tensors, reply);
    if (!result.ok()) return Fail(kExitRefused, result.status());
    check = *std::move(result);
  }
  Print(options.json ? BackwardJson(reply, traffic, check) + "\n"
                     : BackwardText(call, reply, traffic, check));
  return check && !check->passed ? kExitRefused : kExitOk;
}

int RunBackward(const Options& options, client::Client& client) {
  absl::StatusOr<ForwardCall> forward = MakeForwardCall(options.request);
  if (!forward.ok()) return Fail(kExitUsage, forward.status());
  const v1::ForwardRequest& request = forward->request;
  absl::StatusOr<CallTensors> results = ReadBackwardFiles(
      options.request, request.out_dtype() == v1::DATA_TYPE_UNSPECIFIED ? request.spec().dtype()
                                                                        : request.out_dtype());
  if (!results.ok()) return Fail(kExitUsage, results.status());
  if (options.retain_seconds) {
    forward->request.mutable_retain_for_backward()->set_seconds(*options.retain_seconds);
  }
  v1::ForwardResponse forward_reply;
  if (const std::optional<int> end =
          CompleteResults(options, *forward, client, &forward_reply, &*results)) {
    return *end;
  }
  const BackwardCall whole = MakeBackwardCall(*std::move(forward), *std::move(results));
  const BackwardCall call =
      options.retain_seconds
          ? MakeRetainedCall(forward_reply.context(), whole.tensors.at(kOutGradientSlot))
          : whole;
  return FinishBackward(options, whole, call, client);
}

}  // namespace

int Run(const Options& options) {
  // Never destroyed: with the last channel gRPC 1.51 shuts down, and for that it may wait 10 s for
  // a poller that a large message left behind.
  static client::Client& client = *new client::Client(options.address);
  switch (options.command) {
    case Command::kHealth: return RunHealth(options, client);
    case Command::kCapabilities: return RunCapabilities(options, client);
    case Command::kPlan: return RunPlan(options, client);
    case Command::kForward: return RunForward(options, client);
    case Command::kBackward: return RunBackward(options, client);
  }
  return kExitUsage;
}

}  // namespace attnd::cli
