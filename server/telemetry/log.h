// Structured log lines on standard error, one for an event: standard output is for the addresses.
//
//   Log(LogLevel::kInfo, "draining", {{"reason", "SIGTERM"}, {"in_flight", 3}});
//   text: 2026-12-01T09:00:00.123Z info draining reason=SIGTERM in_flight=3
//   json: {"ts":"2026-12-01T09:00:00.123Z","level":"info","msg":"draining","reason":"SIGTERM",...}
//
// Whatever bytes the message and the values hold, an event stays one line and the JSON stays valid:
// control characters are escaped and bytes that are not UTF-8 become U+FFFD. In text a value that
// is empty or holds anything but visible ASCII without quotes is written as a JSON string.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace attnd {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarning, kError };
enum class LogFormat : uint8_t { kText, kJson };

// A boolean, an integer, a floating-point number, or anything a std::string is made from.
class LogValue {
 public:
  using Variant = std::variant<bool, int64_t, uint64_t, double, std::string>;

  template <typename T>
  LogValue(const T& value) : value_(Convert(value)) {}  // NOLINT: implicit on purpose.

  const Variant& get() const { return value_; }

 private:
  template <typename T>
  static Variant Convert(const T& value) {
    if constexpr (std::same_as<T, bool>) {
      return value;
    } else if constexpr (std::signed_integral<T>) {
      return int64_t{value};
    } else if constexpr (std::unsigned_integral<T>) {
      return uint64_t{value};
    } else if constexpr (std::floating_point<T>) {
      return double{value};
    } else {
      return std::string(value);
    }
  }

  Variant value_;
};

// Keys are identifiers of ours, each once in an event, and none of ts, level, msg.
struct LogField {
  std::string_view key;
  LogValue value;
};

// Events below `level` are dropped. Call it before there are threads that log; until then events
// from kInfo up are written as text.
void InitLogging(LogLevel level, LogFormat format);

// Any thread. Lines of different threads never mix.
void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});

}  // namespace attnd
