// The problems that the support matrix is made of: layout groups, features, and random draws.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attnd/v1/attention.pb.h"

namespace attnd::support {

// One sequence; rows are its starts in a THD buffer, 0 on other sides.
struct Extent {
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t q_row = 0;
  int64_t kv_row = 0;
};

// A request without its tensors' elements; page tables have theirs.
struct Problem {
  v1::ForwardRequest request;
  bool backward = false;
  bool retained = false;  // Backward: from a context, not resent.
  bool q_is_thd = false;
  std::vector<Extent> sequences;
  std::vector<int64_t> out_shape;
  std::vector<int64_t> lse_shape;
  uint64_t seed = 0;  // Of its elements.
};

// Which problem: the rows and columns of the matrix, and a number within its cell.
struct Key {
  std::string group;
  std::string feature;
  bool backward = false;
  int number = 0;
};

// "HD_2HD/GQA/backward/3"
std::string NameOf(const Key& key);

// Names, in the order of the matrix.
std::span<const char* const> Groups();
std::vector<std::string> Features();

// The row of requests that have several features each.
inline constexpr char kCombined[] = "combined";

// The same problem for the same arguments. nullopt where the group's layouts cannot have the
// feature. `key` has a group and a feature from above, or kCombined.
std::optional<Problem> DrawProblem(const Key& key, uint64_t seed);

}  // namespace attnd::support
