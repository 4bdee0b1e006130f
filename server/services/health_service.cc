#include "server/services/health_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One Watch stream: sends the state at once and whenever it changes; a state that changes while a
// message is on its way is sent after it. All members but the reactor's are under the state's
// mutex.
class HealthWatch final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  HealthWatch(std::shared_ptr<HealthState> state, bool known)
      : state_(std::move(state)), known_(known) {
    std::lock_guard lock(state_->mutex_);
    state_->watches_.insert(this);
    AdvanceLocked();
  }

  explicit HealthWatch(const absl::Status& refusal) { Finish(wire::ToGrpc(refusal)); }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(state_->mutex_);
    writing_ = false;
    if (!ok) cancelled_ = true;
    AdvanceLocked();
  }

  void OnCancel() override {
    if (state_ == nullptr) return;
    std::lock_guard lock(state_->mutex_);
    cancelled_ = true;
    AdvanceLocked();
  }

  void OnDone() override {
    if (state_ != nullptr) {
      std::lock_guard lock(state_->mutex_);
      state_->watches_.erase(this);
    }
    delete this;
  }

  // Starts whatever is due: a write where the sent state is stale, the end where it is over.
  void AdvanceLocked() {
    if (writing_ || finished_) return;
    if (cancelled_ || state_->shut_down_) {
      finished_ = true;
      Finish(cancelled_ ? grpc::Status::CANCELLED
                        : wire::ToGrpc(MakeError(absl::StatusCode::kUnavailable, reason::kDraining,
                                                 "", "the server is shutting down")));
      return;
    }
    const HealthCheckResponse::ServingStatus current =
        known_ ? state_->CurrentLocked() : HealthCheckResponse::SERVICE_UNKNOWN;
    if (current == sent_) return;
    HealthCheckResponse response;
    response.set_status(current);
    message_ = wire::Serialize(response);
    sent_ = current;
    writing_ = true;
    StartWrite(&message_);
  }

 private:
  const std::shared_ptr<HealthState> state_;  // Null for a refused call.
  const bool known_ = false;
  HealthCheckResponse::ServingStatus sent_ = HealthCheckResponse::UNKNOWN;
  bool writing_ = false;
  bool finished_ = false;
  bool cancelled_ = false;
  grpc::ByteBuffer message_;
};

HealthCheckResponse::ServingStatus HealthState::CurrentLocked() const {
  return serving_ ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

void HealthState::NotifyLocked() {
  for (HealthWatch* watch : watches_) watch->AdvanceLocked();
}

void HealthState::SetServing(bool serving) {
  std::lock_guard lock(mutex_);
  serving_ = serving && !shut_down_;
  NotifyLocked();
}

void HealthState::Shutdown() {
  std::lock_guard lock(mutex_);
  serving_ = false;
  shut_down_ = true;
  NotifyLocked();
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* reply) {
  return AnswerUnary<HealthCheckRequest>(
      context, request, reply,
      [this](const HealthCheckRequest& check) -> absl::StatusOr<HealthCheckResponse> {
        if (!state_->Knows(check.service())) {
          return MakeError(
              absl::StatusCode::kNotFound, reason::kInvalidField, "service",
              absl::StrCat("service \"", check.service().substr(0, 64), "\" is not served here"));
        }
        HealthCheckResponse response;
        std::lock_guard lock(state_->mutex_);
        response.set_status(state_->CurrentLocked());
        return response;
      });
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* HealthService::Watch(grpc::CallbackServerContext*,
                                                                 const grpc::ByteBuffer* request) {
  HealthCheckRequest watch;
  if (absl::Status status = wire::Parse(*request, watch); !status.ok()) {
    return new HealthWatch(status);
  }
  return new HealthWatch(state_, state_->Knows(watch.service()));
}

}  // namespace attnd
