// attnd: reads its settings, serves until SIGTERM or SIGINT, drains, and ends with 0.
//
// Exit codes: 0; 1 where an address or the GPU that was asked for cannot be had; 2 for settings
// that are wrong or not built yet.

#include <malloc.h>
#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <iostream>
#include <variant>

#include "absl/strings/str_join.h"
#include "server/config.h"
#include "server/server.h"
#include "server/telemetry/log.h"
#include "server/version.h"

namespace attnd {
namespace {

ConfigSources SourcesOf(int argc, char** argv) {
  return {.args = {argv + 1, argv + argc},
          .getenv = [](const std::string& name) -> std::optional<std::string> {
            const char* value = std::getenv(name.c_str());
            return value == nullptr ? std::nullopt : std::optional<std::string>(value);
          },
          .memory_bytes = UsableMemoryBytes(),
          .version = kVersion};
}

// glibc keeps what was freed: in an arena for each few threads, and in pieces as large as the
// largest block ever freed. A server that runs for months gives it back, at once where it can and
// otherwise every few seconds (WaitForSignal). One arena is enough: small blocks come from each
// thread's cache, tensors from the pool.
void BoundRetainedMemory() {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 128 << 10);
  mallopt(M_TRIM_THRESHOLD, 128 << 10);
}

int WaitForSignal(const sigset_t& signals, Server& server) {
  constexpr timespec kTidyInterval = {.tv_sec = 5, .tv_nsec = 0};
  int signal = -1;
  while ((signal = sigtimedwait(&signals, nullptr, &kTidyInterval)) < 0) {
    server.Tidy();
    malloc_trim(0);
  }
  return signal;
}

int Run(const Config& config, const sigset_t& signals) {
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config);
  if (!server.ok()) {
    std::cerr << "attnd: " << server.status().message() << "\n";
    return 1;
  }
  for (const std::string& address : (*server)->addresses()) {
    std::cout << "listening on " << address << std::endl;  // Flushed: scripts wait for it.
  }
  Log(LogLevel::kInfo, "serving",
      {{"version", kVersion},
       {"backend", (*server)->backend()},
       {"why", (*server)->why_backend()},
       {"addresses", absl::StrJoin((*server)->addresses(), ",")}});
  const int signal = WaitForSignal(signals, **server);
  Log(LogLevel::kInfo, "draining", {{"signal", signal == SIGTERM ? "SIGTERM" : "SIGINT"}});
  (*server)->Drain();
  Log(LogLevel::kInfo, "stopped");
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::BoundRetainedMemory();
  // Blocked before any thread starts, so that only sigtimedwait gets them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  const attnd::ParseResult parsed = attnd::ParseConfig(attnd::SourcesOf(argc, argv));
  if (const auto* exit = std::get_if<attnd::ExitNow>(&parsed)) {
    (exit->code == 0 ? std::cout : std::cerr) << exit->text << "\n";
    return exit->code;
  }
  const auto& config = std::get<attnd::Config>(parsed);
  attnd::InitLogging(config.log_level, config.log_format);
  return attnd::Run(config, signals);
}
