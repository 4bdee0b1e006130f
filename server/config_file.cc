// Not CLI11's reader of the same syntax: that one ends quoted strings at '#', takes an array
// without its bracket, merges a repeated key into a list and knows no line numbers.
#include "server/config_file.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

bool IsKeyCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
}

// An integer or decimal number as TOML writes it, without exponent, separators and base prefixes.
bool IsNumber(const std::string& token) {
  const std::string digits = token.substr(token.starts_with('+') || token.starts_with('-') ? 1 : 0);
  const size_t point = digits.find('.');
  const auto all_digits = [](const std::string& part) {
    return !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
  };
  const std::string whole = digits.substr(0, point);
  if (!all_digits(whole) || (whole.size() > 1 && whole.front() == '0')) return false;
  return point == std::string::npos || all_digits(digits.substr(point + 1));
}

class Reader {
 public:
  Reader(const std::string& text, const std::string& name) : text_(text), name_(name) {}

  absl::StatusOr<std::vector<ConfigFileEntry>> ReadAll() {
    std::vector<ConfigFileEntry> entries;
    if (text_.starts_with("\xef\xbb\xbf")) pos_ = 3;  // Byte order mark.
    for (SkipBlank(); !AtEnd(); SkipBlank()) {
      ATTND_ASSIGN_OR_RETURN(ConfigFileEntry entry, ReadEntry());
      const auto same_key = [&](const ConfigFileEntry& other) { return other.key == entry.key; };
      const auto earlier = std::find_if(entries.begin(), entries.end(), same_key);
      if (earlier != entries.end()) {
        return Error(absl::StrCat(entry.key, " is already set in line ", earlier->line),
                     entry.line);
      }
      entries.push_back(std::move(entry));
    }
    return entries;
  }

 private:
  bool AtEnd() const { return pos_ >= text_.size(); }
  char Peek() const { return AtEnd() ? '\n' : text_[pos_]; }

  absl::Status Error(const std::string& problem, int line) const {
    return absl::InvalidArgumentError(absl::StrCat(name_, ":", line, ": ", problem));
  }
  absl::Status Error(const std::string& problem) const { return Error(problem, line_); }

  void SkipSpaces() {
    while (!AtEnd() && (Peek() == ' ' || Peek() == '\t' || Peek() == '\r')) ++pos_;
  }

  void SkipComment() {
    if (!AtEnd() && Peek() == '#') pos_ = std::min(text_.find('\n', pos_), text_.size());
  }

  // Spaces, comments and ends of lines.
  void SkipBlank() {
    while (true) {
      SkipSpaces();
      SkipComment();
      if (AtEnd() || Peek() != '\n') return;
      ++pos_;
      ++line_;
    }
  }

  absl::StatusOr<ConfigFileEntry> ReadEntry() {
    if (Peek() == '[') return Error("sections are not used here: every key stands at the top");
    ConfigFileEntry entry{.line = line_};
    while (!AtEnd() && IsKeyCharacter(Peek())) entry.key += text_[pos_++];
    SkipSpaces();
    if (!entry.key.empty() && Peek() == '.') {
      return Error(absl::StrCat(entry.key, ": nested keys are not used here"));
    }
    if (entry.key.empty() || Peek() != '=') return Error("this is not `key = value`");
    ++pos_;
    SkipSpaces();
    if (Peek() == '[') {
      ATTND_RETURN_IF_ERROR(ReadArray(entry));
    } else {
      ATTND_ASSIGN_OR_RETURN(std::string value, ReadValue(entry.key));
      entry.values.push_back(std::move(value));
    }
    SkipSpaces();
    SkipComment();
    if (Peek() != '\n') return Error(absl::StrCat(entry.key, ": there is text after the value"));
    return entry;
  }

  absl::Status ReadArray(ConfigFileEntry& entry) {
    ++pos_;
    for (SkipBlank(); Peek() != ']'; SkipBlank()) {
      if (AtEnd()) return Error(absl::StrCat(entry.key, ": the array has no closing bracket"));
      ATTND_ASSIGN_OR_RETURN(std::string value, ReadValue(entry.key));
      entry.values.push_back(std::move(value));
      SkipBlank();
      if (Peek() == ']') break;
      if (Peek() != ',' || AtEnd()) {
        return Error(absl::StrCat(entry.key, ": the array lacks a comma or its closing bracket"));
      }
      ++pos_;
    }
    ++pos_;
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> ReadValue(const std::string& key) {
    if (Peek() == '"' || Peek() == '\'') return ReadString(key);
    std::string token;
    while (!AtEnd() && std::string_view(" \t\r\n,#]").find(Peek()) == std::string_view::npos) {
      token += text_[pos_++];
    }
    if (token == "true" || token == "false" || IsNumber(token)) return token;
    return Error(absl::StrCat(
        key, ": '", token, "' is not a number, true, false, a string in quotes or a list of such"));
  }

  absl::StatusOr<std::string> ReadString(const std::string& key) {
    const char quote = text_[pos_++];
    std::string value;
    while (Peek() != quote) {
      if (AtEnd() || Peek() == '\n') {
        return Error(absl::StrCat(key, ": the string has no closing quote"));
      }
      char c = text_[pos_++];
      if (quote == '"' && c == '\\') {
        c = Peek();
        if (c != '"' && c != '\\') {
          return Error(absl::StrCat(key, ": only \\\" and \\\\ are used here as escapes"));
        }
        ++pos_;
      }
      value += c;
    }
    ++pos_;
    return value;
  }

  const std::string& text_;
  const std::string& name_;
  size_t pos_ = 0;
  int line_ = 1;
};

}  // namespace

absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigFile(const std::string& text,
                                                             const std::string& name) {
  return Reader(text, name).ReadAll();
}

}  // namespace attnd
