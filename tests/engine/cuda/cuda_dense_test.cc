// Every parameter in both passes against the CPU, on full batches of round lengths: the golden
// problems are too short for cuDNN's dense kernels. Needs a device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <iostream>
#include <map>
#include <random>

#include "engine/core/layout.h"
#include "engine/cpu/cpu_backend.h"
#include "tests/conformance/conformance.h"
#include "tests/engine/cuda/device.h"
#include "tests/engine/cuda/on_device.h"

namespace attnd::testing {
namespace {

struct Shape {
  int64_t b, h, g, s_q, s_kv, d_qk, d_v;
};

struct Feature {
  std::string name;
  std::function<void(AttentionSpec&)> set = [](AttentionSpec&) {};
  std::string bias_shape = {};  // "1hss" and so on.
};

std::vector<Feature> Features() {
  auto causal = [](Causal kind) { return [kind](AttentionSpec& spec) { spec.causal = kind; }; };
  auto window = [](Alignment alignment) {
    return [alignment](AttentionSpec& spec) {
      spec.window_left = 70;
      spec.window_right = 9;
      spec.window_alignment = alignment;
    };
  };
  std::vector<Feature> features{
      {"plain"},
      {"causal_tl", causal(Causal::kTopLeft)},
      {"causal_br", causal(Causal::kBottomRight)},
      {"window_tl", window(Alignment::kTopLeft)},
      {"window_br", window(Alignment::kBottomRight)},
      {"scale", [](AttentionSpec& spec) { spec.scale = -0.4; }},
      {"softcap", [](AttentionSpec& spec) { spec.logit_softcap = 1.5; }},
      {"deterministic",
       [](AttentionSpec& spec) {
         spec.causal = Causal::kTopLeft;
         spec.deterministic = true;
       }},
      {"alibi",
       [](AttentionSpec& spec) {
         spec.causal = Causal::kTopLeft;
         spec.bias_kind = BiasKind::kAlibi;
       }},
      {"alibi_br",
       [](AttentionSpec& spec) {
         spec.causal = Causal::kBottomRight;
         spec.bias_kind = BiasKind::kAlibi;
       }},
      {"dropout",
       [](AttentionSpec& spec) {
         spec.dropout = Dropout{0.3, 5, 6};
       }},
  };
  for (SoftmaxKind kind : {SoftmaxKind::kOffByOne, SoftmaxKind::kLearnable}) {
    for (Causal mask : {Causal::kNone, Causal::kBottomRight}) {
      features.push_back(
          {kind == SoftmaxKind::kLearnable ? "sinks" : "off_by_one", [=](AttentionSpec& spec) {
             spec.softmax_kind = kind;
             spec.causal = mask;
           }});
    }
  }
  for (BiasKind kind : {BiasKind::kPreScale, BiasKind::kPostScale}) {
    for (const char* shape : {"11ss", "1hss", "b1ss", "bhss", "111s"}) {
      for (Causal mask : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
        for (bool deterministic : {false, true}) {
          if (deterministic && mask != Causal::kNone) continue;
          features.push_back({std::string(kind == BiasKind::kPreScale ? "pre" : "post") + shape,
                              [=](AttentionSpec& spec) {
                                spec.bias_kind = kind;
                                spec.causal = mask;
                                spec.deterministic = deterministic;
                              },
                              shape});
        }
      }
    }
  }
  return features;
}

class Numbers {
 public:
  std::vector<std::byte> operator()(const TensorDesc& desc) {
    std::vector<std::byte> bytes(static_cast<size_t>(*NumBytes(desc)));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < *NumElements(desc.shape); ++i) {
      StoreElement(desc.dtype, bytes.data(), i, normal(random_));
    }
    return bytes;
  }

