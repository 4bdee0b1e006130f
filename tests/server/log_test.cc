#include "server/telemetry/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace attnd {
namespace {

using Json = nlohmann::json;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

constexpr char kTime[] = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3}Z";

// The lines that `function` writes to standard error; a last line without its end would be one too.
template <typename Function>
std::vector<std::string> LinesOf(Function function) {
  testing::internal::CaptureStderr();
  function();
  std::istringstream text(testing::internal::GetCapturedStderr());
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

Json OnlyJson(std::string_view message, std::initializer_list<LogField> fields) {
  InitLogging(LogLevel::kTrace, LogFormat::kJson);
  const auto lines = LinesOf([&] { Log(LogLevel::kWarning, message, fields); });
  EXPECT_THAT(lines, SizeIs(1));
  return lines.empty() ? Json() : Json::parse(lines[0]);
}

std::string OnlyText(std::string_view message, std::initializer_list<LogField> fields) {
  InitLogging(LogLevel::kTrace, LogFormat::kText);
  const auto lines = LinesOf([&] { Log(LogLevel::kError, message, fields); });
  EXPECT_THAT(lines, SizeIs(1));
  return lines.empty() ? "" : lines[0];
}

TEST(Log, TextHasTimeLevelMessageAndFields) {
  const std::string line = OnlyText("request failed", {{"code", "INVALID_ARGUMENT"},
                                                       {"bytes", uint64_t{1} << 63},
                                                       {"delta", -3},
                                                       {"ratio", 0.5},
                                                       {"retry", false}});
  EXPECT_THAT(line, MatchesRegex(std::string(kTime) +
                                 " error request failed code=INVALID_ARGUMENT "
                                 "bytes=9223372036854775808 delta=-3 ratio=0[.]5 retry=false"));
}

TEST(Log, TextQuotesValuesThatWouldBeReadWrongly) {
  EXPECT_THAT(OnlyText("m", {{"a", "x y"}, {"b", ""}, {"c", "say \"hi\""}, {"d", "1\n2\t"}}),
              EndsWith(R"( m a="x y" b="" c="say \"hi\"" d="1\n2\t")"));
  EXPECT_THAT(OnlyText("m", {{"a", "Grüße"}, {"b", "\xff"}}),
              EndsWith(" m a=\"Grüße\" b=\"\xef\xbf\xbd\""));
}

TEST(Log, TextMessageStaysOneLine) {
  EXPECT_THAT(OnlyText("first\nsecond \x1b[31m", {}), EndsWith(R"(first\nsecond \u001b[31m)"));
  EXPECT_THAT(OnlyText("say \"hi\" 100%", {}), EndsWith("error say \"hi\" 100%"));
}

TEST(Log, JsonHasTimeLevelMessageAndFields) {
  const Json line = OnlyJson("request failed", {{"code", "NOT_FOUND"},
                                                {"bytes", std::numeric_limits<uint64_t>::max()},
                                                {"delta", std::numeric_limits<int64_t>::min()},
                                                {"ratio", 0.25},
                                                {"retry", true}});
  EXPECT_THAT(line["ts"].get<std::string>(), MatchesRegex(kTime));
  EXPECT_EQ(line["level"], "warning");
  EXPECT_EQ(line["msg"], "request failed");
  EXPECT_EQ(line["code"], "NOT_FOUND");
  EXPECT_EQ(line["bytes"], std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(line["delta"], std::numeric_limits<int64_t>::min());
  EXPECT_EQ(line["ratio"], 0.25);
  EXPECT_EQ(line["retry"], true);
  EXPECT_EQ(line.size(), 8u);
}

TEST(Log, JsonWithoutFieldsIsAnObject) { EXPECT_EQ(OnlyJson("ready", {}).size(), 3u); }

TEST(Log, JsonCarriesEveryByteOfValidText) {
  std::string controls;
  for (char c = 0; c < 0x20; ++c) controls += c;
  controls += "\x7f\"\\/%v{}";
  const Json line = OnlyJson(controls, {{"value", controls}, {"unicode", "Grüße 漢字 🚀"}});
  EXPECT_EQ(line["msg"], controls);
  EXPECT_EQ(line["value"], controls);
  EXPECT_EQ(line["unicode"], "Grüße 漢字 🚀");
}

TEST(Log, JsonReplacesBytesThatAreNotUtf8) {
  const std::string replacement = "\xef\xbf\xbd";
  const Json line = OnlyJson(
      "a\xff"
      "b",
      {{"cut", "x\xe2\x82"}, {"surrogate", "\xed\xa0\x80"}});
  EXPECT_EQ(line["msg"], "a" + replacement + "b");
  EXPECT_EQ(line["cut"], "x" + replacement);
  EXPECT_THAT(line["surrogate"].get<std::string>(), testing::StartsWith(replacement));
}

TEST(Log, JsonWritesNumbersThatJsonLacksAsNull) {
  EXPECT_TRUE(OnlyJson("m", {{"nan", std::nan("")}})["nan"].is_null());
}

TEST(Log, DropsWhatIsBelowTheLevel) {
  const std::vector<LogLevel> levels = {LogLevel::kTrace, LogLevel::kDebug, LogLevel::kInfo,
                                        LogLevel::kWarning, LogLevel::kError};
  for (size_t lowest = 0; lowest < levels.size(); ++lowest) {
    InitLogging(levels[lowest], LogFormat::kText);
    const auto lines = LinesOf([&] {
      for (const LogLevel level : levels) Log(level, "m");
    });
    EXPECT_THAT(lines, SizeIs(levels.size() - lowest));
  }
}

TEST(Log, WritesNothingToStandardOutput) {
  InitLogging(LogLevel::kInfo, LogFormat::kText);
  testing::internal::CaptureStdout();
  EXPECT_THAT(LinesOf([] { Log(LogLevel::kError, "m"); }), SizeIs(1));
  EXPECT_THAT(testing::internal::GetCapturedStdout(), IsEmpty());
}

TEST(Log, LinesOfThreadsDoNotMix) {
  constexpr int kThreads = 8;
  constexpr int kLines = 200;
  InitLogging(LogLevel::kInfo, LogFormat::kJson);
  const auto lines = LinesOf([] {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([i] {
        for (int n = 0; n < kLines; ++n) {
          Log(LogLevel::kInfo, "m", {{"thread", i}, {"n", n}, {"pad", std::string(5000, 'x')}});
        }
      });
    }
  });
  ASSERT_THAT(lines, SizeIs(kThreads * kLines));
  std::vector<int> next(kThreads, 0);
  for (const std::string& line : lines) {
    const Json json = Json::parse(line);
    EXPECT_EQ(json["n"], next.at(json["thread"].get<size_t>())++);
  }
}

}  // namespace
}  // namespace attnd
