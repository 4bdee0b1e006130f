#include "engine/store/context_store.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/core/status.h"

namespace attnd {

ContextStore::ContextStore(std::string incarnation) : prefix_(std::move(incarnation) + "-") {}

std::string ContextStore::Put(std::shared_ptr<const RetainedForward> context, absl::Time expires) {
  std::lock_guard lock(mutex_);
  std::string name = absl::StrFormat("%s%d-%08x%08x", prefix_, next_++, random_(), random_());
  entries_.emplace(name, Entry{std::move(context), expires});
  return name;
}

absl::StatusOr<std::shared_ptr<const RetainedForward>> ContextStore::Find(const std::string& name,
                                                                          absl::Time now) {
  Sweep(now);
  std::lock_guard lock(mutex_);
  if (const auto entry = entries_.find(name); entry != entries_.end()) {
    return entry->second.context;
  }
  // Names count up: one below the next was given out, and no list of the dead is kept.
  uint64_t number = 0;
  const bool was_given_out =
      absl::StartsWith(name, prefix_) &&
      absl::SimpleAtoi(name.substr(prefix_.size(), name.rfind('-') - prefix_.size()), &number) &&
      number < next_;
  if (was_given_out) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kExpired, "context",
                     "context has expired; run Forward again");
  }
  return MakeError(absl::StatusCode::kNotFound, reason::kNoSuchHandle, "context",
                   "context names nothing that this server keeps");
}

int64_t ContextStore::Sweep(absl::Time now) {
  std::vector<Entry> dead;  // Their memory goes back to its pool after the lock.
  std::lock_guard lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    if (now < entry->second.expires) {
      ++entry;
      continue;
    }
    dead.push_back(std::move(entry->second));
    entry = entries_.erase(entry);
  }
  return static_cast<int64_t>(dead.size());
}

}  // namespace attnd
