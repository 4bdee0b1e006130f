#include "tests/engine/cpu/gradient_case.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>

#include "engine/cpu/cpu_backend.h"
#include "tests/engine/cpu/random_elements.h"

namespace attnd::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::byte> Poisoned(const TensorDesc& desc) {
  return std::vector<std::byte>(static_cast<size_t>(*NumBytes(desc)), std::byte{0xFF});
}

// A workspace of NaN, 64-byte aligned.
class Workspace {
 public:
  explicit Workspace(int64_t size)
      : size_(static_cast<size_t>(size)), storage_(size_ + 64, std::byte{0xFF}) {}
  std::span<std::byte> bytes() {
    void* start = storage_.data();
    size_t space = storage_.size();
    return {static_cast<std::byte*>(std::align(64, size_, start, space)), size_};
  }

 private:
  size_t size_;
  std::vector<std::byte> storage_;
};

// The published slopes of a power of two of heads.
std::vector<double> Slopes(int64_t heads) {
  std::vector<double> slopes;
  for (int64_t n = 1; n <= heads; ++n) {
    slopes.push_back(std::exp2(-8.0 * static_cast<double>(n) / static_cast<double>(heads)));
  }
  return slopes;
}

void SetBias(const GradientOptions& o, AttentionProblem& p) {
  p.bias_kind = o.bias_kind;
  if (o.bias_kind == BiasKind::kAlibi) p.alibi_slopes = Slopes(p.num_heads);
  if (o.bias_kind != BiasKind::kPreScale && o.bias_kind != BiasKind::kPostScale) return;
  const int64_t rows = o.bias_per_row ? p.max_seqlen_q : 1;
  const int64_t heads = o.bias_per_head ? p.num_heads : 1;
  const int64_t cells = rows * p.max_seqlen_kv;
  p.bias = TensorDesc{p.dtype, {o.bias_per_sequence ? p.batch : 1, heads, rows, p.max_seqlen_kv}};
  p.bias_strides = {.batch = o.bias_per_sequence ? heads * cells : 0,
                    .seq = o.bias_per_row ? p.max_seqlen_kv : 0,
                    .head = o.bias_per_head ? cells : 0,
                    .dim = 1};
}

}  // namespace

GradientCase::GradientCase(const GradientOptions& options) : case_(options.shape) {
  AttentionProblem& p = case_.problem();
  SetBias(options, p);
  p.softmax_kind = options.softmax_kind;
  p.dropout = options.dropout;
  const uint64_t seed = options.shape.seed;
  if (p.bias) bias_ = Random(*NumElements(p.bias->shape), seed + 1);
  if (p.softmax_kind == SoftmaxKind::kLearnable) {
    p.softmax_offset = TensorDesc{DType::kFloat32, {p.num_heads}};
    softmax_offset_ = Random(p.num_heads, seed + 2);
  }
  const std::vector<float> random = Random(*NumElements(p.out_desc.shape), seed + 3);
  d_out_.assign(random.size(), kNan);
  ForEachRow([&](int64_t i, int64_t j, int64_t n) {
    for (int64_t c = 0; c < p.head_dim_v; ++c) {
      const auto at = static_cast<size_t>(case_.OutIndex(i, j, n, c));
      d_out_[at] = random[at];
    }
  });
}

void GradientCase::ForEachRow(const std::function<void(int64_t, int64_t, int64_t)>& visit) const {
  const AttentionProblem& p = problem();
  for (int64_t i = 0; i < p.batch; ++i) {
    for (int64_t j = 0; j < p.sequences[static_cast<size_t>(i)].q_len; ++j) {
      for (int64_t n = 0; n < p.num_heads; ++n) visit(i, j, n);
    }
  }
}

Output GradientCase::ForwardAsReturned() const {
  ReferenceBackend reference;
  const Output forward = Forward(reference);
  Output returned{std::vector<float>(forward.out.size(), kNan),
                  std::vector<float>(forward.lse.size(), kNan)};
  ForEachRow([&](int64_t i, int64_t j, int64_t n) {
    for (int64_t c = 0; c < problem().head_dim_v; ++c) {
      const auto at = static_cast<size_t>(case_.OutIndex(i, j, n, c));
      returned.out[at] = forward.out[at];
    }
    const auto at = static_cast<size_t>(case_.LseIndex(i, j, n));
    returned.lse[at] = forward.lse[at];
  });
  return returned;
}

