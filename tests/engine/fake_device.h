// A backend with memory of its own, on the host: what is enqueued runs at Wait, buffers must lie in
// its memory, and plans take as long to build as a test wants.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/backend/attention_backend.h"
#include "engine/core/status.h"
#include "engine/cpu/reference_attention.h"
#include "engine/cuda/arena_pool.h"

namespace attnd {

struct FakeDevice {
  explicit FakeDevice(int64_t bytes) : memory(static_cast<size_t>(bytes)) {}

  bool Holds(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    return byte == nullptr || (byte >= memory.data() && byte <= memory.data() + memory.size());
  }
  std::shared_ptr<MemoryPool> MakePool() {
    return std::make_shared<ArenaPool>(static_cast<int64_t>(memory.size()), "--device-pool",
                                       ArenaMemory{memory.data(), [](std::byte*) {}});
  }

  std::vector<std::byte> memory;
  absl::Status failure;                // Of every Wait.
  bool is_wrong = false;               // Answers are.
  std::function<void()> before_build;  // Called by the thread that builds a plan.
};

class FakeDeviceQueue final : public DeviceQueue {
 public:
  explicit FakeDeviceQueue(FakeDevice& device) : device_(device) {}

  void Enqueue(std::function<void()> step) { steps_.push_back(std::move(step)); }
  absl::Status Copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    EXPECT_NE(device_.Holds(to), device_.Holds(from));
    Enqueue([=] { std::copy_n(from, bytes, to); });
    return absl::OkStatus();
  }
  absl::Status Stamp(int) override { return absl::OkStatus(); }
  absl::Status Wait() override {
    for (const auto& step : std::exchange(steps_, {})) step();
    return device_.failure;
  }
  absl::Duration Between(int first, int second) const override {
    return absl::Microseconds(100 * second + first);
  }

 private:
  FakeDevice& device_;
  std::vector<std::function<void()>> steps_;
};

class FakeDevicePlan final : public AttentionPlan {
 public:
  explicit FakeDevicePlan(FakeDevice& device) : device_(device) {}

  std::string_view engine() const override { return "fake_kernel"; }
  int64_t workspace_bytes() const override { return 1000; }
  absl::Status Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) override {
    for (const std::byte* input : buffers.inputs) EXPECT_TRUE(device_.Holds(input));
    for (const void* address :
         {static_cast<const void*>(buffers.page_table_k),
          static_cast<const void*>(buffers.page_table_v), static_cast<const void*>(buffers.out),
          static_cast<const void*>(buffers.lse),
          static_cast<const void*>(buffers.workspace.data())}) {
      EXPECT_TRUE(device_.Holds(address));
    }
    EXPECT_GE(buffers.workspace.size(), 1000u);
    // The plan may be gone when the queue runs, as a compiled graph's wrapper may.
    static_cast<FakeDeviceQueue*>(buffers.queue)
        ->Enqueue([=, is_wrong = device_.is_wrong, p = problem] {
          ForwardBuffers later = buffers;
          later.queue = nullptr;
          EXPECT_TRUE(ReferenceForward(p, later).ok());
          if (is_wrong) *reinterpret_cast<float*>(later.out) += 1000;
        });
    return absl::OkStatus();
  }

 private:
  FakeDevice& device_;
};

// Refuses FLOAT16. A plan for each max_seqlen_q.
class FakeDeviceBackend final : public AttentionBackend {
 public:
  explicit FakeDeviceBackend(FakeDevice& device) : device_(device) {}

  const BackendInfo& info() const override { return info_; }
  absl::StatusOr<std::unique_ptr<AttentionPlan>> BuildPlan(
      const AttentionProblem& problem) override {
    if (problem.dtype == DType::kFloat16) {
      return UnimplementedField(reason::kNotSupported, "spec.dtype", "is FLOAT16; FLOAT32 works");
    }
    if (!PlanIsReady(problem, Pass::kForward) && device_.before_build) device_.before_build();
    std::lock_guard lock(mutex_);
    built_.insert(problem.max_seqlen_q);
    return std::make_unique<FakeDevicePlan>(device_);
  }
  absl::StatusOr<std::unique_ptr<BackwardPlan>> BuildBackwardPlan(
      const AttentionProblem&) override {
    return UnimplementedField(reason::kNotSupported, "spec.dtype", "has no gradients here");
  }
  bool PlanIsReady(const AttentionProblem& problem, Pass) const override {
    std::lock_guard lock(mutex_);
    return problem.dtype == DType::kFloat16 || built_.contains(problem.max_seqlen_q);
  }
  absl::StatusOr<std::unique_ptr<DeviceQueue>> MakeQueue() override {
    return std::make_unique<FakeDeviceQueue>(device_);
  }

 private:
  FakeDevice& device_;
  const BackendInfo info_{.name = "fake", .devices = {{.name = "fake device"}}};
  mutable std::mutex mutex_;
  std::set<int64_t> built_;
};

}  // namespace attnd
