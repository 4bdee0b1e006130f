// A file of settings: TOML with `key = value` at the top level, where a value is a string, a
// number, a boolean or an array of those. Sections and nested values are refused: a setting is
// never ignored.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace attnd {

struct ConfigFileEntry {
  std::string key;
  int line = 0;                     // Counted from 1.
  std::vector<std::string> values;  // One, unless an array.
};

// Entries in the order of the file. INVALID_ARGUMENT: "<name>:<line>: what is wrong". `name` is the
// file's, for messages.
absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigFile(const std::string& text,
                                                             const std::string& name);

}  // namespace attnd
