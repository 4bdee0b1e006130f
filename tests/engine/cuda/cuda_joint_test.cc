// Calls that run as one have the bits that they have alone. Needs a device.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "engine/core/layout.h"
#include "tests/conformance/pack.h"
#include "tests/engine/cuda/device.h"
#include "tests/engine/cuda/problems.h"

namespace attnd::testing {
namespace {

using Bytes = std::vector<std::byte>;

// Device memory in which the tensors of all calls lie, as they do in the engine's pool.
class Arena {
 public:
  Arena() {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
    memory_ = static_cast<std::byte*>(memory);
  }
  Arena(const Arena&) = delete;
  ~Arena() { cudaFree(memory_); }

  std::byte* Take(int64_t bytes) {
    std::byte* const at = memory_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    EXPECT_LE(used_, kBytes);
    return at;
  }
  std::byte* Take(const Bytes& contents) {
    std::byte* const at = Take(static_cast<int64_t>(contents.size()));
    EXPECT_EQ(cudaMemcpy(at, contents.data(), contents.size(), cudaMemcpyDefault), cudaSuccess);
    return at;
  }

 private:
  static constexpr int64_t kBytes = int64_t{512} << 20;

  std::byte* memory_ = nullptr;
  int64_t used_ = 0;
};

// What a call writes.
struct Output {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

void Poison(const std::vector<Output>& outputs) {
  for (const Output& o : outputs) ASSERT_EQ(cudaMemset(o.data, 0xFF, o.bytes), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

std::vector<Bytes> Read(const std::vector<Output>& outputs) {
  std::vector<Bytes> all;
  for (const Output& o : outputs) {
    Bytes& bytes = all.emplace_back(static_cast<size_t>(o.bytes));
    EXPECT_EQ(cudaMemcpy(bytes.data(), o.data, bytes.size(), cudaMemcpyDefault), cudaSuccess);
  }
  return all;
}

class Joint : public ::testing::Test {
 protected:
  struct Made {
    AttentionProblem problem;
    std::unique_ptr<AttentionPlan> forward;
    std::unique_ptr<BackwardPlan> backward;
    ForwardBuffers f;
    BackwardBuffers b;
  };

  Bytes Random(int64_t elements) {
    Bytes bytes(static_cast<size_t>(elements * 2));
    for (int64_t i = 0; i < elements; ++i) {
      StoreElement(DType::kBFloat16, bytes.data(), i, normal_(random_));
    }
    return bytes;
  }

  int64_t Draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  // A batch of 1 to 3 with lengths from 0 to `longest`.
  Geometry DrawGeometry(Layout layout, int64_t longest, int64_t kv_heads) {
    std::vector<int64_t> q, kv;
    for (int64_t n = Draw(1, 3); n > 0; --n) {
      q.push_back(Draw(0, longest));
      kv.push_back(Draw(0, longest));
    }
    if (IsPackedQkv(layout)) kv = q;
    const int64_t s_q = std::max<int64_t>(1, *std::max_element(q.begin(), q.end()));
    const int64_t s_kv = std::max<int64_t>(1, *std::max_element(kv.begin(), kv.end()));
    Geometry g = LengthsOf(q, kv, s_q, s_kv);
    g.g = kv_heads;
    g.d_qk = g.d_v = 64;
    return g;
  }

  static bool IsPackedQkv(Layout layout) {
    return layout == Layout::kBs3hd || layout == Layout::kT3hd;
  }

  template <typename Edit>
  void Add(Layout layout, const Geometry& g, Edit edit) {
    PackedRequest request =
        Pack(ArrangementOf(layout), g,
             {DType::kBFloat16,
              {Random(g.q_row.back() * g.h * g.d_qk), Random(g.kv_row.back() * g.g * g.d_qk),
               Random(g.kv_row.back() * g.g * g.d_v)}},
             {.explicit_sizes = true});
    edit(request.spec);
    absl::StatusOr<AttentionProblem> problem =
        Resolve(request.spec, request.sequences, request.inputs);
    ASSERT_TRUE(problem.ok()) << problem.status();
    Made& made = *calls_.emplace_back(std::make_unique<Made>());
    made.problem = *std::move(problem);
    made.forward = *backend_->BuildPlan(made.problem);
    made.backward = *backend_->BuildBackwardPlan(made.problem);
    Place(request, made);
  }

  void Place(const PackedRequest& request, Made& made) {
    const AttentionProblem& p = made.problem;
    auto output = [&](std::vector<Output>& of, int64_t bytes) {
      return of.emplace_back(Output{arena_.Take(bytes), bytes}).data;
    };
    for (size_t i = 0; i < p.inputs.size(); ++i) {
      if (!p.inputs[i]) continue;
      made.f.inputs[i] = arena_.Take(request.buffers[i]);
      made.b.grads[i] = output(backward_, *NumBytes(*p.inputs[i]));
    }
    made.f.out = output(forward_, *NumBytes(p.out_desc));
    made.f.lse = reinterpret_cast<float*>(output(forward_, *NumBytes(p.lse_desc)));
    made.f.queue = queue_.get();
    made.f.workspace = Scratch(made.forward->workspace_bytes());
    made.b.inputs = made.f.inputs;
    made.b.out = made.f.out;
    made.b.lse = made.f.lse;
    made.b.d_out = arena_.Take(Random(*NumElements(p.out_desc.shape)));
    made.b.queue = queue_.get();
    made.b.workspace = Scratch(made.backward->workspace_bytes());
  }

  std::span<std::byte> Scratch(int64_t bytes) {
    return {arena_.Take(bytes), static_cast<size_t>(bytes)};
  }

  void Run(JointRun* run) {
    ASSERT_NE(run, nullptr);
    const absl::Status status = run->Run(Scratch(run->workspace_bytes()), queue_.get());
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(queue_->Wait().ok());
  }

  // Every plan has the first one's key, and together the calls fit.
  template <typename PlanOf>
  void ExpectJoins(PlanOf plan_of) {
    const JoinTerms first = plan_of(*calls_[0])->join_terms();
    EXPECT_FALSE(first.key.empty());
    int64_t slots = 0;
    for (const auto& call : calls_) {
      const JoinTerms terms = plan_of(*call)->join_terms();
      EXPECT_EQ(terms.key, first.key);
      slots += terms.slots;
    }
    EXPECT_LE(slots, first.max_slots);
  }

  void ExpectTheBitsOfEachAlone() {
    ExpectJoins([](Made& m) { return m.forward.get(); });
    Poison(forward_);
    std::vector<ForwardCall> f;
    for (const auto& call : calls_) {
      const absl::Status status = call->forward->Forward(call->problem, call->f);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_TRUE(queue_->Wait().ok());
      f.push_back({&call->problem, call->f});
    }
    const std::vector<Bytes> alone = Read(forward_);
    Poison(forward_);
    Run(calls_[0]->forward->Join(f).get());
    EXPECT_TRUE(Read(forward_) == alone);

    ExpectJoins([](Made& m) { return m.backward.get(); });
    Poison(backward_);
    std::vector<BackwardCall> b;
    for (const auto& call : calls_) {
      const absl::Status status = call->backward->Backward(call->problem, call->b);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_TRUE(queue_->Wait().ok());
      b.push_back({&call->problem, call->b});
    }
    const std::vector<Bytes> gradients = Read(backward_);
    Poison(backward_);
    Run(calls_[0]->backward->Join(b).get());
    EXPECT_TRUE(Read(backward_) == gradients);
  }

  std::mt19937 random_{11};
  std::normal_distribution<float> normal_;
  const std::unique_ptr<AttentionBackend> backend_ = MakeBackend();
  const std::unique_ptr<DeviceQueue> queue_ = *backend_->MakeQueue();
  Arena arena_;
  std::vector<std::unique_ptr<Made>> calls_;
  std::vector<Output> forward_, backward_;
};

void Plain(AttentionSpec&) {}

TEST_F(Joint, DenseAndRaggedCallsOfAnyLengths) {
  for (int i = 0; i < 16; ++i) {
    const Layout layout = i % 2 == 0 ? Layout::kBshdBshdBshd : Layout::kThdThdThd;
    Add(layout, DrawGeometry(layout, 200, 2), Plain);
  }
  ExpectTheBitsOfEachAlone();
}

TEST_F(Joint, MasksFromEitherEnd) {
  for (Causal causal : {Causal::kTopLeft, Causal::kBottomRight}) {
    calls_.clear();
    forward_.clear();
    backward_.clear();
    for (int i = 0; i < 12; ++i) {
      const Layout layout = i % 3 == 0 ? Layout::kBshdBshdBshd : Layout::kThdThdThd;
      Add(layout, DrawGeometry(layout, 130, 4), [&](AttentionSpec& spec) {
        spec.causal = causal;
        spec.window_left = 40;
      });
    }
    ExpectTheBitsOfEachAlone();
  }
}

TEST_F(Joint, PackedBuffersOfTwoForms) {
  for (int i = 0; i < 10; ++i) {
    const Layout layout = i % 2 == 0 ? Layout::kBs3hd : Layout::kT3hd;
    Add(layout, DrawGeometry(layout, 250, 4), Plain);
  }
  ExpectTheBitsOfEachAlone();
}

TEST_F(Joint, AWholeLaunchOfEqualCalls) {
  for (int i = 0; i < 64; ++i) {
    Geometry g = LengthsOf({128}, {128}, 128, 128);
    g.h = g.g = 16;
    g.d_qk = g.d_v = 64;
    Add(Layout::kBshdBshdBshd, g, [](AttentionSpec& spec) { spec.causal = Causal::kTopLeft; });
  }
  ExpectTheBitsOfEachAlone();
}

TEST_F(Joint, LongerCallsHaveAClassOfTheirOwn) {
  for (int i = 0; i < 3; ++i) {
    Add(Layout::kThdThdThd, LengthsOf({700 + i}, {900 - i}, 1024, 1024), Plain);
  }
  ExpectTheBitsOfEachAlone();
}

}  // namespace
}  // namespace attnd::testing
