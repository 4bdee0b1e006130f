// Requests without attention, for tests of the queue and the workers.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/sched/work.h"

namespace attnd {

class FakePlan final : public AttentionPlan {
 public:
  explicit FakePlan(absl::Status status) : status_(std::move(status)) {}
  std::string_view engine() const override { return "fake"; }
  int64_t workspace_bytes() const override { return 0; }
  absl::Status Forward(const AttentionProblem&, const ForwardBuffers&) override { return status_; }

 private:
  const absl::Status status_;
};

class FakeBackend final : public AttentionBackend {
 public:
  const BackendInfo& info() const override { return info_; }
  absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(const AttentionProblem&) override {
    return std::make_unique<FakePlan>(absl::OkStatus());
  }
  absl::StatusOr<std::unique_ptr<BackwardPlan>> BuildBackwardPlan(
      const AttentionProblem&) override {
    return absl::UnimplementedError("no gradients");
  }

 private:
  const BackendInfo info_{.name = "fake"};
};

// Work of `bytes` bytes that appends its final status to `ended`.
inline std::unique_ptr<Work> MakeWork(FakeBackend& backend, int64_t bytes,
                                             std::vector<absl::Status>& ended,
                                             absl::Status result = absl::OkStatus()) {
  auto work = std::make_unique<Work>();
  work->backend = &backend;
  work->plan = std::make_unique<FakePlan>(std::move(result));
  work->bytes = bytes;
  work->done = [&ended](absl::StatusOr<CallResult> r) { ended.push_back(r.status()); };
  return work;
}

}  // namespace attnd
