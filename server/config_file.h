// The part of TOML that a file of settings needs: `key = value` and comments at the top level,
// where a value is a string on one line, a number, a boolean, or an array of those (which may span
// lines). Anything else (sections, dotted keys, inline tables, dates) is refused, as is a key
// given twice, with the line at fault: a setting is never ignored or misread silently.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace attnd {

struct ConfigFileEntry {
  std::string key;
  int line = 0;                     // Counted from 1.
  std::vector<std::string> values;  // One, unless an array. Strings without quotes and escapes.
};

// Entries in the order of the file. INVALID_ARGUMENT: "<name>:<line>: what is wrong". `name` is the
// file's, for messages.
absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigFile(const std::string& text,
                                                             const std::string& name);

}  // namespace attnd