Output GradientCase::Forward(AttentionBackend& backend) const {
  const AttentionProblem& p = problem();
  auto plan = backend.BuildPlan(p);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return {};
  std::vector<std::byte> out = Poisoned(p.out_desc), lse = Poisoned(p.lse_desc);
  const std::vector<std::byte> bias = Narrow(p.dtype, bias_);
  Workspace workspace((*plan)->workspace_bytes());
  ForwardBuffers buffers = case_.Inputs();
  buffers.bias = bias.data();
  buffers.softmax_offset = softmax_offset_.data();
  buffers.out = out.data();
  buffers.lse = reinterpret_cast<float*>(lse.data());
  buffers.workspace = workspace.bytes();
  const absl::Status status = (*plan)->Forward(p, buffers);
  EXPECT_TRUE(status.ok()) << status;
  return {Widen(p.out_dtype, out), Widen(DType::kFloat32, lse)};
}

Gradients GradientCase::Backward(AttentionBackend& backend) const {
  const AttentionProblem& p = problem();
  auto plan = backend.BuildBackwardPlan(p);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return {};
  const Output forward = ForwardAsReturned();
  const std::vector<std::byte> out = Narrow(p.out_dtype, forward.out);
  const std::vector<std::byte> d_out = Narrow(p.out_dtype, d_out_);
  const std::vector<std::byte> bias = Narrow(p.dtype, bias_);
  std::array<std::vector<std::byte>, kNumInputBuffers> grads;
  std::vector<std::byte> d_bias, d_softmax_offset;
  BackwardBuffers buffers;
  buffers.inputs = case_.Inputs().inputs;
  buffers.bias = bias.data();
  buffers.softmax_offset = softmax_offset_.data();
  buffers.out = out.data();
  buffers.lse = forward.lse.data();
  buffers.d_out = d_out.data();
  for (size_t k = 0; k < grads.size(); ++k) {
    if (!p.inputs[k]) continue;
    grads[k] = Poisoned(*p.inputs[k]);
    buffers.grads[k] = grads[k].data();
  }
  if (p.bias) d_bias = Poisoned(*p.bias);
  if (p.softmax_offset) d_softmax_offset = Poisoned(*p.softmax_offset);
  buffers.d_bias = d_bias.data();
  buffers.d_softmax_offset = reinterpret_cast<float*>(d_softmax_offset.data());
  Workspace workspace((*plan)->workspace_bytes());
  buffers.workspace = workspace.bytes();
  const absl::Status status = (*plan)->Backward(p, buffers);
  EXPECT_TRUE(status.ok()) << status;

  Gradients gradients;
  for (size_t k = 0; k < grads.size(); ++k) gradients.inputs[k] = Widen(p.dtype, grads[k]);
  gradients.bias = Widen(p.dtype, d_bias);
  gradients.softmax_offset = Widen(DType::kFloat32, d_softmax_offset);
  return gradients;
}

float GradientCase::GradientAt(const Gradients& gradients, const TensorView& view,
                               const std::array<int64_t, 4>& at) const {
  const AttentionProblem& p = problem();
  const auto& [i, j, n, c] = at;
  const SequenceExtent& extent = p.sequences[static_cast<size_t>(i)];
  const int64_t row = view.buffer == Buffer::kQ ? extent.q_row : extent.kv_row;
  const int64_t element = view.byte_offset / SizeOf(p.dtype) + i * view.strides.batch +
                          row * view.start_multiplier + j * view.strides.seq +
                          n * view.strides.head + c * view.strides.dim;
  return gradients.inputs[static_cast<size_t>(view.buffer)].at(static_cast<size_t>(element));
}

double GradientCase::Loss(AttentionBackend& backend) const {
  const Output output = Forward(backend);
  double loss = 0;
  ForEachRow([&](int64_t i, int64_t j, int64_t n) {
    for (int64_t c = 0; c < problem().head_dim_v; ++c) {
      const auto at = static_cast<size_t>(case_.OutIndex(i, j, n, c));
      loss += static_cast<double>(d_out_[at]) * output.out[at];
    }
  });
  return loss;
}

}  // namespace attnd::testing