 private:
  std::mt19937 random_{7};
};

PackedRequest MakeRequest(const Shape& s, Layout layout, DType dtype, const Feature& feature,
                          Numbers& numbers) {
  PackedRequest request;
  request.spec.layout = layout;
  request.spec.dtype = dtype;
  feature.set(request.spec);
  auto set = [&](Buffer buffer, std::vector<int64_t> shape) {
    const TensorDesc desc{dtype, std::move(shape)};
    request.inputs.buffers[static_cast<size_t>(buffer)] = desc;
    request.buffers[static_cast<size_t>(buffer)] = numbers(desc);
  };
  switch (layout) {
    case Layout::kBs3hd: set(Buffer::kQkv, {s.b, s.s_q, 3, s.h, s.d_qk}); break;
    case Layout::kBshdBs2hd:
      set(Buffer::kQ, {s.b, s.s_q, s.h, s.d_qk});
      set(Buffer::kKv, {s.b, s.s_kv, 2, s.g, s.d_qk});
      break;
    case Layout::kBhsdBhsdBhsd:
      set(Buffer::kQ, {s.b, s.h, s.s_q, s.d_qk});
      set(Buffer::kK, {s.b, s.g, s.s_kv, s.d_qk});
      set(Buffer::kV, {s.b, s.g, s.s_kv, s.d_v});
      break;
    default:
      set(Buffer::kQ, {s.b, s.s_q, s.h, s.d_qk});
      set(Buffer::kK, {s.b, s.s_kv, s.g, s.d_qk});
      set(Buffer::kV, {s.b, s.s_kv, s.g, s.d_v});
  }
  if (!feature.bias_shape.empty()) {
    const TensorDesc desc{
        dtype,
        {feature.bias_shape[0] == 'b' ? s.b : 1, feature.bias_shape[1] == 'h' ? s.h : 1,
         feature.bias_shape[2] == 's' ? s.s_q : 1, s.s_kv}};
    request.inputs.bias = desc;
    request.bias = numbers(desc);
  }
  if (request.spec.softmax_kind == SoftmaxKind::kLearnable) {
    request.inputs.softmax_offset = TensorDesc{DType::kFloat32, {s.h}};
    request.softmax_offset = numbers(*request.inputs.softmax_offset);
  }
  return request;
}

const BackendUnderTest& Host() {
  constexpr std::align_val_t kAlignment{64};
  static const BackendUnderTest backend{
      .name = "cpu",
      .make = [] { return std::make_unique<CpuBackend>(16); },
      .allocate =
          [](size_t size) { return static_cast<std::byte*>(operator new(size, kAlignment)); },
      .release = [](std::byte* memory) { operator delete(memory, kAlignment); },
      .copy = [](std::byte* to, const std::byte* from,
                 size_t size) { std::memcpy(to, from, size); },
  };
  return backend;
}

// RMS of the difference over the larger of the RMS of `want` and 0.1; infinite where `got` is not
// finite.
double Difference(DType dtype, const std::vector<std::byte>& got,
                  const std::vector<std::byte>& want) {
  if (want.empty()) return 0;
  const int64_t count = static_cast<int64_t>(want.size()) / SizeOf(dtype);
  double error = 0, reference = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double g = LoadElement(dtype, got.data(), i), w = LoadElement(dtype, want.data(), i);
    error += std::isfinite(g) ? (g - w) * (g - w) : INFINITY;
    reference += w * w;
  }
  return std::sqrt(error / count) / std::max(std::sqrt(reference / count), 0.1);
}

// Of two LSE; rows that see nothing have -inf in both.
double LargestDifference(const std::vector<std::byte>& got, const std::vector<std::byte>& want) {
  double largest = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(want.size() / sizeof(float)); ++i) {
    const double g = LoadElement(DType::kFloat32, got.data(), i);
    const double w = LoadElement(DType::kFloat32, want.data(), i);
    if (g == w) continue;
    const double difference = std::abs(g - w) / std::max(1.0, std::abs(w));
    largest = std::isnan(difference) ? INFINITY : std::max(largest, difference);
  }
  return largest;
}

double Bound(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return 8e-3;
    case DType::kBFloat16: return 3e-2;
    // cuDNN rounds S and dP to FP8 as well.
    case DType::kFloat8E4M3: return 1e-1;
    default: return 2e-1;
  }
}

