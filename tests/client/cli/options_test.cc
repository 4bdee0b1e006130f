#include "client/cli/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace attnd::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::optional<int> Parse(std::vector<const char*> arguments, Options* options) {
  arguments.insert(arguments.begin(), "attnctl");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data(), options);
}

TEST(Options, HaveTheDefaultsOfTheContract) {
  Options options;
  EXPECT_EQ(Parse({"capabilities"}, &options), std::nullopt);
  EXPECT_EQ(options.command, Command::kCapabilities);
  EXPECT_EQ(options.address, "127.0.0.1:50051");
  EXPECT_EQ(options.timeout_seconds, 60);
  EXPECT_FALSE(options.json);
}

TEST(Options, MayFollowTheSubcommand) {
  Options options;
  EXPECT_EQ(Parse({"health", "--address=unix:/a/b", "--json", "--wait", "3", "--timeout", "0.5"},
                  &options),
            std::nullopt);
  EXPECT_EQ(options.command, Command::kHealth);
  EXPECT_EQ(options.address, "unix:/a/b");
  EXPECT_TRUE(options.json);
  EXPECT_EQ(options.wait_seconds, 3);
  EXPECT_EQ(options.timeout_seconds, 0.5);
}

TEST(Options, FillARequest) {
  Options options;
  EXPECT_EQ(Parse({"plan", "--layout", "STRIDED", "--batch", "2", "--head-dim", "-8", "--window",
                   "-1,5", "--view", "q:q:0:1,2,3,4", "--view", "k:kv:8:1,2,3,4", "--q", "q.npy",
                   "--scale", "-0.5", "--shape", "kv:3,4"},
                  &options),
            std::nullopt);
  const RequestOptions& request = options.request;
  EXPECT_EQ(options.command, Command::kPlan);
  EXPECT_EQ(request.layout, "STRIDED");
  EXPECT_EQ(request.batch, 2);
  EXPECT_EQ(request.head_dim, -8);
  EXPECT_EQ(request.heads, std::nullopt);
  EXPECT_EQ(request.window, "-1,5");
  EXPECT_THAT(request.views, ElementsAre("q:q:0:1,2,3,4", "k:kv:8:1,2,3,4"));
  EXPECT_THAT(request.shapes, ElementsAre("kv:3,4"));
  EXPECT_EQ(request.input_files[1], "q.npy");
  EXPECT_EQ(request.scale, -0.5);
  EXPECT_FALSE(request.lse);
}

TEST(Options, CheckAndLseFileAskForTheLse) {
  Options check, file;
  EXPECT_EQ(Parse({"forward", "--layout", "BS3HD", "--check"}, &check), std::nullopt);
  EXPECT_TRUE(check.request.lse);
  EXPECT_EQ(Parse({"forward", "--layout", "BS3HD", "--lse-out", "l.npy"}, &file), std::nullopt);
  EXPECT_TRUE(file.request.lse);
}

TEST(Options, BackwardAsksForTheLse) {
  Options options;
  EXPECT_EQ(Parse({"backward", "--layout", "BS3HD", "--out", "o.npy", "--lse", "l.npy", "--d-out",
                   "d.npy", "--grads-out", "g", "--check"},
                  &options),
            std::nullopt);
  EXPECT_EQ(options.command, Command::kBackward);
  EXPECT_EQ(options.request.saved_out_file, "o.npy");
  EXPECT_EQ(options.request.saved_lse_file, "l.npy");
  EXPECT_EQ(options.request.d_out_file, "d.npy");
  EXPECT_EQ(options.grads_prefix, "g");
  EXPECT_TRUE(options.check);
  EXPECT_TRUE(options.request.lse);
}

TEST(Options, BackwardMayRetain) {
  Options options;
  EXPECT_EQ(Parse({"backward", "--layout", "BS3HD", "--retain", "1.5"}, &options), std::nullopt);
  EXPECT_EQ(options.retain_seconds, 1.5);
}

TEST(Options, FillTheFeatures) {
  Options options;
  EXPECT_EQ(Parse({"plan",
                   "--layout",
                   "BS3HD",
                   "--backward",
                   "--bias-kind",
                   "alibi",
                   "--bias",
                   "b.npy",
                   "--bias-shape",
                   "1hss",
                   "--softmax",
                   "learnable",
                   "--softmax-offset",
                   "s.npy",
                   "--dropout",
                   "0.5",
                   "--dropout-seed",
                   "-7",
                   "--dropout-offset",
                   "9"},
                  &options),
            std::nullopt);
  const RequestOptions& request = options.request;
  EXPECT_TRUE(request.backward);
  EXPECT_EQ(request.bias_kind, "alibi");
  EXPECT_EQ(request.bias_file, "b.npy");
  EXPECT_EQ(request.bias_shape, "1hss");
  EXPECT_EQ(request.softmax, "learnable");
  EXPECT_EQ(request.softmax_offset_file, "s.npy");
  EXPECT_EQ(request.dropout, 0.5);
  EXPECT_EQ(request.dropout_seed, -7);
  EXPECT_EQ(request.dropout_offset, 9);
}

TEST(Options, UsageErrorsEndWithTwo) {
  Options options;
  for (const std::vector<const char*>& arguments : std::vector<std::vector<const char*>>{
           {},
           {"nonsense"},
           {"health", "--nonsense"},
           {"health", "--wait", "-1"},
           {"health", "--timeout", "0"},
           {"plan"},
           {"plan", "--layout", "BS3HD", "--batch", "two"},
           {"plan", "--layout", "BS3HD", "--random"},
           {"forward", "--layout", "BS3HD", "--d-out", "x"},
           {"backward", "--layout", "BS3HD", "--lse-out", "x"},
           {"backward", "--layout", "BS3HD", "--retain", "0"},
           {"backward", "--layout", "BS3HD", "--retain", "9", "--out", "x"}}) {
    EXPECT_EQ(Parse(arguments, &options), kExitUsage);
  }
}

TEST(Options, SubcommandsThatAreNotBuiltSaySo) {
  for (const char* name : {"stats", "warm", "put", "get"}) {
    Options options;
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(Parse({name, "--layout", "BS3HD", "x"}, &options), kExitUsage);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr(std::string(name) + " is not built yet"));
  }
}

TEST(Options, HelpAndVersionEndWithZero) {
  Options options;
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Parse({"--help"}, &options), kExitOk);
  EXPECT_EQ(Parse({"forward", "--help"}, &options), kExitOk);
  EXPECT_EQ(Parse({"--version"}, &options), kExitOk);
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr("--layout"));
}

}  // namespace
}  // namespace attnd::cli
