#include "client/cli/local_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "client/cli/request.h"

namespace attnd::cli {
namespace {

// One query of two keys with equal logits: O is the mean of V, LSE is ln 2.
class LocalCheck : public ::testing::Test {
 protected:
  LocalCheck() {
    v1::AttentionSpec& spec = *call_.request.mutable_spec();
    spec.set_layout(v1::QKV_LAYOUT_BSHD_BSHD_BSHD);
    spec.set_dtype(v1::DATA_TYPE_FLOAT32);
    call_.request.set_return_lse(true);
    v1::QkvBuffers* inputs = call_.request.mutable_inputs();
    *inputs->mutable_q() = Add(2, {1, 1, 1, 2}, {0, 0});
    *inputs->mutable_k() = Add(4, {1, 2, 1, 2}, {1, 2, 3, 4});
    *inputs->mutable_v() = Add(5, {1, 2, 1, 2}, {1, 10, 3, 20});
    Set({2, 15}, std::log(2.0f));
  }

  v1::Tensor Add(int field, std::vector<int64_t> shape, const std::vector<float>& values) {
    HostTensor tensor = *MakeTensor(v1::DATA_TYPE_FLOAT32, std::move(shape));
    for (size_t i = 0; i < values.size(); ++i) {
      StoreFloat(tensor.dtype, tensor.data.get(), static_cast<int64_t>(i), values[i]);
    }
    v1::Tensor message = Describe(tensor);
    call_.tensors.emplace(field, std::move(tensor));
    return message;
  }

  // What the server answers.
  void Set(const std::vector<float>& out, float lse) {
    *reply_.mutable_out() = Reply({1, 1, 1, 2}, out);
    *reply_.mutable_lse() = Reply({1, 1, 1}, {lse});
  }

  static v1::Tensor Reply(const std::vector<int64_t>& shape, const std::vector<float>& values) {
    v1::Tensor tensor;
    tensor.set_dtype(v1::DATA_TYPE_FLOAT32);
    tensor.mutable_shape()->Add(shape.begin(), shape.end());
    tensor.set_data(values.data(), values.size() * sizeof(float));
    return tensor;
  }

  absl::StatusOr<CheckResult> Check() { return CheckForward(call_.request, call_.tensors, reply_); }

  ForwardCall call_;
  v1::ForwardResponse reply_;
};

TEST_F(LocalCheck, PassesTheRightAnswer) {
  const auto result = Check();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->passed);
  EXPECT_LT(result->out_error, 1e-7);
  EXPECT_LT(*result->lse_error, 1e-7);
  EXPECT_DOUBLE_EQ(result->out_bound, 1e-6 * std::sqrt(2.0));
}

TEST_F(LocalCheck, FailsAWrongOutput) {
  Set({2, 15.1f}, std::log(2.0f));
  const auto result = Check();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->passed);
  EXPECT_NEAR(result->out_error, 0.1 / std::sqrt(2 * 2 + 15 * 15), 1e-5);
}

TEST_F(LocalCheck, FailsAWrongLseAndNaN) {
  Set({2, 15}, 1);
  EXPECT_FALSE(Check()->passed);
  Set({2, 15}, -std::numeric_limits<float>::infinity());
  EXPECT_FALSE(Check()->passed);
  Set({2, 15}, std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(Check()->passed);
  Set({2, std::numeric_limits<float>::quiet_NaN()}, std::log(2.0f));
  EXPECT_FALSE(Check()->passed);
}

TEST_F(LocalCheck, IgnoresTheLseThatWasNotAskedFor) {
  call_.request.set_return_lse(false);
  reply_.clear_lse();
  const auto result = Check();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->passed);
  EXPECT_FALSE(result->lse_error.has_value());
}

TEST_F(LocalCheck, MaskedRowsMeetMinusInfinity) {
  v1::Sequences* sequences = call_.request.mutable_sequences();
  for (int64_t end : {0, 1}) sequences->add_cu_seqlens_q(end);
  for (int64_t end : {0, 0}) sequences->add_cu_seqlens_kv(end);
  Set({0, 0}, -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(Check()->passed);
  Set({0, 0}, 0);
  EXPECT_FALSE(Check()->passed);
}

TEST_F(LocalCheck, RefusesRepliesOfAnotherShape) {
  *reply_.mutable_out() = Reply({1, 1, 2, 1}, {2, 15});
  EXPECT_EQ(Check().status().code(), absl::StatusCode::kInternal);
  *reply_.mutable_out() = Reply({1, 1, 1, 2}, {2});
  EXPECT_EQ(Check().status().code(), absl::StatusCode::kInternal);
}

TEST_F(LocalCheck, BoundsFollowTheType) {
  for (const auto& [dtype, bound] :
       {std::pair{v1::DATA_TYPE_FLOAT16, 2e-3}, std::pair{v1::DATA_TYPE_BFLOAT16, 1.5e-2},
        std::pair{v1::DATA_TYPE_FLOAT8_E4M3, 4e-2}, std::pair{v1::DATA_TYPE_FLOAT8_E5M2, 8e-2}}) {
    RequestOptions options;
    options.layout = "BS3HD";
    options.dtype = ShortName(dtype);
    options.batch = options.heads = options.kv_heads = options.seqlen_q = options.seqlen_kv = 1;
    options.head_dim = options.head_dim_v = 2;
    options.random = true;
    const auto call = MakeForwardCall(options);
    ASSERT_TRUE(call.ok()) << call.status();
    // One key: O is V, the last of the three.
    const HostTensor& qkv = call->tensors.at(1);
    v1::ForwardResponse reply;
    reply.mutable_out()->set_dtype(dtype);
    for (int64_t dim : {1, 1, 1, 2}) reply.mutable_out()->add_shape(dim);
    const auto size = static_cast<size_t>(SizeOf(dtype));
    reply.mutable_out()->set_data(qkv.data.get() + 4 * size, 2 * size);
    const auto result = CheckForward(call->request, call->tensors, reply);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->passed);
    EXPECT_EQ(result->out_error, 0);
    EXPECT_EQ(result->out_bound, bound);
  }
}

