#include "tests/bench/support_report.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace attnd::support {
namespace {

constexpr char kLegend[] =
    "A cell says what became of its problems. They take the group's layouts in turn, differ in "
    "dtype, sizes and lengths, and have the row's feature alone. `runs`: all were accepted by "
    "`Plan`, executed with random inputs of unit variance and NaN in the rows that belong to "
    "nobody, and are equal to the reference loop (bounds of `attnctl --check`; where O is FP8, for "
    "gradients three times as much), with zeros in those rows and, where they are deterministic, "
    "the same bytes again; below it the kernel families that ran, as the replies name them. "
    "`refused`: `Plan` names that field, for the reason with that number, and so does the call "
    "itself. `-`: no layout of the group can have the feature.\n\n"
    "`emulated`: as `runs`, on kernels of ours that stand in for the GPU library's, slower "
    "(`cuda_tiled`). The last row of each table counts requests with two to four features.\n";

std::string CellName(const Key& key) {
  return absl::StrCat(key.group, "/", key.feature, "/", key.backward);
}

// The sentence with N for every number that is no part of a name.
std::string WithoutNumbers(const std::string& sentence) {
  std::string text;
  for (const char c : sentence) {
    const bool is_digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    const char before = text.empty() ? ' ' : text.back();
    if (is_digit && before == 'N') continue;
    const bool in_name = std::isalnum(static_cast<unsigned char>(before)) != 0 || before == '_';
    text += is_digit && !in_name ? 'N' : c;
  }
  return text;
}

std::string FieldOf(const std::string& sentence) { return sentence.substr(0, sentence.find(' ')); }

template <typename T>
void AddOnce(const T& value, std::vector<T>* values) {
  if (std::find(values->begin(), values->end(), value) == values->end()) values->push_back(value);
}

std::string Percent(int64_t part, int64_t whole) {
  if (part == whole) return "100%";
  return absl::StrCat(100.0 * static_cast<double>(part) / static_cast<double>(whole), "%");
}

}  // namespace

size_t Report::AddTarget(std::string name, const v1::GetCapabilitiesResponse& capabilities) {
  Target target;
  target.name = std::move(name);
  std::vector<std::string> machine;
  for (const v1::BackendCapabilities& backend : capabilities.backends()) {
    if (target.backend.empty()) target.backend = backend.name();
    for (const v1::Device& device : backend.devices()) machine.push_back(device.name());
  }
  for (const v1::Version& version : capabilities.versions()) {
    machine.push_back(absl::StrCat(version.component(), " ", version.version()));
  }
  target.machine = absl::StrJoin(machine, ", ");
  targets_.push_back(std::move(target));
  return targets_.size() - 1;
}

size_t Report::ReasonNumber(const std::string& sentence) {
  const auto [it, is_new] = reason_numbers_.emplace(WithoutNumbers(sentence), reasons_.size() + 1);
  if (is_new) reasons_.push_back(sentence);
  return it->second;
}

void Report::Add(size_t index, const Key& key, const Outcome& outcome) {
  Target& target = targets_[index];
  Cell& cell = target.cells[CellName(key)];
  ++target.planned;
  if (outcome.runs) {
    ++cell.runs;
    ++target.executed;
    target.agreed += outcome.agrees;
    const bool preferred = outcome.backend == target.backend;
    AddOnce(absl::StrCat(preferred ? "" : outcome.backend + " ", outcome.engine), &cell.engines);
    return;
  }
  ++cell.refused;
  ++target.refused;
  target.confirmed += outcome.agrees;
  if (!outcome.reason.empty()) AddOnce(ReasonNumber(outcome.reason), &cell.reasons);
}

int64_t Report::faults() const {
  int64_t faults = 0;
  for (const Target& t : targets_) faults += t.executed - t.agreed + t.refused - t.confirmed;
  return faults;
}

std::string Report::Counts() const {
  std::string text =
      "| target | machine and versions | planned | executed | agreed | refused | refusals "
      "confirmed "
      "|\n|---|---|---|---|---|---|---|\n";
  for (const Target& t : targets_) {
    absl::StrAppend(&text, "| ", t.name, " | ", t.machine, " | ", t.planned, " | ", t.executed,
                    " | ", t.agreed, " (", Percent(t.agreed, t.executed), ") | ", t.refused);
    absl::StrAppend(&text, " | ", t.confirmed, " (", Percent(t.confirmed, t.refused), ") |\n");
  }
  return text;
}

std::string Report::Text(const Cell& cell, bool counts_only) const {
  const int64_t all = cell.runs + cell.refused;
  std::vector<std::string> refusals;
  for (const size_t number : cell.reasons) {
    const std::string note = absl::StrCat("[", number, "]");
    refusals.push_back(counts_only ? note
                                   : absl::StrCat("`", FieldOf(reasons_[number - 1]), "` ", note));
  }
  const std::string engines = counts_only ? "" : "<br>" + absl::StrJoin(cell.engines, ", ");
  const std::string refused = absl::StrCat("refused: ", absl::StrJoin(refusals, ", "));
  // The GPU's own kernels, where its library has none.
  const bool emulated = cell.engines == std::vector<std::string>{"cuda_tiled"};
  if (cell.refused == 0 && !counts_only) return (emulated ? "emulated" : "runs") + engines;
  if (cell.runs == 0) return refused;
  return absl::StrCat(cell.runs, " of ", all, " run", engines,
                      cell.refused == 0 ? "" : "<br>" + refused);
}

std::string Report::Table(const Target& target, bool backward) const {
  std::string text = absl::StrCat("\n## ", target.name, ": ", backward ? "Backward" : "Forward",
                                  "\n\n| feature |");
  std::string rule = "|---|";
  for (const char* group : Groups()) {
    absl::StrAppend(&text, " ", group, " |");
    rule += "---|";
  }
  absl::StrAppend(&text, "\n", rule, "\n");
  std::vector<std::string> features = Features();
  features.emplace_back(kCombined);
  for (const std::string& feature : features) {
    absl::StrAppend(&text, "| ", feature, " |");
    for (const char* group : Groups()) {
      const auto cell = target.cells.find(CellName({group, feature, backward}));
      absl::StrAppend(&text, " ",
                      cell == target.cells.end() ? "-" : Text(cell->second, feature == kCombined),
                      " |");
    }
    text += "\n";
  }
  return text;
}

std::string Report::Summary() const {
  std::string text;
  for (const Target& t : targets_) {
    absl::StrAppend(&text, t.name, ": planned ", t.planned, ", executed ", t.executed, ", agreed ",
                    t.agreed, " (", Percent(t.agreed, t.executed), "), ");
    absl::StrAppend(&text, "refused ", t.refused, ", refusals confirmed ", t.confirmed, "\n");
  }
  return text;
}

std::string Report::Markdown(const Heading& heading) const {
  std::string text =
      absl::StrCat("# What runs\n\nGenerated on ", heading.date, " by\n`", heading.command,
                   "`; not written by hand.\n\n", Counts(), "\n", kLegend);
  for (const Target& target : targets_) {
    for (const bool backward : {false, true}) text += Table(target, backward);
  }
  if (reasons_.empty()) return text;
  text += "\n## Reasons\n\nNumbers in them are those of the first request that met one.\n\n";
  for (size_t i = 0; i < reasons_.size(); ++i) {
    absl::StrAppend(&text, "- [", i + 1, "] ", reasons_[i], "\n");
  }
  return text;
}

}  // namespace attnd::support