class CudaDense : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const auto& [engine, count] : engines_) {
      std::cout << "engine\t" << count << "\tdense problems, " << engine << "\n";
    }
  }

  void Check(const Shape& s, Layout layout, DType dtype, const Feature& feature) {
    CheckRequest(MakeRequest(s, layout, dtype, feature, numbers_), Bound(dtype), feature.name);
  }

  // Both passes on both backends. `bound` is of gradients.
  void CheckRequest(PackedRequest request, double bound, const std::string& name) {
    SCOPED_TRACE(name);
    const DType dtype = request.spec.dtype;
    const auto problem = Resolve(request.spec, request.sequences, request.inputs);
    ASSERT_TRUE(problem.ok()) << problem.status();
    const auto want = RunForward(Host(), **cpu_.BuildPlan(*problem), *problem, request);
    const auto plan = cuda_->BuildPlan(*problem);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ++engines_["forward: " + std::string((*plan)->engine())];
    const auto got = RunForward(OnDevice(), **plan, *problem, request);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_LE(Difference(dtype, got->out, want->out), Bound(dtype) / 2)
        << "O, " << (*plan)->engine();
    EXPECT_LE(LargestDifference(got->lse, want->lse), 1e-2) << "LSE";
    EXPECT_LE(Difference(DType::kFloat32, got->amax, want->amax), Bound(dtype)) << "amax";

    BackwardRequest sent{std::move(request), want->out, want->lse, numbers_(problem->out_desc)};
    const auto wanted = RunBackward(Host(), **cpu_.BuildBackwardPlan(*problem), *problem, sent);
    const auto backward = cuda_->BuildBackwardPlan(*problem);
    ASSERT_TRUE(backward.ok()) << backward.status();
    const std::string engine((*backward)->engine());
    ++engines_["backward: " + engine];
    const auto grads = RunBackward(OnDevice(), **backward, *problem, sent);
    ASSERT_TRUE(grads.ok()) << grads.status();
    for (size_t i = 0; i < grads->grads.size(); ++i) {
      if (grads->grads[i].empty()) continue;
      EXPECT_LE(Difference(dtype, grads->grads[i], wanted->grads[i]), bound) << i << ", " << engine;
    }
    EXPECT_LE(Difference(DType::kFloat32, grads->amax, wanted->amax), bound) << "amax, " << engine;
    if (!grads->d_bias.empty()) {
      EXPECT_LE(Difference(dtype, grads->d_bias, wanted->d_bias), bound) << "dBias, " << engine;
    }
    if (!grads->d_softmax_offset.empty()) {
      EXPECT_LE(Difference(DType::kFloat32, grads->d_softmax_offset, wanted->d_softmax_offset),
                bound)
          << "dSoftmaxOffset, " << engine;
    }
    if (!problem->deterministic) return;
    const auto again = RunBackward(OnDevice(), **backward, *problem, sent);
    EXPECT_TRUE(again.ok() && again->grads == grads->grads && again->d_bias == grads->d_bias);
  }

  const std::unique_ptr<AttentionBackend> cuda_ = MakeBackend();
  CpuBackend cpu_{16};
  Numbers numbers_;
  std::map<std::string, int> engines_;
};

TEST_F(CudaDense, AgreesWithTheCpu) {
  const Shape square{2, 4, 2, 128, 128, 64, 64}, wide{1, 4, 4, 128, 256, 128, 64},
      packed{2, 3, 3, 256, 256, 64, 64};
  int turn = 0;
  for (const Feature& feature : Features()) {
    const DType dtype = ++turn % 3 == 0 ? DType::kFloat16 : DType::kBFloat16;
    Check(square, Layout::kBshdBs2hd, dtype, feature);
    Check(wide, turn % 2 == 0 ? Layout::kBhsdBhsdBhsd : Layout::kBshdBshdBshd, dtype, feature);
    Check(packed, Layout::kBs3hd, dtype, feature);
  }
}

TEST_F(CudaDense, Fp8AgreesWithTheCpu) {
  const Shape square{2, 4, 2, 128, 128, 128, 128}, long_keys{1, 2, 2, 256, 512, 64, 64},
      packed{2, 3, 3, 256, 256, 128, 128};
  for (DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (Causal causal : {Causal::kNone, Causal::kTopLeft}) {
      const Feature scaled{"fp8", [=](AttentionSpec& spec) {
                             spec.causal = causal;
                             spec.fp8 = Fp8Scales{.scale_s = 256,
                                                  .descale_s = 1.0f / 256,
                                                  .scale_o = 64,
                                                  .descale_o = 1.0f / 64,
                                                  .scale_d_p = 16,
                                                  .descale_d_p = 1.0f / 16,
                                                  .scale_d_q = 16,
                                                  .scale_d_k = 16,
                                                  .scale_d_v = 16};
                           }};
      Check(square, Layout::kBshdBs2hd, dtype, scaled);
      Check(long_keys, Layout::kBshdBshdBshd, dtype, scaled);
      Check(packed, Layout::kBs3hd, dtype, scaled);
    }
  }
  EXPECT_EQ(engines_["forward: cudnn_dense"], 12);
  EXPECT_EQ(engines_["backward: cudnn_dense"], 8);
}