// The same two keys, with a bias that changes nothing, and dO = (1, 1).
class LocalGradientCheck : public LocalCheck {
 protected:
  LocalGradientCheck() {
    v1::AttentionSpec& spec = *call_.request.mutable_spec();
    spec.set_scale(1);
    spec.set_bias_kind(v1::BIAS_KIND_POST_SCALE);
    *call_.request.mutable_bias() = Add(kBiasSlot, {1, 1, 1, 2}, {3, 3});
    CallTensors results;
    results.emplace(kOutSlot, call_.tensors.at(2));
    results.emplace(kLseSlot, call_.tensors.at(2));
    HostTensor d_out = *MakeTensor(v1::DATA_TYPE_FLOAT32, {1, 1, 1, 2});
    for (int i : {0, 1}) StoreFloat(d_out.dtype, d_out.data.get(), i, 1);
    results.emplace(kOutGradientSlot, d_out);
    backward_ = MakeBackwardCall(call_, results);
    // dP = (11, 23), P = (1/2, 1/2), D = 17, dx = (-3, 3); dQ = dx K, dK = dx Q, dV = P dO.
    v1::QkvBuffers* grads = gradients_.mutable_grads();
    *grads->mutable_q() = Reply({1, 1, 1, 2}, {6, 6});
    *grads->mutable_k() = Reply({1, 2, 1, 2}, {0, 0, 0, 0});
    *grads->mutable_v() = Reply({1, 2, 1, 2}, {0.5, 0.5, 0.5, 0.5});
    *gradients_.mutable_d_bias() = Reply({1, 1, 1, 2}, {-3, 3});
  }

  absl::StatusOr<GradientCheck> CheckGradients() {
    return CheckBackward(backward_.request, backward_.tensors, gradients_);
  }

  BackwardCall backward_;
  v1::BackwardResponse gradients_;
};

TEST_F(LocalGradientCheck, PassesTheRightAnswer) {
  const auto result = CheckGradients();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->passed);
  EXPECT_EQ(result->bound, 3e-5);
  ASSERT_EQ(result->gradients.size(), 4u);
  EXPECT_EQ(result->gradients[3].slot, kBiasSlot);
  for (const GradientError& gradient : result->gradients) EXPECT_LT(gradient.error, 1e-7);
}

TEST_F(LocalGradientCheck, FailsEachWrongGradient) {
  for (v1::Tensor* tensor :
       {gradients_.mutable_grads()->mutable_q(), gradients_.mutable_grads()->mutable_k(),
        gradients_.mutable_grads()->mutable_v(), gradients_.mutable_d_bias()}) {
    for (float wrong : {0.25f, std::numeric_limits<float>::quiet_NaN()}) {
      const std::string data = tensor->data();
      std::string changed = data;
      changed.replace(4, 4, reinterpret_cast<const char*>(&wrong), 4);
      tensor->set_data(changed);
      const auto result = CheckGradients();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_FALSE(result->passed);
      tensor->set_data(data);
    }
  }
}

TEST_F(LocalGradientCheck, SmallGradientsAreHeldToAnAbsoluteBound) {
  // dK is 0: an error counts relative to 0.1.
  *gradients_.mutable_grads()->mutable_k() = Reply({1, 2, 1, 2}, {1e-3f, 1e-3f, -1e-3f, 1e-3f});
  const auto result = CheckGradients();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(result->gradients[1].error, 1e-2, 1e-6);
}

TEST_F(LocalGradientCheck, RefusesRepliesThatLackAGradientOrItsShape) {
  gradients_.clear_d_bias();
  EXPECT_EQ(CheckGradients().status().code(), absl::StatusCode::kInternal);
  *gradients_.mutable_d_bias() = Reply({1, 1, 2}, {-3, 3});
  EXPECT_EQ(CheckGradients().status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace attnd::cli
