#include "tests/bench/support_problem.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "tests/bench/support_draft.h"

namespace attnd::support {
namespace {

constexpr std::array<const char*, 8> kGroups = {"3HD",      "H3D",      "HD_2HD", "HD_H2D",
                                                "HD_HD_HD", "SD_SD_SD", "paged",  "STRIDED"};
constexpr int kMostFeatures = 4;
constexpr int kMostTries = 20;

uint64_t Hash(const std::string& text, uint64_t seed) {
  uint64_t hash = 14695981039346656037U ^ seed;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return hash;
}

std::vector<const Form*> FormsWith(const std::string& group, unsigned needs) {
  std::vector<const Form*> forms;
  for (const Form& form : Forms()) {
    if (group == form.group && Meets(form, needs)) forms.push_back(&form);
  }
  return forms;
}

// The layouts that can have the features take turns.
std::optional<Draft> DraftWith(const Key& key, std::span<const Feature* const> features,
                               Random& random) {
  unsigned needs = 0;
  for (const Feature* feature : features) needs |= feature->needs;
  const std::vector<const Form*> forms = FormsWith(key.group, needs);
  if (forms.empty()) return std::nullopt;
  Draft draft = DrawPlain(*forms[static_cast<size_t>(key.number) % forms.size()], random);
  for (const Feature* feature : features) feature->apply(draft, random);
  return draft;
}

// Some features that a layout of the group can have together; a later one overrides an earlier.
std::optional<Draft> DraftCombined(const Key& key, Random& random) {
  const std::span<const Feature> table = FeatureTable();
  for (int i = 0; i < kMostTries; ++i) {
    std::vector<const Feature*> features(static_cast<size_t>(Uniform(random, 2, kMostFeatures)));
    for (const Feature*& feature : features) {
      feature =
          &table[static_cast<size_t>(Uniform(random, 0, static_cast<int64_t>(table.size()) - 1))];
    }
    if (std::optional<Draft> draft = DraftWith(key, features, random)) return draft;
  }
  return std::nullopt;
}

}  // namespace

std::string NameOf(const Key& key) {
  return absl::StrCat(key.group, "/", key.feature, "/", key.backward ? "backward" : "forward", "/",
                      key.number);
}

std::span<const char* const> Groups() { return kGroups; }

std::vector<std::string> Features() {
  std::vector<std::string> names;
  for (const Feature& feature : FeatureTable()) names.emplace_back(feature.name);
  return names;
}

std::optional<Problem> DrawProblem(const Key& key, uint64_t seed) {
  Random random(Hash(NameOf(key), seed));
  std::optional<Draft> draft;
  if (key.feature == kCombined) {
    draft = DraftCombined(key, random);
  } else {
    for (const Feature& feature : FeatureTable()) {
      const Feature* const one[] = {&feature};
      if (key.feature == feature.name) draft = DraftWith(key, one, random);
    }
  }
  if (!draft) return std::nullopt;
  Problem problem = BuildProblem(*draft, random);
  problem.backward = key.backward;
  problem.retained = key.backward && OneIn(random, 4);
  problem.request.set_return_lse(key.backward || !OneIn(random, 4));
  return problem;
}

}  // namespace attnd::support
