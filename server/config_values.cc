#include "server/config_values.h"

#include <arpa/inet.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr char kDigits[] = "0123456789";

absl::Status Invalid(const std::string& text, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' ", problem));
}

bool AllDigits(const std::string& text) {
  return !text.empty() && text.find_first_not_of(kDigits) == std::string::npos;
}

struct Unit {
  std::string_view suffix;
  int64_t bytes;
};
constexpr std::array<Unit, 10> kUnits = {{{"", 1},
                                          {"B", 1},
                                          {"KB", 1000},
                                          {"MB", 1000'000},
                                          {"GB", 1000'000'000},
                                          {"TB", 1000'000'000'000},
                                          {"KiB", int64_t{1} << 10},
                                          {"MiB", int64_t{1} << 20},
                                          {"GiB", int64_t{1} << 30},
                                          {"TiB", int64_t{1} << 40}}};

absl::StatusOr<ListenAddress> ParseUnixAddress(const std::string& text, std::string path) {
  if (absl::StartsWith(path, "///")) path.erase(0, 2);  // The form with an authority, unix:///PATH.
  if (path.empty() || absl::StartsWith(path, "//")) {
    return Invalid(text, "has no path; write unix:/run/attnd.sock");
  }
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return Invalid(text, absl::StrCat("has a path of ", path.size(), " bytes; at most ",
                                      sizeof(sockaddr_un::sun_path) - 1, " fit"));
  }
  // gRPC reads the address as a URI, where these would end or change the path.
  const auto unusable = [](unsigned char c) {
    return c <= ' ' || c >= 0x7f || c == '%' || c == '?' || c == '#';
  };
  if (std::any_of(path.begin(), path.end(), unusable)) {
    return Invalid(text, "has a path with a character other than printable ASCII without %, ?, #");
  }
  return ListenAddress{.text = absl::StrCat("unix:", path), .local = true};
}

// Labels of letters, digits, dashes and underscores, none empty.
bool IsHostName(const std::string& host) {
  const auto allowed = [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.';
  };
  return !host.empty() && host.size() <= 253 && host.front() != '.' && host.front() != '-' &&
         host.find("..") == std::string::npos && std::all_of(host.begin(), host.end(), allowed);
}

// Fills `local` and `wildcard` from the host without brackets; false where it is no host.
bool ClassifyHost(const std::string& host, bool bracketed, ListenAddress& address) {
  if (bracketed) {
    in6_addr v6;
    if (inet_pton(AF_INET6, host.c_str(), &v6) != 1) return false;
    const bool mapped_loopback = IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127;
    address.local = IN6_IS_ADDR_LOOPBACK(&v6) || mapped_loopback;
    address.wildcard = IN6_IS_ADDR_UNSPECIFIED(&v6);
    return true;
  }
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    address.local = (ntohl(v4.s_addr) >> 24) == 127;
    address.wildcard = v4.s_addr == 0;
    return true;
  }
  // No top-level name is a number: what ends in one is a mistyped IPv4 address.
  const size_t last_label = host.rfind('.') + 1;  // npos + 1 is 0.
  if (!IsHostName(host) || AllDigits(host.substr(last_label))) return false;
  address.local = host == "localhost";
  return true;
}

}  // namespace

absl::StatusOr<int64_t> ParseInteger(const std::string& text, int64_t min, int64_t max) {
  int64_t value = 0;
  if (!AllDigits(text) || !absl::SimpleAtoi(text, &value) || value < min || value > max) {
    return Invalid(text, absl::StrCat("is not a whole number from ", min, " to ", max));
  }
  return value;
}

absl::StatusOr<int64_t> ParseByteSize(const std::string& text, std::optional<int64_t> whole) {
  const size_t split = std::min(text.find_first_not_of(kDigits), text.size());
  const std::string digits = text.substr(0, split);
  const std::string suffix = text.substr(split);
  if (whole && suffix == "%") {
    const absl::StatusOr<int64_t> share = ParseInteger(digits, 1, 100);
    if (!share.ok()) return Invalid(text, "is not a share from 1% to 100%");
    return std::max<int64_t>(1, *whole / 100 * *share + *whole % 100 * *share / 100);
  }
  const auto unit = std::find_if(kUnits.begin(), kUnits.end(),
                                 [&](const Unit& candidate) { return candidate.suffix == suffix; });
  if (digits.empty() || unit == kUnits.end()) {
    return Invalid(text, absl::StrCat("is not a size such as 4000000, 512MiB or 2GB",
                                      whole ? ", or a share such as 50%" : ""));
  }
  int64_t count = 0;
  if (!absl::SimpleAtoi(digits, &count) || count > kMaxInt64 / unit->bytes) {
    return Invalid(text, "is 2^63 bytes or more");
  }
  if (count == 0) return Invalid(text, "is no memory at all; give at least one byte");
  return count * unit->bytes;
}

absl::StatusOr<PoolSize> ParsePoolSize(const std::string& text) {
  constexpr int64_t kPercents = 100;
  const bool is_share = text.ends_with('%');
  const absl::StatusOr<int64_t> size =
      ParseByteSize(text, is_share ? std::optional<int64_t>(kPercents) : std::nullopt);
  if (!size.ok()) return size.status();
  return is_share ? PoolSize{.percent = static_cast<int>(*size)} : PoolSize{.bytes = *size};
}

absl::StatusOr<absl::Duration> ParseDurationUpTo(const std::string& text, absl::Duration max) {
  const bool unitless = !text.empty() && text.find_first_not_of("0123456789.") == std::string::npos;
  absl::Duration value;
  if (!absl::ParseDuration(unitless ? text + "s" : text, &value)) {
    return Invalid(text, "is not a duration such as 10s, 500ms, 1m30s or a number of seconds");
  }
  if (value < absl::ZeroDuration() || value > max) {
    return Invalid(text, absl::StrCat("is not between 0s and ", absl::FormatDuration(max)));
  }
  return value;
}

absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text) {
  if (absl::StartsWith(text, "unix:")) return ParseUnixAddress(text, text.substr(5));
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) {
    return Invalid(text, "is not an address; write host:port, [IPv6]:port or unix:PATH");
  }
  const absl::StatusOr<int64_t> port = ParseInteger(text.substr(colon + 1), 0, 65535);
  if (!port.ok()) return Invalid(text, "does not end in a port from 0 to 65535");

  const std::string written = absl::AsciiStrToLower(text.substr(0, colon));
  const bool bracketed = written.size() > 2 && written.front() == '[' && written.back() == ']';
  const std::string host = bracketed ? written.substr(1, written.size() - 2) : written;
  ListenAddress address{.text = absl::StrCat(written, ":", *port), .any_port = *port == 0};
  if (!ClassifyHost(host, bracketed, address)) {
    return Invalid(text, "has no host name, IPv4 address or [IPv6] address before the port");
  }
  return address;
}

int64_t UsableMemoryBytes() {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  // Version 2, as a container sees its own group; "max" and a missing file fail to parse.
  int64_t group_limit = 0;
  std::ifstream file("/sys/fs/cgroup/memory.max");
  if (file >> group_limit && group_limit > 0) return std::min(machine, group_limit);
  return machine;
}

}  // namespace attnd
