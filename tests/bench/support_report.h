// Outcomes, by target and cell, and the page that shows them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "attnd/v1/admin.pb.h"
#include "tests/bench/support_problem.h"
#include "tests/bench/support_trial.h"

namespace attnd::support {

// How a page was made.
struct Heading {
  std::string command;
  std::string date;
};

class Report {
 public:
  // A server; returns its number. Targets come before outcomes.
  size_t AddTarget(std::string name, const v1::GetCapabilitiesResponse& capabilities);

  void Add(size_t target, const Key& key, const Outcome& outcome);

  // Outcomes that do not agree.
  int64_t faults() const;

  std::string Markdown(const Heading& heading) const;

  // A line for each target.
  std::string Summary() const;

 private:
  struct Cell {
    int64_t runs = 0;
    int64_t refused = 0;
    std::vector<std::string> engines;  // In the order met.
    std::vector<size_t> reasons;       // Numbers of reasons_, likewise.
  };
  struct Target {
    std::string name;
    std::string backend;  // The one that it prefers.
    std::string machine;
    int64_t planned = 0, executed = 0, agreed = 0, refused = 0, confirmed = 0;
    std::map<std::string, Cell> cells;  // By NameOf the key without its number.
  };

  size_t ReasonNumber(const std::string& sentence);
  std::string Counts() const;
  std::string Table(const Target& target, bool backward) const;
  std::string Text(const Cell& cell, bool counts_only) const;

  std::vector<Target> targets_;
  std::vector<std::string> reasons_;              // As first met; numbered from 1.
  std::map<std::string, size_t> reason_numbers_;  // By the sentence without its numbers.
};

}  // namespace attnd::support
