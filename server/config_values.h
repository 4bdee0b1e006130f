// Values of settings as people write them. Every error is INVALID_ARGUMENT with a sentence that
// quotes the text and says what is expected; the caller puts the setting's name before it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/memory/memory_pool.h"

namespace attnd {

// A whole number from `min` to `max`, in decimal digits alone.
absl::StatusOr<int64_t> ParseInteger(const std::string& text, int64_t min, int64_t max);

// A positive number of bytes below 2^63: digits, then nothing, B, KB, MB, GB, TB (powers of 1000)
// or KiB, MiB, GiB, TiB (powers of 1024). With `whole`, also a share of it, 1% to 100%.
absl::StatusOr<int64_t> ParseByteSize(const std::string& text,
                                      std::optional<int64_t> whole = std::nullopt);

// The same, where what a share is one of is not known yet.
absl::StatusOr<PoolSize> ParsePoolSize(const std::string& text);

// 0 to `max`: a number of seconds (`10`, `0.5`), or with units (`500ms`, `10s`, `1m30s`).
absl::StatusOr<absl::Duration> ParseDurationUpTo(const std::string& text, absl::Duration max);

struct ListenAddress {
  std::string text;       // As gRPC takes it: lower case, no leading zeros in the port.
  bool local = false;     // Loopback or a Unix socket: nobody outside this machine gets there.
  bool any_port = false;  // Port 0: the system chooses.
  bool wildcard = false;  // 0.0.0.0 or [::].

  bool operator==(const ListenAddress&) const = default;
};

// host:port with a name or IPv4 address, [IPv6]:port, or unix:PATH. A name other than `localhost`
// is never local: what it resolves to is not ours to know.
absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text);

// Memory this process may use: the machine's, or its control group's limit where that is less.
int64_t UsableMemoryBytes();

}  // namespace attnd
