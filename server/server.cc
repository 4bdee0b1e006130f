#include "server/server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "engine/core/status.h"
#include "engine/engine.h"
#include "engine/engine_parts.h"
#include "engine/self_test.h"
#include "server/services/admin_service.h"
#include "server/services/attention_service.h"
#include "server/services/health_service.h"
#include "server/services/inference_service.h"
#include "server/services/sessions_service.h"
#include "server/services/tensors_service.h"
#include "server/telemetry/log.h"

namespace attnd {
namespace {

std::string MakeIncarnation() {
  std::random_device random;
  return absl::StrFormat("%08x%08x", random(), random());
}

absl::Status CannotListen(const std::string& address, std::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat("cannot listen on ", address, ": ", absl::string_view(why.data(), why.size())));
}

// gRPC takes a Unix socket over from a server that still listens on it; so ask first.
bool SomebodyListens(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool connected =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return connected;
}

// Adds listeners to one builder and finds the addresses that it bound.
class Listeners {
 public:
  void Add(grpc::ServerBuilder& builder, const ListenAddress& address) {
    bound_.push_back({address, std::make_unique<int>(0)});
    builder.AddListeningPort(address.text, grpc::InsecureServerCredentials(),
                             bound_.back().port.get());
  }

  absl::Status CheckFree() const {
    for (const Bound& b : bound_) {
      if (b.address.text.starts_with("unix:") && SomebodyListens(b.address.text.substr(5))) {
        return CannotListen(b.address.text, "another process listens there");
      }
    }
    return absl::OkStatus();
  }

  absl::Status FirstFailure() const {
    for (const Bound& b : bound_) {
      if (*b.port == 0) {
        return CannotListen(b.address.text, "the address is in use or cannot be bound");
      }
    }
    return absl::FailedPreconditionError("cannot start the gRPC server");
  }

  std::vector<std::string> Addresses() const {
    std::vector<std::string> addresses;
    for (const Bound& b : bound_) {
      const std::string& text = b.address.text;
      addresses.push_back(
          b.address.any_port ? absl::StrCat(text.substr(0, text.rfind(':') + 1), *b.port) : text);
    }
    return addresses;
  }

 private:
  struct Bound {
    ListenAddress address;
    std::unique_ptr<int> port;  // gRPC writes it when the server starts.
  };
  std::vector<Bound> bound_;
};

void SetChannelArguments(const Config& config, grpc::ServerBuilder& builder) {
  // 2 GiB - 1, the most that protobuf can parse.
  builder.SetMaxReceiveMessageSize(std::numeric_limits<int32_t>::max());
  builder.SetMaxSendMessageSize(std::numeric_limits<int32_t>::max());
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  if (config.max_streams > 0) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, config.max_streams);
  }
}

// The libraries' messages become lines of our log, or nothing: what a client sent is its own error.
void RedirectLibraryLogs() {
  google::protobuf::SetLogHandler(nullptr);
  gpr_set_log_function([](gpr_log_func_args* args) {
    const bool error = args->severity == GPR_LOG_SEVERITY_ERROR;
    Log(error ? LogLevel::kWarning : LogLevel::kDebug, "grpc",
        {{"message", args->message}, {"file", args->file}, {"line", args->line}});
  });
}

class GrpcServer final : public Server {
 public:
  GrpcServer(const Config& config, const std::string& incarnation, std::unique_ptr<Engine> engine,
             std::string why_backend)
      : config_(config),
        engine_(std::move(engine)),
        why_backend_(std::move(why_backend)),
        attention_(*engine_, config.advertise),
        admin_(*engine_, incarnation),
        health_state_(std::make_shared<HealthState>(std::set<std::string>{
            v1::Attention::service_full_name(), v1::Tensors::service_full_name(),
            v1::Sessions::service_full_name(), v1::Admin::service_full_name()})),
        health_(health_state_),
        lone_health_(health_state_) {}

  ~GrpcServer() override {
    if (server_ != nullptr) Stop(absl::Now());
  }

