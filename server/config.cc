// One table holds every setting: its name, its default, its help and how its text is checked and
// stored. The default, the file, the environment and the flags are applied in this order through
// the same setters, so no source can set what another cannot, or with another syntax.
#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <map>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "engine/core/status.h"
#include "server/config_file.h"

namespace attnd {
namespace {

constexpr int kUsageExitCode = 2;
constexpr int kMaxThreads = 4096;
constexpr int kMaxStreams = 1'000'000;
constexpr absl::Duration kMaxDrain = absl::Hours(1);
constexpr absl::Duration kMaxLease = absl::Hours(30 * 24);
constexpr size_t kMaxFileBytes = 1 << 20;
constexpr int64_t kMostPinnedByDefault = int64_t{8} << 30;

using Values = std::vector<std::string>;
using Setter = absl::Status (*)(const Values&, const ConfigSources&, Config&);

enum class Arity : uint8_t { kOne, kList, kSwitch };

struct Setting {
  const char* name;
  const char* metavar;
  const char* default_value;  // Empty: none.
  const char* help;
  Arity arity;
  Setter set;  // nullptr: not built yet. Gets one value, or at least one for a list.
};

template <typename Value, typename Target>
absl::Status Assign(const absl::StatusOr<Value>& value, Target& target) {
  if (value.ok()) target = static_cast<Target>(*value);
  return value.status();
}

template <typename Enum>
absl::Status Choose(const std::string& text,
                    std::initializer_list<std::pair<const char*, Enum>> choices, Enum& target) {
  for (const auto& [name, value] : choices) {
    if (text == name) {
      target = value;
      return absl::OkStatus();
    }
  }
  const auto append_name = [](std::string* out, const auto& choice) { out->append(choice.first); };
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is not one of ", absl::StrJoin(choices, ", ", append_name)));
}

absl::Status SetListen(const Values& values, const ConfigSources&, Config& config) {
  config.listen.clear();
  for (const std::string& value : values) {
    ATTND_ASSIGN_OR_RETURN(ListenAddress address, ParseListenAddress(value));
    config.listen.push_back(std::move(address));
  }
  return absl::OkStatus();
}

absl::Status SetAdvertise(const Values& values, const ConfigSources&, Config& config) {
  ATTND_ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress(values[0]));
  if (address.any_port || address.wildcard) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", values[0], "' is no address that a client can connect to"));
  }
  config.advertise = address.text;
  return absl::OkStatus();
}

// The host memory of requests is taken as it is needed, but pinned memory at once: so the default
// pins less.
absl::Status SetPinnedPool(const Values& values, const ConfigSources& sources, Config& config) {
  ATTND_ASSIGN_OR_RETURN(config.host_pool_bytes, ParseByteSize(values[0], sources.memory_bytes));
  config.pinned_pool_bytes = config.host_pool_bytes;
  return absl::OkStatus();
}

// A lambda of the Setter type.
#define ATTND_SET(expression)                                                                     \
  [](const Values& v, [[maybe_unused]] const ConfigSources& sources, Config& c) -> absl::Status { \
    return expression;                                                                            \
  }

