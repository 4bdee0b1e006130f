#include "client/cli/commands.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "client/cli/local_check.h"
#include "client/cli/npy.h"
#include "client/cli/progress_bar.h"
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

// Sends the call, under a bar where one is wanted and can be had.
grpc::Status Send(const Options& options, const ForwardCall& call, client::Client& client,
                  v1::ForwardResponse* reply, ForwardReport* report) {
  std::vector<client::TensorBytes> tensors;
  for (const auto& [field, tensor] : call.inputs) {
    tensors.push_back({field, tensor.data, tensor.byte_size});
    report->sent_bytes += tensor.byte_size;
  }
  const client::CallOptions call_options = MakeCallOptions(options);
  std::unique_ptr<client::CountedConnection> counted;
  if (options.progress || (report->sent_bytes > kProgressBytes && isatty(STDERR_FILENO) != 0)) {
    counted = client::CountedConnection::Connect(options.address, call_options.timeout);
  }
  const Clock::time_point start = Clock::now();
  grpc::Status status;
  if (counted != nullptr) {
    const ProgressBar bar([&counted] { return counted->sent_bytes(); }, report->sent_bytes);
    client::Client watched(counted->channel());
    status = watched.Forward(call.request, tensors, call_options, reply);
  } else {
    // Also where nobody could be reached: this call then says why.
    status = client.Forward(call.request, tensors, call_options, reply);
  }
  report->seconds = std::chrono::duration<double>(Clock::now() - start).count();
  report->received_bytes =
      static_cast<int64_t>(reply->out().data().size() + reply->lse().data().size());
  return status;
}

// Every tensor of the reply has come in full.
bool IsWhole(const v1::Tensor& tensor) {
  return NumBytes(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}) ==
         static_cast<int64_t>(tensor.data().size());
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
  ForwardReport report;
  const grpc::Status status = Send(options, *call, client, &reply, &report);
  if (!status.ok()) return Refused(options, status);
  if (!IsWhole(reply.out()) || (options.request.lse && !IsWhole(reply.lse()))) {
    return Fail(kExitRefused,
                "INTERNAL: the reply's tensors do not have the bytes of their shapes");
  }
  for (const absl::Status& written :
       {Write(options.out_file, reply.out()), Write(options.lse_out_file, reply.lse())}) {
    if (!written.ok()) return Fail(kExitRefused, written);
  }
  if (options.check) {
    const absl::StatusOr<CheckResult> check = CheckForward(call->request, call->inputs, reply);
    if (!check.ok()) return Fail(kExitRefused, check.status());
    report.check = *check;
  }
  Print(options.json ? ForwardJson(reply, report) + "\n" : ForwardText(*call, reply, report));
  return report.check && !report.check->passed ? kExitRefused : kExitOk;
}

}  // namespace

int Run(const Options& options) {
  // Never destroyed: with the last channel gRPC 1.51 shuts down, and for that it may wait 10 s for a
  // poller that a large message left behind.
  static client::Client& client = *new client::Client(options.address);
  switch (options.command) {
    case Command::kHealth: return RunHealth(options, client);
    case Command::kCapabilities: return RunCapabilities(options, client);
    case Command::kPlan: return RunPlan(options, client);
    case Command::kForward: return RunForward(options, client);
  }
  return kExitUsage;
}

}  // namespace attnd::cli
