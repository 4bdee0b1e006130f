// A thin C++ client of attnd: one channel, blocking calls, tensors sent without being copied.
//
// A Client is thread-safe; calls may run at the same time on its one channel. Every call has a
// deadline, and nothing is retried: what to do about UNAVAILABLE is the caller's decision. The
// channel goes straight to the address, past any HTTP proxy of the environment.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attnd/v1/admin.pb.h"
#include "attnd/v1/attention.pb.h"
#include "grpc/health/v1/health.pb.h"

namespace attnd::client {

// The bytes of one tensor of a request. The memory must not change until the call has returned, and
// is released with the last reference: after a failed call the channel may keep one for a while.
struct TensorBytes {
  // Field numbers from the request's down to the tensor's: {v1::ForwardRequest::kBiasFieldNumber},
  // {v1::ForwardRequest::kInputsFieldNumber, v1::QkvBuffers::kQFieldNumber}, ...
  std::vector<int> path;
  std::shared_ptr<const std::byte[]> data;
  int64_t size = 0;
};

struct CallOptions {
  std::chrono::milliseconds timeout{60'000};
  // Wait (until the deadline) for a server that does not answer yet, instead of UNAVAILABLE.
  bool wait_for_ready = false;
};

// Arguments of a channel as Client makes it: no limits on messages, no proxy, no retries.
grpc::ChannelArguments MakeChannelArguments();

class Client {
 public:
  // `address` is host:port or unix:PATH. Connects with the first call.
  explicit Client(const std::string& address);

  // On a channel made elsewhere, with MakeChannelArguments.
  explicit Client(std::shared_ptr<grpc::Channel> channel) : channel_(std::move(channel)) {}

  // `request` holds everything but the payloads of `tensors`: it names each of them with dtype and
  // shape and no source. Fails with RESOURCE_EXHAUSTED, unsent, where the message would pass
  // 2 GiB - 1.
  grpc::Status Forward(const v1::ForwardRequest& request, std::span<const TensorBytes> tensors,
                       const CallOptions& options, v1::ForwardResponse* response);

  // The same for gradients.
  grpc::Status Backward(const v1::BackwardRequest& request, std::span<const TensorBytes> tensors,
                        const CallOptions& options, v1::BackwardResponse* response);

  grpc::Status Plan(const v1::PlanRequest& request, const CallOptions& options,
                    v1::PlanResponse* response);

  grpc::Status GetCapabilities(const CallOptions& options, v1::GetCapabilitiesResponse* response);

  // grpc.health.v1.Health/Check of `service`; empty: the whole server.
  grpc::Status CheckHealth(const std::string& service, const CallOptions& options,
                           ::grpc::health::v1::HealthCheckResponse* response);

 private:
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace attnd::client
