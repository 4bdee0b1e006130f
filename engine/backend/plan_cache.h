// A bounded cache of compiled plans: least recently used out first, and each key built once however
// many threads ask for it together.
//
// Thread-safe. Values are shared: one that falls out of the cache lives while somebody uses it.
// UNIMPLEMENTED is remembered like a value, because finding it out costs as much as a build; other
// errors are not.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "absl/status/statusor.h"

namespace attnd {

template <typename Key, typename Value, typename Hash = std::hash<Key>>
class PlanCache {
 public:
  using Result = absl::StatusOr<std::shared_ptr<const Value>>;

  // Holds at most `capacity` (>= 1) results.
  explicit PlanCache(size_t capacity) : capacity_(std::max<size_t>(1, capacity)) {}

  // The result for `key`. `build` is called without a lock and by one thread at a time for a key;
  // the others wait for it and share what it returns, errors too.
  template <typename Builder>
  Result GetOrBuild(const Key& key, Builder build) {
    std::unique_lock lock(mutex_);
    if (auto it = entries_.find(key); it != entries_.end()) {
      order_.splice(order_.begin(), order_, it->second.position);
      ++hits_;
      std::shared_ptr<Slot> slot = it->second.slot;
      built_.wait(lock, [&] { return slot->done; });
      return slot->result;
    }
    auto slot = std::make_shared<Slot>();
    order_.push_front(key);
    entries_.emplace(key, Entry{slot, order_.begin()});
    ++builds_;
    lock.unlock();
    Result result = CatchAll(build);
    lock.lock();
    slot->result = result;
    slot->done = true;
    if (!result.ok() && result.status().code() != absl::StatusCode::kUnimplemented) {
      order_.erase(entries_.at(key).position);
      entries_.erase(key);
    }
    Evict();
    built_.notify_all();
    return result;
  }

  // The result for `key` if it has been built.
  std::optional<Result> Find(const Key& key) const {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    if (it == entries_.end() || !it->second.slot->done) return std::nullopt;
    return it->second.slot->result;
  }

  int64_t builds() const {  // Begun since the start.
    std::lock_guard lock(mutex_);
    return builds_;
  }

  int64_t hits() const {  // Asked for when built or being built.
    std::lock_guard lock(mutex_);
    return hits_;
  }

  size_t size() const {
    std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  struct Slot {
    bool done = false;
    Result result = absl::UnknownError("not built yet");
  };
  struct Entry {
    std::shared_ptr<Slot> slot;
    typename std::list<Key>::iterator position;
  };

  // A builder that threw would leave its key unfinished, and all who ask for it waiting.
  template <typename Builder>
  static Result CatchAll(Builder& build) {
    try {
      return build();
    } catch (const std::exception& error) {
      return absl::InternalError(error.what());
    }
  }

  // Builds that are under way stay: a second one of the same key must find them.
  void Evict() {
    for (auto it = order_.end(); entries_.size() > capacity_ && it != order_.begin();) {
      --it;
      const auto entry = entries_.find(*it);
      if (!entry->second.slot->done) continue;
      entries_.erase(entry);
      it = order_.erase(it);
    }
  }

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable built_;
  std::list<Key> order_;  // Most recently used first.
  std::unordered_map<Key, Entry, Hash> entries_;
  int64_t builds_ = 0;
  int64_t hits_ = 0;
};

}  // namespace attnd