  absl::Status Listen() {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    SetChannelArguments(config_, builder);
    for (const ListenAddress& address : config_.listen) listeners_.Add(builder, address);
    ATTND_RETURN_IF_ERROR(listeners_.CheckFree());
    for (grpc::Service* service : std::initializer_list<grpc::Service*>{
             &attention_, &tensors_, &sessions_, &admin_, &inference_, &health_}) {
      builder.RegisterService(service);
    }
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return listeners_.FirstFailure();
    if (config_.health_listen) ATTND_RETURN_IF_ERROR(ListenForHealth());
    health_state_->SetServing(true);
    return absl::OkStatus();
  }

  std::vector<std::string> addresses() const override {
    std::vector<std::string> all = listeners_.Addresses();
    for (std::string& address : lone_health_listeners_.Addresses()) {
      all.push_back(std::move(address));
    }
    return all;
  }

  std::string backend() const override { return engine_->backends().front()->info().name; }
  std::string why_backend() const override { return why_backend_; }

  void Tidy() override { engine_->DropExpired(absl::Now()); }

  void Drain() override {
    health_state_->SetServing(false);
    absl::SleepFor(config_.drain_delay);
    Stop(absl::Now() + config_.drain_timeout);
  }

 private:
  // The health service alone, on an address of its own.
  absl::Status ListenForHealth() {
    grpc::ServerBuilder builder;
    SetChannelArguments(config_, builder);
    lone_health_listeners_.Add(builder, *config_.health_listen);
    ATTND_RETURN_IF_ERROR(lone_health_listeners_.CheckFree());
    builder.RegisterService(&lone_health_);
    lone_health_server_ = builder.BuildAndStart();
    return lone_health_server_ == nullptr ? lone_health_listeners_.FirstFailure()
                                          : absl::OkStatus();
  }

  void Stop(absl::Time deadline) {
    engine_->Drain(deadline);
    // gRPC's own shutdown waits for idle clients to acknowledge it, and resets connections that
    // still carry a reply. So the replies are waited for here, and the clients for a moment.
    attention_.live_calls().WaitForNone(std::max(deadline, absl::Now() + kLastReplies));
    health_state_->Shutdown();
    for (grpc::Server* server : {server_.get(), lone_health_server_.get()}) {
      if (server != nullptr) server->Shutdown(absl::ToChronoTime(absl::Now() + kLastClients));
    }
    server_.reset();
    lone_health_server_.reset();
  }

  static constexpr absl::Duration kLastReplies = absl::Seconds(1);
  static constexpr absl::Duration kLastClients = absl::Milliseconds(500);

  const Config config_;
  const std::unique_ptr<Engine> engine_;
  const std::string why_backend_;
  AttentionService attention_;
  TensorsService tensors_;
  SessionsService sessions_;
  AdminService admin_;
  InferenceService inference_;
  const std::shared_ptr<HealthState> health_state_;
  HealthService health_;
  HealthService lone_health_;  // A service belongs to one server.
  Listeners listeners_;
  Listeners lone_health_listeners_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> lone_health_server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config) {
  RedirectLibraryLogs();
  absl::StatusOr<ChosenParts> chosen =
      MakeEngineParts({.use_gpu = config.backend != BackendChoice::kCpu,
                       .require_gpu = config.backend == BackendChoice::kCuda,
                       .cpu_fallback = config.fallback == Fallback::kCpu,
                       .threads = config.threads,
                       .queue_bytes = config.max_queue_bytes,
                       .host_pool_bytes = config.host_pool_bytes,
                       .pinned_pool_bytes = config.pinned_pool_bytes,
                       .device_pool = config.device_pool});
  if (!chosen.ok()) {
    return absl::UnavailableError(absl::StrCat("--backend=cuda: ", chosen.status().message()));
  }
  chosen->parts.max_lease = config.max_lease;
  chosen->parts.incarnation = MakeIncarnation();
  const std::string incarnation = chosen->parts.incarnation;
  ATTND_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, Engine::Make(std::move(chosen->parts)));
  for (const std::string& failure : RunSelfTest(*engine)) {
    Log(LogLevel::kError, "self-test failed", {{"kernels", failure}});
  }
  auto server =
      std::make_unique<GrpcServer>(config, incarnation, std::move(engine), std::move(chosen->why));
  ATTND_RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace attnd
