#include "server/telemetry/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

namespace attnd {
namespace {

using Json = nlohmann::ordered_json;

// spdlog writes the time and the level, and Log the rest of the line.
constexpr char kTextPattern[] = "%Y-%m-%dT%H:%M:%S.%eZ %l %v";
constexpr char kJsonPattern[] = R"({"ts":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})";

struct State {
  State() : logger("attnd", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    Set(LogLevel::kInfo, LogFormat::kText);
  }

  void Set(LogLevel level, LogFormat new_format) {
    static_assert(static_cast<int>(LogLevel::kError) == static_cast<int>(spdlog::level::err));
    logger.set_level(static_cast<spdlog::level::level_enum>(level));
    logger.set_formatter(std::make_unique<spdlog::pattern_formatter>(
        new_format == LogFormat::kJson ? kJsonPattern : kTextPattern,
        spdlog::pattern_time_type::utc));
    format = new_format;
  }

  spdlog::logger logger;
  LogFormat format;
};

// Never destroyed: threads may log while the process ends.
State& GetState() {
  static State& state = *new State;
  return state;
}

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json ToJson(const LogValue& value) {
  return std::visit([](const auto& alternative) { return Json(alternative); }, value.get());
}

bool IsVisibleAscii(unsigned char c) { return c > ' ' && c < 0x7f; }

std::string JsonPayload(std::string_view message, std::initializer_list<LogField> fields) {
  Json object;
  object["msg"] = message;
  for (const LogField& field : fields) object[std::string(field.key)] = ToJson(field.value);
  const std::string text = Dump(object);
  return text.substr(1, text.size() - 2);  // The braces are the pattern's.
}

// The message as it is, or with the escapes of a JSON string where it would break the line.
std::string TextMessage(std::string_view message) {
  const auto plain = [](unsigned char c) { return c == ' ' || IsVisibleAscii(c); };
  if (std::all_of(message.begin(), message.end(), plain)) return std::string(message);
  const std::string quoted = Dump(Json(message));
  return quoted.substr(1, quoted.size() - 2);
}

std::string TextValue(const LogValue& value) {
  const auto* text = std::get_if<std::string>(&value.get());
  const auto bare = [](unsigned char c) { return IsVisibleAscii(c) && c != '"' && c != '\''; };
  if (text != nullptr && !text->empty() && std::all_of(text->begin(), text->end(), bare)) {
    return *text;
  }
  return Dump(ToJson(value));
}

std::string TextPayload(std::string_view message, std::initializer_list<LogField> fields) {
  std::string line = TextMessage(message);
  for (const LogField& field : fields) {
    line.append(" ").append(field.key).append("=").append(TextValue(field.value));
  }
  return line;
}

}  // namespace

void InitLogging(LogLevel level, LogFormat format) { GetState().Set(level, format); }

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  State& state = GetState();
  const auto spdlog_level = static_cast<spdlog::level::level_enum>(level);
  if (!state.logger.should_log(spdlog_level)) return;
  const std::string payload = state.format == LogFormat::kJson ? JsonPayload(message, fields)
                                                               : TextPayload(message, fields);
  state.logger.log(spdlog_level, spdlog::string_view_t(payload.data(), payload.size()));
}

}  // namespace attnd
