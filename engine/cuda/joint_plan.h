// Plans of small calls, on a graph that calls of one spec share (joint_description.h). A call runs
// on it alone, too, so that its bits do not depend on its company.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "engine/backend/attention_plan.h"
#include "engine/cuda/sdpa_description.h"
#include "engine/cuda/sdpa_graph.h"

namespace attnd {

// The graph, and what of it the key says.
struct JointGraph {
  SdpaDescription description;  // DescribeJoint's.
  std::shared_ptr<const SdpaGraph> graph;
};

class JointForwardPlan final : public AttentionPlan {
 public:
  JointForwardPlan(const AttentionProblem& problem, JointGraph graph);

  std::string_view engine() const override { return EngineName(graph_.description); }
  int64_t workspace_bytes() const override { return workspace_bytes_; }
  JoinTerms join_terms() const override { return terms_; }

  // As of CudnnPlan: the queue's small pinned memory is used.
  absl::Status Forward(const AttentionProblem& problem, const ForwardBuffers& buffers) override;
  std::unique_ptr<JointRun> Join(std::span<const ForwardCall> calls) override;

 private:
  const JointGraph graph_;
  const JoinTerms terms_;
  const int64_t workspace_bytes_;
};

class JointBackwardPlan final : public BackwardPlan {
 public:
  JointBackwardPlan(const AttentionProblem& problem, JointGraph graph);

  std::string_view engine() const override { return EngineName(graph_.description); }
  int64_t workspace_bytes() const override { return workspace_bytes_; }
  JoinTerms join_terms() const override { return terms_; }

  absl::Status Backward(const AttentionProblem& problem, const BackwardBuffers& buffers) override;
  std::unique_ptr<JointRun> Join(std::span<const BackwardCall> calls) override;

 private:
  const JointGraph graph_;
  const JoinTerms terms_;
  const int64_t workspace_bytes_;
};

}  // namespace attnd
