// Settings of attnd: from the command line, the environment and a TOML file, checked.
//
// A flag beats the environment (ATTND_<NAME>, dashes as underscores, lists separated by commas, an
// empty variable counts as unset), which beats the file (same names). A source that sets a list
// replaces it whole. A value is checked even where a stronger source replaces it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "engine/memory/memory_pool.h"
#include "server/config_values.h"
#include "server/telemetry/log.h"

namespace attnd {

enum class BackendChoice : uint8_t { kAuto, kCuda, kCpu };
enum class Fallback : uint8_t { kNone, kCpu };

struct Config {
  // At least one, all different. All local (ListenAddress::local) unless `insecure`.
  std::vector<ListenAddress> listen;
  std::optional<ListenAddress> health_listen;  // The health service alone; differs from `listen`.
  std::string advertise;                       // Empty: not given.
  bool insecure = false;
  BackendChoice backend = BackendChoice::kAuto;
  Fallback fallback = Fallback::kNone;
  int threads = 0;  // 0: all hardware threads.
  // Host memory that holds tensors: its cap where the CPU serves, and where a GPU does what is
  // pinned when the server starts. Both > 0; different only while --pinned-pool is not given.
  int64_t host_pool_bytes = 0;
  int64_t pinned_pool_bytes = 0;
  PoolSize device_pool;         // > 0. A share is one of the device memory that is free.
  int64_t max_queue_bytes = 0;  // > 0.
  absl::Duration max_lease;     // 0 .. 30 days.
  int max_streams = 0;          // Of one connection; 0: gRPC's own limit.
  absl::Duration drain_delay;   // 0 .. 1 hour, as is drain_timeout.
  absl::Duration drain_timeout;
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
};

// What ParseConfig reads. `args` are without the program's name. `getenv` answers nullopt for an
// unset variable; only the variables that belong to settings are asked for, so that those which
// Kubernetes adds (ATTND_PORT, ATTND_SERVICE_HOST) do no harm.
struct ConfigSources {
  std::vector<std::string> args;
  std::function<std::optional<std::string>(const std::string& name)> getenv;
  int64_t memory_bytes = 0;  // What a share such as 50% is taken of; > 0.
  std::string version;       // For --version.
};

// Print `text` (and a newline) and end with `code`: 0 with the text that was asked for, on standard
// output; 2 with a sentence that names the flag, variable or file and line, on standard error.
struct ExitNow {
  int code = 0;
  std::string text;
};

using ParseResult = std::variant<Config, ExitNow>;

// Pure but for reading the file of --config. Throws nothing, ends nothing, prints nothing.
ParseResult ParseConfig(const ConfigSources& sources);

}  // namespace attnd
