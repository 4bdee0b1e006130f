#include "tests/engine/core/requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/core/status.h"

namespace attnd::testing {

Geometry SmallGeometry(const Arrangement& arrangement) {
  Geometry g{.batch = 2, .h = 6, .g = 3, .d_qk = 8, .d_v = 10, .s_q = 4, .s_kv = 5};
  g.has_lengths = true;
  g.q_len = {3, 4}, g.kv_len = {5, 2};
  g.q_row = {0, 3, 7}, g.kv_row = {0, 5, 7};
  g.t_q = 7, g.t_kv = 7;
  if (CanHold(arrangement, g)) return g;
  g.d_v = 8;
  if (CanHold(arrangement, g)) return g;
  g.g = 6;
  g.s_kv = g.s_q, g.kv_len = g.q_len, g.kv_row = g.q_row;
  EXPECT_TRUE(CanHold(arrangement, g)) << arrangement.name;
  return g;
}

Request SmallRequest(const Arrangement& arrangement) {
  const std::vector<std::byte> zeros(4096);
  const PackedRequest packed =
      Pack(arrangement, SmallGeometry(arrangement), {DType::kFloat16, {zeros, zeros, zeros}});
  return {packed.spec, packed.sequences, packed.inputs, {}};
}

Request SmallRequest(Layout layout) { return SmallRequest(ArrangementOf(layout)); }

Request SmallRequest(std::string_view arrangement_name) {
  const auto all = AllArrangements();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Arrangement& a) { return a.name == arrangement_name; });
  EXPECT_NE(found, all.end()) << arrangement_name;
  return SmallRequest(*found);
}

void ExpectRefused(const BadRequest& bad) {
  Request request = SmallRequest(bad.arrangement);
  ASSERT_TRUE(request.Resolve().ok()) << request.Resolve().status();
  bad.spoil(request);
  const absl::Status status = request.Resolve().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(ErrorField(status), bad.field) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(bad.field));
  EXPECT_NE(ErrorReason(status), "") << status;
}

}  // namespace attnd::testing
