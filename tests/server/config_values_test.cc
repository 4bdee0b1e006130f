#include "server/config_values.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

namespace attnd {
namespace {

constexpr int64_t kMemory = 1000'000'007;

TEST(ConfigValues, SizesAreExact) {
  const std::map<std::string, int64_t> good = {
      {"1", 1},
      {"007", 7},
      {"10B", 10},
      {"3KB", 3000},
      {"3KiB", 3072},
      {"512MiB", int64_t{512} << 20},
      {"1MB", 1000'000},
      {"2GB", 2'000'000'000},
      {"2GiB", int64_t{2} << 30},
      {"1TB", 1'000'000'000'000},
      {"8388607TiB", int64_t{8388607} << 40},
      {"9223372036854775807", std::numeric_limits<int64_t>::max()},
      {"1%", 10'000'000},
      {"80%", 800'000'005},
      {"100%", kMemory},
  };
  for (const auto& [text, bytes] : good) {
    const auto parsed = ParseByteSize(text, kMemory);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, bytes) << text;
  }
  EXPECT_EQ(*ParseByteSize("100%", std::numeric_limits<int64_t>::max()),
            std::numeric_limits<int64_t>::max());
}

TEST(ConfigValues, RefusesOtherSizes) {
  for (const std::string text : {"",
                                 "-1",
                                 "+1",
                                 "0",
                                 "0GiB",
                                 "10XB",
                                 "1.5GiB",
                                 "1 GiB",
                                 " 1",
                                 "1GiB ",
                                 "1gib",
                                 "1K",
                                 "1k",
                                 "1M",
                                 "GiB",
                                 "1e9",
                                 "0x10",
                                 "9223372036854775808",
                                 "18446744073709551616",
                                 "8388608TiB",
                                 "9223372036854776KB",
                                 "0%",
                                 "101%",
                                 "-5%",
                                 "%",
                                 "50%%",
                                 "1.5%",
                                 "5 %"}) {
    EXPECT_FALSE(ParseByteSize(text, kMemory).ok()) << text;
  }
  EXPECT_FALSE(ParseByteSize("50%").ok());
}

TEST(ConfigValues, Durations) {
  const std::map<std::string, absl::Duration> good = {
      {"0", absl::ZeroDuration()},
      {"0s", absl::ZeroDuration()},
      {"10", absl::Seconds(10)},
      {"0.25", absl::Milliseconds(250)},
      {"500ms", absl::Milliseconds(500)},
      {"1m30s", absl::Seconds(90)},
      {"1h", absl::Hours(1)},
  };
  for (const auto& [text, duration] : good) {
    const auto parsed = ParseDurationUpTo(text, absl::Hours(1));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, duration) << text;
  }
  for (const std::string text : {"", "s", ".", "-1", "-1s", "1 s", "10x", "1d", "inf", "-inf",
                                 "nan", "61m", "3601", "1e3", "1..5", "99999999999999999999"}) {
    EXPECT_FALSE(ParseDurationUpTo(text, absl::Hours(1)).ok()) << text;
  }
}

TEST(ConfigValues, ClassifiesListenAddresses) {
  struct Case {
    std::string text, canonical;
    bool local, any_port, wildcard;
  };
  const std::vector<Case> cases = {
      {"127.0.0.1:50051", "127.0.0.1:50051", true, false, false},
      {"127.5.5.5:1", "127.5.5.5:1", true, false, false},
      {"localhost:0", "localhost:0", true, true, false},
      {"LocalHost:080", "localhost:80", true, false, false},
      {"[::1]:65535", "[::1]:65535", true, false, false},
      {"[0:0:0:0:0:0:0:1]:1", "[0:0:0:0:0:0:0:1]:1", true, false, false},
      {"[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]:1", true, false, false},
      {"[::ffff:10.0.0.1]:1", "[::ffff:10.0.0.1]:1", false, false, false},
      {"0.0.0.0:0", "0.0.0.0:0", false, true, true},
      {"[::]:1", "[::]:1", false, false, true},
      {"10.0.0.1:1", "10.0.0.1:1", false, false, false},
      {"128.0.0.1:1", "128.0.0.1:1", false, false, false},
      {"attnd-0.attnd.ns.svc:1", "attnd-0.attnd.ns.svc:1", false, false, false},
      {"localhost.example:1", "localhost.example:1", false, false, false},
      {"127.0.0.1.nip.io:1", "127.0.0.1.nip.io:1", false, false, false},
      {"unix:/x", "unix:/x", true, false, false},
      {"unix:///X", "unix:/X", true, false, false},
      {"unix:run/x", "unix:run/x", true, false, false},
  };
  for (const Case& c : cases) {
    const auto parsed = ParseListenAddress(c.text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, (ListenAddress{c.canonical, c.local, c.any_port, c.wildcard})) << c.text;
  }
}

TEST(ConfigValues, RefusesWhatIsNoAddress) {
  for (const std::string text : {"",
                                 ":",
                                 ":1",
                                 "localhost",
                                 "localhost:",
                                 "localhost:-1",
                                 "localhost:+1",
                                 "localhost:x",
                                 "localhost:65536",
                                 "127.1:1",
                                 "256.0.0.1:1",
                                 "1.2.3.4.5:1",
                                 "::1:50051",
                                 "[::1]",
                                 "[::1:1",
                                 "::1]:1",
                                 "[]:1",
                                 "[127.0.0.1]:1",
                                 "[::1%lo]:1",
                                 "a b:1",
                                 "a..b:1",
                                 "-a:1",
                                 "*:1",
                                 "http://a:1",
                                 "dns:///a:1",
                                 "unix:",
                                 "unix://host/x",
                                 "unix:/a b",
                                 "unix:/a%20b",
                                 "unix:/a#b",
                                 "unix:/a?b",
                                 "ipv4:127.0.0.1:1"}) {
    EXPECT_FALSE(ParseListenAddress(text).ok()) << text;
  }
  EXPECT_TRUE(ParseListenAddress("unix:/" + std::string(106, 'x')).ok());
  EXPECT_FALSE(ParseListenAddress("unix:/" + std::string(107, 'x')).ok());
}

TEST(ConfigValues, UsableMemoryIsNoMoreThanTheMachineHas) {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  EXPECT_GT(UsableMemoryBytes(), 0);
  EXPECT_LE(UsableMemoryBytes(), machine);
}

}  // namespace
}  // namespace attnd
