#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/config_file.h"

namespace attnd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A folder of its own for each test.
class ConfigTest : public testing::Test {
 protected:
  ConfigTest()
      : folder_(std::filesystem::path(testing::TempDir()) /
                ("attnd_config_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~ConfigTest() override { std::filesystem::remove_all(folder_); }

  // The path of a file with this text.
  std::string WriteFile(const std::string& text) {
    const std::string path = folder_ / "attnd.toml";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  ParseResult Parse(const std::vector<std::string>& args) {
    const auto lookup = [this](const std::string& name) -> std::optional<std::string> {
      const auto found = environment_.find(name);
      if (found == environment_.end()) return std::nullopt;
      return found->second;
    };
    return ParseConfig({args, lookup, memory_bytes_, "1.2.3"});
  }

  Config MustParse(const std::vector<std::string>& args) {
    ParseResult result = Parse(args);
    if (const auto* exit = std::get_if<ExitNow>(&result)) {
      ADD_FAILURE() << "ended with " << exit->code << ": " << exit->text;
      return {};
    }
    return std::get<Config>(std::move(result));
  }

  // The sentence of a usage error; empty where there is none.
  std::string UsageError(const std::vector<std::string>& args) {
    const ParseResult result = Parse(args);
    const auto* exit = std::get_if<ExitNow>(&result);
    if (exit == nullptr) {
      ADD_FAILURE() << "accepted: " << testing::PrintToString(args);
      return "";
    }
    EXPECT_EQ(exit->code, 2) << exit->text;
    return exit->text;
  }

  std::string FileError(const std::string& text) {
    return UsageError({"--config=" + WriteFile(text)});
  }

  int64_t memory_bytes_ = 1000'000'007;
  std::filesystem::path folder_;
  std::map<std::string, std::string> environment_;
};

std::vector<std::string> Texts(const std::vector<ListenAddress>& addresses) {
  std::vector<std::string> texts;
  for (const ListenAddress& address : addresses) texts.push_back(address.text);
  return texts;
}

TEST_F(ConfigTest, HasTheDocumentedDefaults) {
  const Config config = MustParse({});
  EXPECT_THAT(Texts(config.listen), ElementsAre("127.0.0.1:50051"));
  EXPECT_FALSE(config.health_listen.has_value());
  EXPECT_EQ(config.advertise, "");
  EXPECT_FALSE(config.insecure);
  EXPECT_EQ(config.backend, BackendChoice::kAuto);
  EXPECT_EQ(config.fallback, Fallback::kNone);
  EXPECT_EQ(config.threads, 0);
  EXPECT_EQ(config.host_pool_bytes, 500'000'003);
  EXPECT_EQ(config.pinned_pool_bytes, 500'000'003);
  EXPECT_EQ(config.device_pool, (PoolSize{.percent = 80}));
  EXPECT_EQ(config.max_queue_bytes, int64_t{1} << 30);
  EXPECT_EQ(config.max_lease, absl::Hours(1));
  EXPECT_EQ(config.max_streams, 0);
  EXPECT_EQ(config.drain_delay, absl::ZeroDuration());
  EXPECT_EQ(config.drain_timeout, absl::Seconds(10));
  EXPECT_EQ(config.log_level, LogLevel::kInfo);
  EXPECT_EQ(config.log_format, LogFormat::kText);
}

TEST_F(ConfigTest, ReadsEveryFlag) {
  const Config config = MustParse(
      {"--listen=127.0.0.1:0", "--listen", "unix:/run/a.sock", "--health-listen=0.0.0.0:8080",
       "--advertise=node7:50051", "--insecure", "--backend=cpu", "--fallback=cpu", "--threads=3",
       "--pinned-pool=512MiB", "--device-pool=20GiB", "--max-queue", "2GB", "--max-streams=100",
       "--max-lease=90m", "--drain-delay=500ms", "--drain-timeout=30", "--log-level=warning",
       "--log-format=json"});
  EXPECT_THAT(Texts(config.listen), ElementsAre("127.0.0.1:0", "unix:/run/a.sock"));
  ASSERT_TRUE(config.health_listen.has_value());
  EXPECT_EQ(config.health_listen->text, "0.0.0.0:8080");
  EXPECT_EQ(config.advertise, "node7:50051");
  EXPECT_TRUE(config.insecure);
  EXPECT_EQ(config.backend, BackendChoice::kCpu);
  EXPECT_EQ(config.fallback, Fallback::kCpu);
  EXPECT_EQ(config.threads, 3);
  EXPECT_EQ(config.host_pool_bytes, int64_t{512} << 20);
  EXPECT_EQ(config.pinned_pool_bytes, int64_t{512} << 20);
  EXPECT_EQ(config.device_pool, (PoolSize{.bytes = int64_t{20} << 30}));
  EXPECT_EQ(config.max_queue_bytes, 2'000'000'000);
  EXPECT_EQ(config.max_lease, absl::Minutes(90));
  EXPECT_EQ(config.max_streams, 100);
  EXPECT_EQ(config.drain_delay, absl::Milliseconds(500));
  EXPECT_EQ(config.drain_timeout, absl::Seconds(30));
  EXPECT_EQ(config.log_level, LogLevel::kWarning);
  EXPECT_EQ(config.log_format, LogFormat::kJson);
}

TEST_F(ConfigTest, OnlyTheDefaultPinsLessThanItAllows) {
  memory_bytes_ = int64_t{100} << 30;
  EXPECT_EQ(MustParse({}).host_pool_bytes, int64_t{50} << 30);
  EXPECT_EQ(MustParse({}).pinned_pool_bytes, int64_t{8} << 30);
  EXPECT_EQ(MustParse({"--pinned-pool=20%"}).pinned_pool_bytes, int64_t{20} << 30);
}

TEST_F(ConfigTest, CudaIsAValidChoice) {
  EXPECT_EQ(MustParse({"--backend=cuda"}).backend, BackendChoice::kCuda);
}

TEST_F(ConfigTest, FlagBeatsEnvironmentBeatsFileForAScalar) {
  const std::string file = "--config=" + WriteFile("threads = 1\nlog-level = \"debug\"\n");
  EXPECT_EQ(MustParse({file}).threads, 1);
  environment_["ATTND_THREADS"] = "2";
  EXPECT_EQ(MustParse({file}).threads, 2);
  EXPECT_EQ(MustParse({file, "--threads=3"}).threads, 3);
  EXPECT_EQ(MustParse({file, "--threads=3"}).log_level, LogLevel::kDebug);
}

TEST_F(ConfigTest, FlagBeatsEnvironmentBeatsFileForTheList) {
  const std::string file = "--config=" + WriteFile("listen = [\"127.0.0.1:1\", \"127.0.0.1:2\"]\n");
  EXPECT_THAT(Texts(MustParse({file}).listen), ElementsAre("127.0.0.1:1", "127.0.0.1:2"));
  environment_["ATTND_LISTEN"] = "127.0.0.1:3,unix:/4";
  EXPECT_THAT(Texts(MustParse({file}).listen), ElementsAre("127.0.0.1:3", "unix:/4"));
  EXPECT_THAT(Texts(MustParse({file, "--listen=[::1]:5"}).listen), ElementsAre("[::1]:5"));
}

TEST_F(ConfigTest, AFlagOrTheEnvironmentCanTakeASwitchBack) {
  const std::string file = "--config=" + WriteFile("insecure = true\n");
  EXPECT_TRUE(MustParse({file}).insecure);
  environment_["ATTND_INSECURE"] = "0";
  EXPECT_FALSE(MustParse({file}).insecure);
  environment_["ATTND_INSECURE"] = "true";
  EXPECT_FALSE(MustParse({file, "--insecure=false"}).insecure);
}

TEST_F(ConfigTest, TheEnvironmentMayNameTheFileAndTheFlagBeatsIt) {
  environment_["ATTND_CONFIG"] = WriteFile("threads = 7\n");
  EXPECT_EQ(MustParse({}).threads, 7);
  EXPECT_THAT(UsageError({"--config=/no/such"}), StartsWith("--config: cannot open '/no/such'"));
  environment_["ATTND_CONFIG"] = "/no/such";
  EXPECT_EQ(UsageError({}), "ATTND_CONFIG: cannot open '/no/such': No such file or directory");
}

TEST_F(ConfigTest, EmptyAndForeignVariablesChangeNothing) {
  environment_ = {{"ATTND_THREADS", ""},
                  {"ATTND_LISTEN", ""},
                  {"ATTND_TLS_CERT", ""},
                  {"ATTND_PORT", "tcp://10.0.0.1:50051"},
                  {"ATTND_SERVICE_HOST", "10.0.0.1"}};
  EXPECT_THAT(Texts(MustParse({}).listen), ElementsAre("127.0.0.1:50051"));
}

TEST_F(ConfigTest, HelpAndVersionEndWithZero) {
  const auto help = std::get<ExitNow>(Parse({"--help"}));
  EXPECT_EQ(help.code, 0);
  for (const char* name : {"--listen", "--config", "--pinned-pool", "--tls-cert", "--version"}) {
    EXPECT_THAT(help.text, HasSubstr(name));
  }
  const auto version = std::get<ExitNow>(Parse({"--version"}));
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.text, "attnd 1.2.3");
}

TEST_F(ConfigTest, WrongArgumentsAreNamed) {
  EXPECT_EQ(UsageError({"--bogus=1"}), "unknown argument '--bogus=1'; see attnd --help");
  EXPECT_EQ(UsageError({"-x"}), "unknown argument '-x'; see attnd --help");
  EXPECT_EQ(UsageError({"serve"}), "unknown argument 'serve'; see attnd --help");
  EXPECT_EQ(UsageError({"--listen", "127.0.0.1:1", "127.0.0.1:2"}),
            "unknown argument '127.0.0.1:2'; see attnd --help");
  EXPECT_EQ(UsageError({"--insecure", "true"}), "unknown argument 'true'; see attnd --help");
  EXPECT_EQ(UsageError({"--threads"}), "--threads has no value");
  EXPECT_EQ(UsageError({"--threads=", "4"}), "--threads has no value");
  EXPECT_EQ(UsageError({"--threads=1", "--threads=1"}),
            "--threads takes one value, and 2 are given");
  EXPECT_EQ(UsageError({"--config=/a", "--config=/b"}), "--config is given more than once");
}

TEST_F(ConfigTest, WrongValuesAreNamedWithTheirFlag) {
  const std::map<std::string, std::vector<std::string>> wrong = {
      {"listen", {"50051", "localhost", "localhost:65536", "unix:", "http://a:1", "*:1"}},
      {"health-listen", {"localhost"}},
      {"advertise", {"localhost", "localhost:0", "0.0.0.0:50051", "[::]:50051"}},
      {"insecure", {"maybe", "TRUE"}},
      {"backend", {"gpu", "CPU", "auto,cpu"}},
      {"fallback", {"auto"}},
      {"threads", {"-1", "four", "4097", "1.5", "99999999999999999999", "0x4", "+1"}},
      {"pinned-pool", {"-1", "0", "101%", "0%", "%", "10XB"}},
      {"device-pool", {"-1", "0", "101%", "0%", "%", "10XB"}},
      {"max-queue", {"-1", "50%", "0MiB", "9223372036854775808"}},
      {"max-lease", {"-1s", "721h", "inf", "forever"}},
      {"max-streams", {"-1", "1000001"}},
      {"drain-delay", {"-1s", "soon", "2h", "inf", "1.2.3"}},
      {"drain-timeout", {"10 s", "3601"}},
      {"log-level", {"warn", "0"}},
      {"log-format", {"xml"}},
  };
  for (const auto& [name, values] : wrong) {
    for (const std::string& value : values) {
      EXPECT_THAT(UsageError({"--" + name + "=" + value}),
                  StartsWith("--" + name + ": '" + value + "' "));
    }
  }
}

TEST_F(ConfigTest, WrongValuesAreNamedWithTheirVariable) {
  environment_["ATTND_PINNED_POOL"] = "10XB";
  EXPECT_THAT(UsageError({}), StartsWith("ATTND_PINNED_POOL: '10XB' is not a size"));
  EXPECT_THAT(UsageError({"--pinned-pool=1GiB"}), StartsWith("ATTND_PINNED_POOL: "));
  environment_ = {{"ATTND_LISTEN", "127.0.0.1:1,,127.0.0.1:2"}};
  EXPECT_THAT(UsageError({}), StartsWith("ATTND_LISTEN: '' is not an address"));
}

TEST_F(ConfigTest, WhatIsNotBuiltIsRefusedFromEverySource) {
  for (const std::string name : {"metrics-listen", "devices", "warm", "quotas",
                                 "allow-shared-memory", "shared-memory-prefix", "allow-cuda-ipc",
                                 "tls-cert", "tls-key", "tls-client-ca", "tokens"}) {
    EXPECT_EQ(UsageError({"--" + name}), "--" + name + " is not built yet");
    EXPECT_EQ(UsageError({"--" + name + "=true"}), "--" + name + " is not built yet");
    EXPECT_THAT(FileError("\n" + name + " = true\n"),
                testing::EndsWith("attnd.toml:2: " + name + " is not built yet"));
  }
  EXPECT_EQ(UsageError({"--tls-cert", "a.pem"}), "--tls-cert is not built yet");
  environment_["ATTND_ALLOW_SHARED_MEMORY"] = "true";
  EXPECT_EQ(UsageError({}), "ATTND_ALLOW_SHARED_MEMORY is not built yet");
  environment_ = {{"ATTND_TLS_CLIENT_CA", "ca.pem"}};
  EXPECT_EQ(UsageError({}), "ATTND_TLS_CLIENT_CA is not built yet");
}

TEST_F(ConfigTest, PlaintextBeyondThisMachineNeedsInsecure) {
  for (const std::string address :
       {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.com:1", "[2001:db8::1]:1"}) {
    EXPECT_THAT(UsageError({"--listen=127.0.0.1:0", "--listen=" + address}),
                AllOf(StartsWith("--listen: " + address), HasSubstr("--insecure")));
    EXPECT_THAT(Texts(MustParse({"--insecure", "--listen=" + address}).listen),
                ElementsAre(address));
  }
  for (const std::string address : {"127.5.5.5:1", "localhost:1", "[::1]:1", "unix:/x"}) {
    EXPECT_THAT(Texts(MustParse({"--listen=" + address}).listen), ElementsAre(address));
  }
  EXPECT_TRUE(MustParse({"--health-listen=0.0.0.0:8080"}).health_listen.has_value());
}

TEST_F(ConfigTest, AnAddressIsListenedOnOnce) {
  EXPECT_EQ(UsageError({"--listen=localhost:1", "--listen=LOCALHOST:01"}),
            "--listen: localhost:1 is given twice");
  EXPECT_EQ(UsageError({"--listen=unix:/x", "--listen=unix:///x"}),
            "--listen: unix:/x is given twice");
  EXPECT_EQ(UsageError({"--health-listen=127.0.0.1:50051"}),
            "--health-listen: 127.0.0.1:50051 is also in --listen");
  EXPECT_EQ(MustParse({"--listen=127.0.0.1:0", "--listen=127.0.0.1:0"}).listen.size(), 2u);
}

TEST_F(ConfigTest, ReadsTheFile) {
  const Config config = MustParse({"--config=" + WriteFile("\xef\xbb\xbf# attnd\r\n"
                                                           "listen = [ # two of them\r\n"
                                                           "  \"unix:/run/a,b.sock\", # one\n"
                                                           "  'localhost:0',\n"
                                                           "]\n"
                                                           "\tthreads=2#comment\n"
                                                           "drain-delay = 0.5\n"
                                                           "max-queue = \"64MiB\"  \n"
                                                           "insecure = false")});
  EXPECT_THAT(Texts(config.listen), ElementsAre("unix:/run/a,b.sock", "localhost:0"));
  EXPECT_EQ(config.threads, 2);
  EXPECT_EQ(config.drain_delay, absl::Milliseconds(500));
  EXPECT_EQ(config.max_queue_bytes, int64_t{64} << 20);
  EXPECT_FALSE(config.insecure);
}

TEST_F(ConfigTest, AListMayBeOneValueInTheFile) {
  const Config config = MustParse({"--config=" + WriteFile("listen = \"localhost:0\"\n")});
  EXPECT_THAT(Texts(config.listen), ElementsAre("localhost:0"));
}

TEST_F(ConfigTest, WrongFilesAreNamedWithTheirLine) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"threads = 1\nthread = 2\n", ":2: thread is no setting of this file"},
      {"config = \"a.toml\"\n", ":1: config is no setting of this file"},
      {"help = true\n", ":1: help is no setting of this file"},
      {"[server]\nthreads = 1\n", ":1: server: sections and nested keys are not used here"},
      {"\n[[server]]\n", ":2: server: sections and nested keys are not used here"},
      {"server.threads = 1\n", ":1: server: sections and nested keys are not used here"},
      {"threads = { n = 1 }\n", ":1: threads: sections and nested keys are not used here"},
      {"threads = [1, 2]\n", ":1: threads takes one value, and 2 are given"},
      {"listen = []\n", ":1: listen has no value"},
      {"listen = [[\"a:1\"]]\n", ":1: listen is not a number, true, false, a string"},
      {"threads = 2026-12-01\n", ":1: threads is not a number, true, false, a string"},
      {"threads = -1\n", ":1: threads: '-1' is not a whole number from 0 to 4096"},
      // What is no TOML at all is toml++'s to say.
      {"threads = 1\n# again\nthreads = 1\n", ":3: "},
      {"listen = \"a:1\"\nlisten = \"a:2\"\n", ":2: "},
      {"listen = [\"a:1\" \"a:2\"]\n", ":1: "},
      {"log-level = info\n", ":1: "},
      {"log-level = \"info\n", ":1: "},
      {"log-level = \"info\" x\n", ":1: "},
      {"log-level\n", ":1: "},
      {"= 1\n", ":1: "},
      {"threads =\n", ":1: "},
      {"threads = 04\n", ":1: "},
      {std::string("\0threads = 1\n", 13), ":1: "},
  };
  for (const auto& [text, sentence] : wrong) {
    EXPECT_THAT(FileError(text), HasSubstr("attnd.toml" + sentence)) << text;
  }
}

TEST_F(ConfigTest, RefusesWhatIsNoFileOfSettings) {
  EXPECT_EQ(UsageError({"--config=" + folder_.string()}),
            "--config: cannot read '" + folder_.string() + "'");
  EXPECT_THAT(FileError(std::string((1 << 20) + 1, '#')), HasSubstr("is larger than 1 MiB"));
  EXPECT_EQ(MustParse({"--config=" + WriteFile(std::string(1 << 20, '#'))}).threads, 0);
}

TEST(ConfigFile, KeepsOrderAndLinesAndTakesQuotesAway) {
  const auto entries = ParseConfigFile("b = 1\n\na = [true, \"q\\\"\\\\\", '\\n', -0.5]\n", "f");
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 2u);
  EXPECT_EQ((*entries)[0].key, "b");
  EXPECT_EQ((*entries)[0].line, 1);
  EXPECT_THAT((*entries)[0].values, ElementsAre("1"));
  EXPECT_EQ((*entries)[1].line, 3);
  EXPECT_THAT((*entries)[1].values, ElementsAre("true", "q\"\\", "\\n", "-0.5"));
}

}  // namespace
}  // namespace attnd
