#include "server/services/attention_service.h"

#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "engine/core/request_context.h"
#include "engine/core/status.h"
#include "server/telemetry/log.h"
#include "server/wire/decode.h"
#include "server/wire/encode.h"

namespace attnd {
namespace {

struct ForwardRpc {
  using Request = v1::ForwardRequest;
  static constexpr const char* kFailed = "forward failed";
  static constexpr auto kDecode = wire::DecodeForward;
  static constexpr auto kEncode = wire::EncodeForward;
};

struct BackwardRpc {
  using Request = v1::BackwardRequest;
  static constexpr const char* kFailed = "backward failed";
  static constexpr auto kDecode = wire::DecodeBackward;
  static constexpr auto kEncode = wire::EncodeBackward;
};

// One call, from its bytes to its reply. It lives until gRPC is done with it; the engine's `done`
// comes before that, because only it finishes the call.
template <typename Rpc>
class ComputeCall final : public grpc::ServerUnaryReactor {
 public:
  ComputeCall(const grpc::CallbackServerContext& context, grpc::ByteBuffer* reply,
              LiveCalls& live_calls)
      : reply_(reply),
        live_calls_(live_calls),
        cancellation_(std::make_shared<CancellationToken>()) {
    live_calls_.Begin();
    deadline_ = context.deadline() == std::chrono::system_clock::time_point::max()
                    ? absl::InfiniteFuture()
                    : absl::FromChrono(context.deadline());
  }

  void Start(Engine& engine, const grpc::ByteBuffer& bytes, const std::string& owner) {
    absl::StatusOr<CheckedCall> call = CatchBadAlloc([&] { return Check(engine, bytes); });
    if (!call.ok()) return FinishWith(call.status());
    decoded_.owner = owner;
    engine.Prepare(*std::move(call), {.deadline = deadline_, .cancellation = cancellation_},
                   [this, &engine](absl::StatusOr<PreparedCall> prepared) {
                     if (!prepared.ok()) return FinishWith(prepared.status());
                     FillAndSubmit(engine, *std::move(prepared));
                   });
  }

  void OnCancel() override { cancellation_->Cancel(CancellationToken::Cause::kClient); }
  void OnDone() override {
    live_calls_.End();
    delete this;
  }

 private:
  // The contract's order: contradictions, then what is not built, then (in Prepare) memory.
  absl::StatusOr<CheckedCall> Check(Engine& engine, const grpc::ByteBuffer& bytes) {
    ATTND_RETURN_IF_ERROR(tensors_.Parse(bytes, request_));
    ATTND_ASSIGN_OR_RETURN(decoded_, Rpc::kDecode(request_, tensors_));
    ATTND_ASSIGN_OR_RETURN(CheckedCall call, engine.Check(decoded_.description));
    ATTND_RETURN_IF_ERROR(decoded_.unbuilt);
    ATTND_RETURN_IF_ERROR(wire::CheckDestinations(decoded_, call.problem));
    return call;
  }

  void FillAndSubmit(Engine& engine, PreparedCall prepared) {
    const absl::Time start = absl::Now();
    const absl::Status status =
        CatchBadAlloc([&] { return wire::FillInputs(request_, tensors_, prepared); });
    // The request's bytes are in the pool now, and need not wait for the answer.
    tensors_ = wire::TensorBytes();
    if (!status.ok()) return FinishWith(status);
    prepared.set_copy_in(absl::Now() - start);
    engine.Submit(std::move(prepared), [this](absl::StatusOr<CallResult> result) {
      if (result.ok()) *reply_ = Rpc::kEncode(decoded_, *result);
      FinishWith(result.status());
    });
  }

  void FinishWith(const absl::Status& status) {
    // What a client did wrong is told to the client; only our own failures are news here.
    if (!status.ok()) {
      Log(absl::IsInternal(status) ? LogLevel::kError : LogLevel::kDebug, Rpc::kFailed,
          {{"code", absl::StatusCodeToString(status.code())},
           {"reason", ErrorReason(status)},
           {"error", std::string(status.message())}});
    }
    Finish(wire::ToGrpc(status));
  }

  grpc::ByteBuffer* const reply_;
  LiveCalls& live_calls_;
  const std::shared_ptr<CancellationToken> cancellation_;
  absl::Time deadline_;
  typename Rpc::Request request_;
  wire::TensorBytes tensors_;
  wire::DecodedCall decoded_;
};

// One Plan call; it lives as a ComputeCall does.
class PlanCall final : public grpc::ServerUnaryReactor {
 public:
  PlanCall(grpc::ByteBuffer* reply, LiveCalls& live_calls)
      : reply_(reply), live_calls_(live_calls) {
    live_calls_.Begin();
  }

  void Start(Engine& engine, const grpc::ByteBuffer& bytes) {
    const absl::Status status = CatchBadAlloc([&] { return Decode(bytes); });
    if (!status.ok()) return FinishWith(status);
    engine.Plan(decoded_.description, [this](const absl::StatusOr<PlanReport>& report) {
      if (!report.ok()) return FinishWith(report.status());
      Answer(wire::EncodePlan(*report, decoded_.unbuilt.ok()
                                           ? wire::CheckDestinations(decoded_, report->problem)
                                           : decoded_.unbuilt));
    });
  }

  void OnDone() override {
    live_calls_.End();
    delete this;
  }

 private:
  absl::Status Decode(const grpc::ByteBuffer& bytes) {
    v1::PlanRequest request;
    ATTND_RETURN_IF_ERROR(wire::Parse(bytes, request));
    ATTND_ASSIGN_OR_RETURN(decoded_, wire::DecodePlan(request));
    return absl::OkStatus();
  }

  // What cannot be planned: an error, but past a limit, which is valid and for Plan an answer.
  void FinishWith(const absl::Status& status) {
    if (absl::IsUnimplemented(status)) return Answer(wire::Unsupported(status));
    Finish(wire::ToGrpc(status));
  }

  void Answer(const v1::PlanResponse& response) {
    *reply_ = wire::Serialize(response);
    Finish(grpc::Status::OK);
  }

  grpc::ByteBuffer* const reply_;
  LiveCalls& live_calls_;
  wire::DecodedCall decoded_;
};

}  // namespace

void LiveCalls::Begin() {
  std::lock_guard lock(mutex_);
  ++count_;
}

void LiveCalls::End() {
  std::lock_guard lock(mutex_);
  if (--count_ == 0) changed_.notify_all();
}

void LiveCalls::WaitForNone(absl::Time deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, absl::ToChronoTime(deadline), [this] { return count_ == 0; });
}

grpc::ServerUnaryReactor* AttentionService::Forward(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* reply) {
  auto* call = new ComputeCall<ForwardRpc>(*context, reply, live_calls_);
  call->Start(engine_, *request, owner_);
  return call;
}

grpc::ServerUnaryReactor* AttentionService::Backward(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* reply) {
  auto* call = new ComputeCall<BackwardRpc>(*context, reply, live_calls_);
  call->Start(engine_, *request, owner_);
  return call;
}

grpc::ServerUnaryReactor* AttentionService::Plan(grpc::CallbackServerContext*,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* reply) {
  auto* call = new PlanCall(reply, live_calls_);
  call->Start(engine_, *request);
  return call;
}

}  // namespace attnd