const std::array kSettings = {
    Setting{"listen", "ADDR", "127.0.0.1:50051",
            "Serve here: host:port, host:0 (a free port), [IPv6]:port or unix:PATH; repeatable",
            Arity::kList, SetListen},
    Setting{"health-listen", "ADDR", "", "Serve the health service alone here, in plaintext",
            Arity::kOne, ATTND_SET(Assign(ParseListenAddress(v[0]), c.health_listen))},
    Setting{"advertise", "ADDR", "", "The address that handles carry as their owner", Arity::kOne,
            SetAdvertise},
    Setting{"insecure", "", "false", "Allow plaintext on addresses that other machines can reach",
            Arity::kSwitch,
            ATTND_SET(Choose<bool>(
                v[0], {{"true", true}, {"false", false}, {"1", true}, {"0", false}}, c.insecure))},
    Setting{"backend", "NAME", "auto", "What computes: auto, cuda or cpu", Arity::kOne,
            ATTND_SET(Choose<BackendChoice>(v[0],
                                            {{"auto", BackendChoice::kAuto},
                                             {"cuda", BackendChoice::kCuda},
                                             {"cpu", BackendChoice::kCpu}},
                                            c.backend))},
    Setting{"fallback", "NAME", "none", "What computes where the backend cannot: none or cpu",
            Arity::kOne,
            ATTND_SET(Choose<Fallback>(v[0], {{"none", Fallback::kNone}, {"cpu", Fallback::kCpu}},
                                       c.fallback))},
    Setting{"threads", "N", "0", "Threads that compute; 0: all hardware threads", Arity::kOne,
            ATTND_SET(Assign(ParseInteger(v[0], 0, kMaxThreads), c.threads))},
    Setting{"pinned-pool", "BYTES", "50%",
            "Cap of the host memory that holds tensors: 512MiB, 2GB, 50% (of all memory); with a "
            "GPU, pinned at start, by default at most 8GiB",
            Arity::kOne, SetPinnedPool},
    Setting{"device-pool", "BYTES", "80%",
            "GPU memory taken at start: 20GiB, or a share of what is free", Arity::kOne,
            ATTND_SET(Assign(ParsePoolSize(v[0]), c.device_pool))},
    Setting{"max-queue", "BYTES", "1GiB", "Cap of the bytes of requests that wait", Arity::kOne,
            ATTND_SET(Assign(ParseByteSize(v[0]), c.max_queue_bytes))},
    Setting{"max-lease", "TIME", "1h",
            "Longest time for which a client may have the server keep something (at most 720h)",
            Arity::kOne, ATTND_SET(Assign(ParseDurationUpTo(v[0], kMaxLease), c.max_lease))},
    Setting{"max-streams", "N", "0", "Calls at once on one connection; 0: no limit of ours",
            Arity::kOne, ATTND_SET(Assign(ParseInteger(v[0], 0, kMaxStreams), c.max_streams))},
    Setting{"drain-delay", "TIME", "0s",
            "On SIGTERM: time between NOT_SERVING and refusing requests (500ms, 10s, at most 1h)",
            Arity::kOne, ATTND_SET(Assign(ParseDurationUpTo(v[0], kMaxDrain), c.drain_delay))},
    Setting{"drain-timeout", "TIME", "10s", "On SIGTERM: time that accepted requests may take",
            Arity::kOne, ATTND_SET(Assign(ParseDurationUpTo(v[0], kMaxDrain), c.drain_timeout))},
    Setting{"log-level", "NAME", "info", "trace, debug, info, warning or error", Arity::kOne,
            ATTND_SET(Choose<LogLevel>(v[0],
                                       {{"trace", LogLevel::kTrace},
                                        {"debug", LogLevel::kDebug},
                                        {"info", LogLevel::kInfo},
                                        {"warning", LogLevel::kWarning},
                                        {"error", LogLevel::kError}},
                                       c.log_level))},
    Setting{"log-format", "NAME", "text", "text or json (one object on a line)", Arity::kOne,
            ATTND_SET(Choose<LogFormat>(
                v[0], {{"text", LogFormat::kText}, {"json", LogFormat::kJson}}, c.log_format))},
    Setting{"metrics-listen", "ADDR", "", "", Arity::kOne, nullptr},
    Setting{"devices", "LIST", "", "", Arity::kOne, nullptr},
    Setting{"warm", "FILE", "", "", Arity::kOne, nullptr},
    Setting{"quotas", "FILE", "", "", Arity::kOne, nullptr},
    Setting{"allow-shared-memory", "", "", "", Arity::kSwitch, nullptr},
    Setting{"shared-memory-prefix", "NAME", "", "", Arity::kOne, nullptr},
    Setting{"allow-cuda-ipc", "", "", "", Arity::kSwitch, nullptr},
    Setting{"tls-cert", "FILE", "", "", Arity::kOne, nullptr},
    Setting{"tls-key", "FILE", "", "", Arity::kOne, nullptr},
    Setting{"tls-client-ca", "FILE", "", "", Arity::kOne, nullptr},
    Setting{"tokens", "FILE", "", "", Arity::kOne, nullptr},
};
#undef ATTND_SET

// Says where the other values are: read before them, and no key of the file.
constexpr Setting kConfigFile{
    "config",    "FILE",
    "",          "Read settings from this TOML file",
    Arity::kOne, [](const Values&, const ConfigSources&, Config&) { return absl::OkStatus(); }};

std::string FlagName(const Setting& setting) { return absl::StrCat("--", setting.name); }

std::string VariableName(const Setting& setting) {
  return absl::StrCat("ATTND_",
                      absl::StrReplaceAll(absl::AsciiStrToUpper(setting.name), {{"-", "_"}}));
}

std::optional<std::string> Variable(const Setting& setting, const ConfigSources& sources) {
  std::optional<std::string> value = sources.getenv(VariableName(setting));
  if (value && value->empty()) return std::nullopt;
  return value;
}

