#include "engine/store/context_store.h"

#include <gtest/gtest.h>

#include "engine/core/status.h"

namespace attnd {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);

std::shared_ptr<const RetainedForward> Something() { return std::make_shared<RetainedForward>(); }

TEST(ContextStore, FindsWhatItKeepsUntilTheLeaseEnds) {
  ContextStore store("run1");
  const auto context = Something();
  const std::string name = store.Put(context, kStart + absl::Seconds(10));
  EXPECT_TRUE(name.starts_with("run1-"));
  EXPECT_EQ(*store.Find(name, kStart), context);
  EXPECT_EQ(*store.Find(name, kStart + absl::Seconds(9)), context) << "a second time";
  const absl::Status late = store.Find(name, kStart + absl::Seconds(10)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorField(late), "context");
  EXPECT_EQ(ErrorReason(late), reason::kExpired);
}

TEST(ContextStore, KnowsNothingOfWhatItNeverGaveOut) {
  ContextStore store("run2");
  const std::string other = ContextStore("run1").Put(Something(), absl::InfiniteFuture());
  const std::string own = store.Put(Something(), absl::InfiniteFuture());
  for (const std::string& name :
       {std::string(), std::string("run2-"), std::string("run2-1-0"), std::string("run2-x-0"),
        std::string("run2-18446744073709551616-0"), std::string("run2"), other}) {
    EXPECT_EQ(store.Find(name, kStart).status().code(), absl::StatusCode::kNotFound) << name;
  }
  EXPECT_TRUE(store.Find(own, kStart).ok());
  EXPECT_FALSE(store.Find(own.substr(0, own.size() - 1), kStart).ok());
}

TEST(ContextStore, AnExpiredContextGivesItsMemoryBack) {
  auto pool = MakeHostPool(1 << 20, "--pool");
  ContextStore store("run");
  auto context = std::make_shared<RetainedForward>();
  context->inputs = *pool->Allocate(5000);
  store.Put(std::move(context), kStart);
  store.Put(Something(), kStart + absl::Seconds(1));
  EXPECT_GT(pool->stats().in_use_bytes, 0);
  EXPECT_EQ(store.Sweep(kStart), 1);
  EXPECT_EQ(pool->stats().in_use_bytes, 0);
}

}  // namespace
}  // namespace attnd
