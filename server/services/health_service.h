// grpc.health.v1.Health on our own state: the service that gRPC brings says SERVING before anything
// is ready, and reflection does not describe it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/services/calls.h"

namespace attnd {

class HealthWatch;

// Whether the server serves, shared by the listeners' health services. All known services (and "",
// the server as a whole) share one state. Thread-safe.
class HealthState {
 public:
  using Status = grpc::health::v1::HealthCheckResponse;

  explicit HealthState(std::set<std::string> services) : services_(std::move(services)) {}

  // NOT_SERVING until told.
  void SetServing(bool serving);
  // Ends all watches, so that the server can shut down. NOT_SERVING from then on.
  void Shutdown();

  bool Knows(const std::string& service) const {
    return service.empty() || services_.count(service) > 0;
  }

 private:
  friend class HealthWatch;
  friend class HealthService;
  Status::ServingStatus CurrentLocked() const;
  void NotifyLocked();

  const std::set<std::string> services_;
  mutable std::mutex mutex_;
  bool serving_ = false;
  bool shut_down_ = false;
  std::set<HealthWatch*> watches_;
};

class HealthService final : public grpc::health::v1::Health::WithRawCallbackMethod_Check<
                                grpc::health::v1::Health::WithRawCallbackMethod_Watch<
                                    grpc::health::v1::Health::Service>> {
 public:
  explicit HealthService(std::shared_ptr<HealthState> state) : state_(std::move(state)) {}

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* reply) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Watch(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request) override;

 private:
  const std::shared_ptr<HealthState> state_;
};

}  // namespace attnd