// Additive masks: rows that are hidden whole, and blocks whose first tiles of keys are.
TEST_F(CudaDense, BiasesHideRowsAndBlocks) {
  const Shape shape{2, 4, 4, 256, 256, 64, 64};
  for (const char* kind : {"bhss", "1hss"}) {
    for (int64_t block : {64, 1}) {
      const Feature feature{
          "hidden", [](AttentionSpec& spec) { spec.bias_kind = BiasKind::kPostScale; }, kind};
      PackedRequest request =
          MakeRequest(shape, Layout::kBshdBs2hd, DType::kBFloat16, feature, numbers_);
      for (int64_t cell = 0; cell < *NumElements(request.inputs.bias->shape); ++cell) {
        const int64_t row = cell / 256 % 256, key = cell % 256;
        const bool hidden = block == 1 ? row % 3 == 0 : row / block != key / block;
        if (hidden) StoreElement(DType::kBFloat16, request.bias.data(), cell, -INFINITY);
      }
      CheckRequest(std::move(request), Bound(DType::kBFloat16), feature.name);
    }
  }
}

// Logits near -120: a tile's padding that counts as 0 would overflow.
TEST_F(CudaDense, LogitsFarBelowZeroHaveFiniteGradients) {
  for (int64_t s : {1, 64, 65, 128, 192, 256}) {
    const Shape shape{1, 2, 2, s, s, 64, 64};
    for (bool with_bias : {false, true}) {
      const Feature feature{"far",
                            [&](AttentionSpec& spec) {
                              if (with_bias) spec.bias_kind = BiasKind::kPostScale;
                            },
                            with_bias ? "bhss" : ""};
      PackedRequest request =
          MakeRequest(shape, Layout::kBshdBshdBshd, DType::kBFloat16, feature, numbers_);
      // The first component of Q is 1 and of K -120 / scale: a logit of -120 beside the noise.
      const auto set_first = [&](Buffer buffer, float value) {
        std::vector<std::byte>& bytes = request.buffers[static_cast<size_t>(buffer)];
        for (int64_t row = 0; row < s * shape.h; ++row) {
          StoreElement(DType::kBFloat16, bytes.data(), row * shape.d_qk, value);
        }
      };
      set_first(Buffer::kQ, 1);
      set_first(Buffer::kK, -960);
      for (std::byte& byte : request.bias) byte = std::byte{0};
      // 960 times the rounding of a sum that is 0: any finite number may come of it.
      CheckRequest(std::move(request), 1e6, feature.name + std::to_string(s));
    }
  }
}

// Past 4 GiB of scratch, where a deterministic problem runs in parts of its batch, and of its
// heads.
TEST_F(CudaDense, PartsGiveWhatTheWholeGives) {
  constexpr auto kSinks = SoftmaxKind::kLearnable;
  const Shape batch_parts{3, 4, 2, 16384, 16384, 64, 64},
      head_parts{1, 16, 8, 16384, 16384, 64, 64}, both{2, 32, 4, 16384, 16384, 64, 64};
  for (const Shape& shape : {batch_parts, head_parts, both}) {
    for (bool ragged : {false, true}) {
      const Feature plain{"parts", [&](AttentionSpec& spec) {
                            spec.causal = Causal::kTopLeft;
                            spec.softmax_kind = kSinks;
                          }};
      PackedRequest request =
          MakeRequest(shape, Layout::kBshdBs2hd, DType::kBFloat16, plain, numbers_);
      for (int64_t i = 0; ragged && i <= shape.b; ++i) {
        request.sequences.cu_seqlens_q.push_back(i * (shape.s_q - 3));
        request.sequences.cu_seqlens_kv.push_back(i * (shape.s_kv - 5));
      }
      AttentionProblem problem = *Resolve(request.spec, request.sequences, request.inputs);
      const auto out = RunForward(OnDevice(), **cuda_->BuildPlan(problem), problem, request);
      ASSERT_TRUE(out.ok()) << out.status();
      const BackwardRequest sent{request, out->out, out->lse, numbers_(problem.out_desc)};
      const auto whole =
          RunBackward(OnDevice(), **cuda_->BuildBackwardPlan(problem), problem, sent);
      problem.deterministic = true;
      const auto plan = cuda_->BuildBackwardPlan(problem);
      ASSERT_TRUE(whole.ok() && plan.ok()) << whole.status() << plan.status();
      ++engines_["parts: " + std::string((*plan)->engine())];
      EXPECT_LT((*plan)->workspace_bytes(), int64_t{6} << 30);
      const auto parts = RunBackward(OnDevice(), **plan, problem, sent);
      ASSERT_TRUE(parts.ok()) << parts.status();
      for (size_t i = 0; i < parts->grads.size(); ++i) {
        if (parts->grads[i].empty()) continue;
        EXPECT_LE(Difference(DType::kBFloat16, parts->grads[i], whole->grads[i]), 1e-2) << i;
      }
      EXPECT_LE(Difference(DType::kFloat32, parts->d_softmax_offset, whole->d_softmax_offset),
                1e-5);
    }
  }
}

}  // namespace
}  // namespace attnd::testing
