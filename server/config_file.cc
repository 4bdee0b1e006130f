// Read by toml++ and not by CLI11's reader of the same syntax: that one ends quoted strings at '#',
// takes an array without its bracket, merges a repeated key into a list and knows no line numbers.
#include "server/config_file.h"

#include <toml++/toml.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

absl::Status FileError(const std::string& name, int line, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(name, ":", line, ": ", problem));
}

// A scalar as a person would give it on the command line.
std::optional<std::string> ScalarText(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return absl::StrCat(number->get());
  if (const auto* number = node.as_floating_point()) return absl::StrCat(number->get());
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  return std::nullopt;
}

absl::StatusOr<ConfigFileEntry> ReadEntry(const std::string& key, const toml::node& node, int line,
                                          const std::string& name) {
  ConfigFileEntry entry{.key = key, .line = line};
  if (node.is_table() || node.is_array_of_tables()) {
    return FileError(name, line,
                     absl::StrCat(key,
                                  ": sections and nested keys are not used here: every key "
                                  "stands at the top"));
  }
  auto add = [&](const toml::node& scalar) -> absl::Status {
    std::optional<std::string> text = ScalarText(scalar);
    if (!text) {
      return FileError(name, line,
                       absl::StrCat(key,
                                    " is not a number, true, false, a string or a list of "
                                    "such"));
    }
    entry.values.push_back(*std::move(text));
    return absl::OkStatus();
  };
  if (const auto* array = node.as_array()) {
    for (const toml::node& element : *array) ATTND_RETURN_IF_ERROR(add(element));
  } else {
    ATTND_RETURN_IF_ERROR(add(node));
  }
  return entry;
}

}  // namespace

absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigFile(const std::string& text,
                                                             const std::string& name) {
  std::vector<ConfigFileEntry> entries;
  try {
    const toml::table table = toml::parse(text, name);
    for (const auto& [key, node] : table) {
      const int line = static_cast<int>(key.source().begin.line);
      ATTND_ASSIGN_OR_RETURN(ConfigFileEntry entry,
                             ReadEntry(std::string(key.str()), node, line, name));
      entries.push_back(std::move(entry));
    }
  } catch (const toml::parse_error& error) {
    return FileError(name, static_cast<int>(error.source().begin.line),
                     std::string(error.description()));
  }
  std::sort(entries.begin(), entries.end(),
            [](const ConfigFileEntry& a, const ConfigFileEntry& b) { return a.line < b.line; });
  return entries;
}

}  // namespace attnd
