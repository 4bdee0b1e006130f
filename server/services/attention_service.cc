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

// One Forward call, from its bytes to its reply. It lives until gRPC is done with it; the engine's
// `done` comes before that, because only it finishes the call.
class ForwardCall final : public grpc::ServerUnaryReactor {
 public:
  ForwardCall(const grpc::CallbackServerContext& context, grpc::ByteBuffer* reply,
              LiveCalls& live_calls)
      : reply_(reply),
        live_calls_(live_calls),
        cancellation_(std::make_shared<CancellationToken>()) {
    live_calls_.Begin();
    deadline_ = context.deadline() == std::chrono::system_clock::time_point::max()
                    ? absl::InfiniteFuture()
                    : absl::FromChrono(context.deadline());
  }

  void Start(Engine& engine, const grpc::ByteBuffer& bytes) {
    PreparedForward prepared;
    const absl::Status status = CatchBadAlloc([&]() -> absl::Status {
      ATTND_ASSIGN_OR_RETURN(prepared, Prepare(engine, bytes));
      return absl::OkStatus();
    });
    if (!status.ok()) return FinishWith(status);
    engine.Submit(std::move(prepared), {.deadline = deadline_, .cancellation = cancellation_},
                  [this](absl::StatusOr<ForwardResult> result) {
                    if (result.ok()) *reply_ = wire::EncodeForward(decoded_, *std::move(result));
                    FinishWith(result.status());
                  });
  }

  void OnCancel() override { cancellation_->Cancel(CancellationToken::Cause::kClient); }
  void OnDone() override {
    live_calls_.End();
    delete this;
  }

 private:
  // Checks in the contract's order: contradictions, then what is not built, then memory.
  absl::StatusOr<PreparedForward> Prepare(Engine& engine, const grpc::ByteBuffer& bytes) {
    v1::ForwardRequest request;
    wire::TensorBytes tensors;
    ATTND_RETURN_IF_ERROR(tensors.Parse(bytes, request));
    ATTND_ASSIGN_OR_RETURN(decoded_, wire::DecodeForward(request, tensors));
    ATTND_ASSIGN_OR_RETURN(AttentionProblem problem, engine.Check(decoded_.description));
    ATTND_RETURN_IF_ERROR(decoded_.unbuilt);
    ATTND_RETURN_IF_ERROR(wire::CheckDestinations(decoded_, problem));
    ATTND_ASSIGN_OR_RETURN(PreparedForward prepared,
                           engine.Prepare(std::move(problem), decoded_.description.return_lse));
    const absl::Time start = absl::Now();
    ATTND_RETURN_IF_ERROR(wire::FillInputs(request, tensors, prepared));
    prepared.set_copy_in(absl::Now() - start);
    return prepared;
  }

  void FinishWith(const absl::Status& status) {
    // What a client did wrong is told to the client; only our own failures are news here.
    if (!status.ok()) {
      Log(absl::IsInternal(status) ? LogLevel::kError : LogLevel::kDebug, "forward failed",
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
  wire::DecodedForward decoded_;
};

absl::StatusOr<v1::PlanResponse> AnswerPlan(const Engine& engine, const v1::PlanRequest& request) {
  ATTND_ASSIGN_OR_RETURN(const wire::DecodedForward decoded, wire::DecodePlan(request));
  ATTND_ASSIGN_OR_RETURN(const PlanReport report, engine.Plan(decoded.description));
  return wire::EncodePlan(report, decoded.unbuilt.ok()
                                      ? wire::CheckDestinations(decoded, report.problem)
                                      : decoded.unbuilt);
}

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
  auto* call = new ForwardCall(*context, reply, live_calls_);
  call->Start(engine_, *request);
  return call;
}

grpc::ServerUnaryReactor* AttentionService::Plan(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* reply) {
  return AnswerUnary<v1::PlanRequest>(
      context, request, reply,
      [this](const v1::PlanRequest& plan) -> absl::StatusOr<v1::PlanResponse> {
        absl::StatusOr<v1::PlanResponse> response = AnswerPlan(engine_, plan);
        // Past a limit: valid, and for Plan an answer.
        if (absl::IsUnimplemented(response.status())) return wire::Unsupported(response.status());
        return response;
      });
}

}  // namespace attnd