absl::Status UsageError(const std::string& origin, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(origin, problem));
}

// `origin` names the setting as its source does.
absl::Status Apply(const Setting& setting, const std::string& origin, const Values& values,
                   const ConfigSources& sources, Config& config) {
  if (setting.set == nullptr) return UsageError(origin, " is not built yet");
  if (values.empty()) return UsageError(origin, " has no value");
  if (values.size() > 1 && setting.arity != Arity::kList) {
    return UsageError(origin, absl::StrCat(" takes one value, and ", values.size(), " are given"));
  }
  const absl::Status status = setting.set(values, sources, config);
  return status.ok() ? status : UsageError(origin, absl::StrCat(": ", status.message()));
}

// --- The command line ---

using Flags = std::map<std::string, Values>;  // By the setting's name; only those that are given.

CLI::Option* AddFlag(const Setting& setting, CLI::App& app) {
  if (setting.arity == Arity::kSwitch) {
    return app.add_flag(FlagName(setting), setting.help)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  }
  const CLI::callback_t keep_text = [](const CLI::results_t&) { return true; };
  std::string help = setting.help;
  if (*setting.default_value != '\0') absl::StrAppend(&help, " [", setting.default_value, "]");
  return app.add_option(FlagName(setting), keep_text, help)
      ->type_name(setting.metavar)
      ->type_size(1)
      ->expected(setting.set == nullptr ? 0 : 1, 1)  // Refused with or without a value.
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

// CLI11 takes the next argument as the value of `--name=`.
absl::Status CheckEmptyValues(const Values& args) {
  for (const std::string& arg : args) {
    if (arg.starts_with("--") && arg.find('=') == arg.size() - 1) {
      return UsageError(arg.substr(0, arg.size() - 1), " has no value");
    }
  }
  return absl::OkStatus();
}

std::variant<Flags, ExitNow> ParseFlags(const ConfigSources& sources) {
  CLI::App app("attnd: an attention service over gRPC", "attnd");
  app.allow_extras();
  app.footer(
      "\nEvery flag has an environment twin (ATTND_LISTEN; lists are separated by commas) and a\n"
      "key of the same name in the file of --config. A flag beats the environment, which beats\n"
      "the file. Exit code: 0 after SIGTERM, 1 where an address or the GPU of --backend=cuda\n"
      "cannot be had, 2 for wrong usage.");
  app.set_version_flag("--version", absl::StrCat("attnd ", sources.version),
                       "Print the version and exit");
  std::map<std::string, const CLI::Option*> options = {
      {kConfigFile.name, AddFlag(kConfigFile, app)}};
  for (const Setting& setting : kSettings) {
    CLI::Option* option = AddFlag(setting, app);
    if (setting.set == nullptr) option->group("Not built yet (refused)");
    options[setting.name] = option;
  }

  const absl::Status no_empty_value = CheckEmptyValues(sources.args);
  if (!no_empty_value.ok()) return ExitNow{kUsageExitCode, std::string(no_empty_value.message())};
  try {
    app.parse(Values(sources.args.rbegin(), sources.args.rend()));  // CLI11 wants them reversed.
  } catch (const CLI::CallForHelp&) {
    return ExitNow{0, std::string(absl::StripTrailingAsciiWhitespace(app.help()))};
  } catch (const CLI::CallForVersion& version) {
    return ExitNow{0, version.what()};
  } catch (const CLI::ArgumentMismatch& error) {  // "--name: 1 required ...".
    const std::string text = error.what();
    return ExitNow{kUsageExitCode, absl::StrCat(text.substr(0, text.find(':')), " has no value")};
  } catch (const CLI::ParseError& error) {
    return ExitNow{kUsageExitCode, error.what()};
  }
  if (app.remaining_size() > 0) {
    return ExitNow{kUsageExitCode, absl::StrCat("unknown argument '", app.remaining().front(),
                                                "'; see attnd --help")};
  }
  Flags flags;
  for (const auto& [name, option] : options) {
    if (option->count() > 0) flags[name] = option->results();
  }
  return flags;
}

absl::Status ApplyFlags(const Flags& flags, const ConfigSources& sources, Config& config) {
  for (const Setting& setting : kSettings) {
    const auto given = flags.find(setting.name);
    if (given == flags.end()) continue;
    ATTND_RETURN_IF_ERROR(Apply(setting, FlagName(setting), given->second, sources, config));
  }
  return absl::OkStatus();
}

// --- The environment ---

absl::Status ApplyEnvironment(const ConfigSources& sources, Config& config) {
  for (const Setting& setting : kSettings) {
    const std::optional<std::string> text = Variable(setting, sources);
    if (!text) continue;
    Values values = {*text};
    if (setting.arity == Arity::kList) values = absl::StrSplit(*text, ',');
    ATTND_RETURN_IF_ERROR(Apply(setting, VariableName(setting), values, sources, config));
  }
  return absl::OkStatus();
}

// --- The file ---

absl::StatusOr<std::string> ReadFile(const std::string& path, const std::string& origin) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return UsageError(origin, absl::StrCat(": cannot open '", path, "': ", std::strerror(errno)));
  }
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return UsageError(origin, absl::StrCat(": cannot read '", path, "'"));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) {
    return UsageError(origin, absl::StrCat(": '", path, "' is larger than 1 MiB"));
  }
  return text;
}

