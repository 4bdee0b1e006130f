// Asks servers which attention problems they compute, makes them do it, and writes the answers down
// as a page: `support_matrix --target=cpu=unix:/tmp/attnd.sock --output=SUPPORT.md`. Exit code 0, 1
// (an answer was wrong, or the page cannot be written) or 2 (usage).

#include <CLI/CLI.hpp>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/error_details.h"
#include "tests/bench/support_problem.h"
#include "tests/bench/support_report.h"
#include "tests/bench/support_trial.h"

namespace attnd::support {
namespace {

// How many requests with several features there are for each of a cell's.
constexpr int kCombinedFactor = 10;

struct Options {
  std::vector<std::string> targets;  // "NAME=ADDRESS"
  std::string output;
  uint64_t seed = 1;
  int requests = 6;
  std::vector<std::string> groups;  // Empty: all.
  std::string only;
  int connect_seconds = 30;
};

struct Target {
  std::string name;
  client::Client* client;
};

std::string Today() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

// Every target by name, with what it says of itself in the report; none where one cannot be asked.
std::vector<Target> Connect(const Options& options, Report* report) {
  std::vector<Target> targets;
  for (const std::string& text : options.targets) {
    const size_t equals = text.find('=');
    // Never destroyed: with its last channel gRPC 1.51 may wait 10 s.
    auto* client = new client::Client(text.substr(equals + 1));
    v1::GetCapabilitiesResponse capabilities;
    const grpc::Status status = client->GetCapabilities(
        {.timeout = std::chrono::seconds(options.connect_seconds), .wait_for_ready = true},
        &capabilities);
    if (!status.ok()) {
      std::fprintf(stderr, "support_matrix: %s: %s: %s\n", text.c_str(),
                   client::CodeName(status.error_code()).c_str(), status.error_message().c_str());
      return {};
    }
    targets.push_back({text.substr(0, equals), client});
    report->AddTarget(targets.back().name, capabilities);
  }
  return targets;
}

std::vector<Key> Keys(const Options& options) {
  std::vector<std::string> features = Features();
  features.emplace_back(kCombined);
  std::vector<Key> keys;
  for (const char* group : Groups()) {
    for (const std::string& feature : features) {
      const int count = options.requests * (feature == kCombined ? kCombinedFactor : 1);
      for (const bool backward : {false, true}) {
        for (int i = 0; i < count; ++i) keys.push_back({group, feature, backward, i});
      }
    }
  }
  std::erase_if(keys, [&](const Key& key) {
    const std::vector<std::string>& groups = options.groups;
    const bool in_group =
        groups.empty() || std::find(groups.begin(), groups.end(), key.group) != groups.end();
    return !in_group || (!options.only.empty() && NameOf(key) != options.only);
  });
  return keys;
}

void TryAll(const Options& options, const std::vector<Target>& targets, Report* report) {
  for (const Key& key : Keys(options)) {
    const std::optional<Problem> problem = DrawProblem(key, options.seed);
    if (!problem) continue;
    for (size_t i = 0; i < targets.size(); ++i) {
      const Outcome outcome = Try(*problem, *targets[i].client);
      report->Add(i, key, outcome);
      const std::string name = absl::StrCat(targets[i].name, " ", NameOf(key));
      if (!outcome.agrees) {
        std::printf("WRONG %s (--seed=%llu --only='%s'): %s\n", name.c_str(),
                    static_cast<unsigned long long>(options.seed), NameOf(key).c_str(),
                    outcome.fault.c_str());
      }
      if (!outcome.agrees || !options.only.empty()) {
        std::printf("  %s%s%s; request: %s\n", outcome.backend.c_str(), outcome.engine.c_str(),
                    outcome.reason.c_str(), problem->request.ShortDebugString().c_str());
      }
    }
  }
}

std::string CommandOf(const Options& options) {
  std::string command = "support_matrix";
  for (const std::string& target : options.targets) absl::StrAppend(&command, " --target=", target);
  return absl::StrCat(command, " --seed=", options.seed, " --requests=", options.requests);
}

int Run(const Options& options) {
  Report report;
  const std::vector<Target> targets = Connect(options, &report);
  if (targets.empty()) return 1;
  TryAll(options, targets, &report);
  if (!options.output.empty()) {
    std::ofstream file(options.output);
    file << report.Markdown({CommandOf(options), Today()});
    if (!file.flush()) {
      std::fprintf(stderr, "support_matrix: cannot write %s\n", options.output.c_str());
      return 1;
    }
  }
  std::fputs(report.Summary().c_str(), stdout);
  return report.faults() == 0 ? 0 : 1;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Writes which attention problems run, after running them");
  app.add_option("--target", options.targets, "NAME=ADDRESS of a server; may be repeated")
      ->required()
      ->check([](const std::string& text) {
        return text.find('=') == std::string::npos ? "it is NAME=ADDRESS" : "";
      });
  app.add_option("--output", options.output, "The page");
  app.add_option("--seed", options.seed, "Of every draw (default 1)");
  app.add_option("--requests", options.requests, "Problems of each cell and pass (default 6)")
      ->check(CLI::Range(1, 10'000));
  app.add_option("--group", options.groups, "One of the columns (default: all); may be repeated")
      ->check(CLI::IsMember(std::vector<std::string>(Groups().begin(), Groups().end())));
  app.add_option("--only", options.only, "The one problem of this name, which is printed");
  app.add_option("--connect-seconds", options.connect_seconds, "Wait for a server (default 30)")
      ->check(CLI::Range(1, 3600));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return Run(options);
}

}  // namespace
}  // namespace attnd::support

int main(int argc, char** argv) { return attnd::support::Main(argc, argv); }