// `origin` names the flag or the variable that says `path`.
absl::Status ApplyFile(const std::string& path, const std::string& origin,
                       const ConfigSources& sources, Config& config) {
  ATTND_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, origin));
  ATTND_ASSIGN_OR_RETURN(const std::vector<ConfigFileEntry> entries, ParseConfigFile(text, path));
  for (const ConfigFileEntry& entry : entries) {
    const std::string where = absl::StrCat(path, ":", entry.line, ": ", entry.key);
    const auto setting =
        std::find_if(kSettings.begin(), kSettings.end(),
                     [&](const Setting& candidate) { return candidate.name == entry.key; });
    if (setting == kSettings.end()) return UsageError(where, " is no setting of this file");
    ATTND_RETURN_IF_ERROR(Apply(*setting, where, entry.values, sources, config));
  }
  return absl::OkStatus();
}

absl::Status ApplyFileIfAny(const Flags& flags, const ConfigSources& sources, Config& config) {
  const auto flag = flags.find(kConfigFile.name);
  if (flag != flags.end()) {
    if (flag->second.size() > 1) return UsageError("--config", " is given more than once");
    return ApplyFile(flag->second[0], "--config", sources, config);
  }
  const std::optional<std::string> variable = Variable(kConfigFile, sources);
  if (!variable) return absl::OkStatus();
  return ApplyFile(*variable, VariableName(kConfigFile), sources, config);
}

// --- All together ---

absl::Status ApplyDefaults(const ConfigSources& sources, Config& config) {
  for (const Setting& setting : kSettings) {
    if (*setting.default_value == '\0') continue;
    ATTND_RETURN_IF_ERROR(
        Apply(setting, FlagName(setting), {setting.default_value}, sources, config));
  }
  config.pinned_pool_bytes = std::min(config.pinned_pool_bytes, kMostPinnedByDefault);
  return absl::OkStatus();
}

absl::Status CheckAddresses(const Config& config) {
  for (auto address = config.listen.begin(); address != config.listen.end(); ++address) {
    if (!address->local && !config.insecure) {
      return UsageError("--listen: ",
                        absl::StrCat(address->text,
                                     " may be reached from other machines, in plaintext: allow it "
                                     "with --insecure, or listen on loopback or unix:PATH"));
    }
    if (address->any_port) continue;
    if (std::find(config.listen.begin(), address, *address) != address) {
      return UsageError("--listen: ", absl::StrCat(address->text, " is given twice"));
    }
    if (config.health_listen == *address) {
      return UsageError("--health-listen: ", absl::StrCat(address->text, " is also in --listen"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Config> Combine(const Flags& flags, const ConfigSources& sources) {
  Config config;
  ATTND_RETURN_IF_ERROR(ApplyDefaults(sources, config));
  ATTND_RETURN_IF_ERROR(ApplyFileIfAny(flags, sources, config));
  ATTND_RETURN_IF_ERROR(ApplyEnvironment(sources, config));
  ATTND_RETURN_IF_ERROR(ApplyFlags(flags, sources, config));
  ATTND_RETURN_IF_ERROR(CheckAddresses(config));
  return config;
}

}  // namespace

ParseResult ParseConfig(const ConfigSources& sources) {
  std::variant<Flags, ExitNow> flags = ParseFlags(sources);
  if (auto* exit = std::get_if<ExitNow>(&flags)) return std::move(*exit);
  absl::StatusOr<Config> config = Combine(std::get<Flags>(flags), sources);
  if (!config.ok()) return ExitNow{kUsageExitCode, std::string(config.status().message())};
  return *std::move(config);
}

}  // namespace attnd
