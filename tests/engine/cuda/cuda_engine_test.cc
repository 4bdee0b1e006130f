// The engine over the module, as the server runs it. Needs a device.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>

#include "engine/core/status.h"
#include "engine/engine.h"
#include "engine/engine_parts.h"
#include "tests/conformance/conformance.h"

namespace {

std::atomic<int64_t> allocation_calls = 0;

template <typename Function>
Function Next(const char* name) {
  ++allocation_calls;
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// The module's calls come here first, because the program exports these names.
extern "C" cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return Next<cudaError_t (*)(void**, size_t)>("cudaMalloc")(memory, bytes);
}
extern "C" cudaError_t cudaFree(void* memory) {
  return Next<cudaError_t (*)(void*)>("cudaFree")(memory);
}
extern "C" cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return Next<cudaError_t (*)(void**, size_t, unsigned)>("cudaHostAlloc")(memory, bytes, flags);
}
extern "C" cudaError_t cudaFreeHost(void* memory) {
  return Next<cudaError_t (*)(void*)>("cudaFreeHost")(memory);
}
extern "C" cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t stream) {
  return Next<cudaError_t (*)(void**, size_t, cudaStream_t)>("cudaMallocAsync")(memory, bytes,
                                                                                stream);
}

namespace attnd::testing {
namespace {

std::unique_ptr<Engine> MakeEngine(bool cpu_fallback) {
  auto chosen = MakeEngineParts({.require_gpu = true,
                                 .cpu_fallback = cpu_fallback,
                                 .threads = 2,
                                 .queue_bytes = 256 << 20,
                                 .pinned_pool_bytes = 256 << 20,
                                 .device_pool = {.bytes = int64_t{1} << 30}});
  if (!chosen.ok()) {
    std::cerr << chosen.status() << std::endl;
    std::abort();
  }
  return *Engine::Make(std::move(chosen->parts));
}

class CudaEngine : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { engine_ = MakeEngine(true).release(); }
  static void TearDownTestSuite() {
    EXPECT_EQ(engine_->host_pool().stats().in_use_bytes, 0);
    delete engine_;
  }

  static CallDescription Describe(const PackedRequest& request) {
    CallDescription d;
    d.spec = request.spec;
    d.sequences = request.sequences;
    d.inputs = request.inputs;
    d.return_lse = true;
    return d;
  }

  // A backward call, with everything sent again.
  static CallDescription Describe(const BackwardRequest& request, const AttentionProblem& problem) {
    CallDescription d = Describe(request.forward);
    d.pass = Pass::kBackward;
    d.return_lse = false;
    d.backward = {problem.out_desc, problem.lse_desc, problem.out_desc};
    return d;
  }

  // `fill` writes the inputs.
  template <typename Fill>
  static absl::StatusOr<attnd::CallResult> Run(Engine& engine, const CallDescription& description,
                                               Fill fill) {
    auto call = engine.Check(description);
    if (!call.ok()) return call.status();
    std::promise<absl::StatusOr<attnd::CallResult>> promise;
    engine.Prepare(*std::move(call), {}, [&](absl::StatusOr<PreparedCall> prepared) {
      if (!prepared.ok()) return promise.set_value(prepared.status());
      fill(*prepared);
      engine.Submit(*std::move(prepared), [&](absl::StatusOr<attnd::CallResult> result) {
        promise.set_value(std::move(result));
      });
    });
    return promise.get_future().get();
  }

  static void Fill(const PackedRequest& request, PreparedCall& prepared) {
    auto copy = [&](Piece piece, const std::vector<std::byte>& bytes) {
      std::copy_n(bytes.begin(), prepared.input(piece).size(), prepared.input(piece).begin());
    };
    for (int i = 0; i < kNumInputBuffers; ++i) copy(static_cast<Piece>(i), request.buffers[i]);
    copy(Piece::kBias, request.bias);
    copy(Piece::kSoftmaxOffset, request.softmax_offset);
    std::copy(request.page_table_k.begin(), request.page_table_k.end(),
              prepared.page_table(Piece::kPageTableK).begin());
    std::copy(request.page_table_v.begin(), request.page_table_v.end(),
              prepared.page_table(Piece::kPageTableV).begin());
  }

  static absl::StatusOr<attnd::CallResult> Run(const PackedRequest& request,
                                               Engine& engine = *engine_) {
    return Run(engine, Describe(request), [&](PreparedCall& prepared) { Fill(request, prepared); });
  }

  static absl::StatusOr<attnd::CallResult> Run(const BackwardRequest& request,
                                               const AttentionProblem& problem) {
    return Run(*engine_, Describe(request, problem), [&](PreparedCall& prepared) {
      Fill(request.forward, prepared);
      std::ranges::copy(request.out, prepared.input(Piece::kOut).begin());
      std::ranges::copy(request.lse, prepared.input(Piece::kLse).begin());
      std::ranges::copy(request.d_out, prepared.input(Piece::kOutGradient).begin());
    });
  }

  // BSHD self attention of one sequence, all elements 0.
  static PackedRequest SelfAttention(int64_t s, DType dtype) {
    PackedRequest request;
    request.spec.layout = Layout::kBshdBshdBshd;
    request.spec.dtype = dtype;
    for (Buffer b : {Buffer::kQ, Buffer::kK, Buffer::kV}) {
      const TensorDesc desc{dtype, {1, s, 8, 64}};
      request.inputs.buffers[static_cast<int>(b)] = desc;
      request.buffers[static_cast<int>(b)].resize(static_cast<size_t>(*NumBytes(desc)));
    }
    return request;
  }

  static inline Engine* engine_ = nullptr;
};

std::vector<std::byte> Copy(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

// The reply's tensors.
ForwardResult ForwardOf(const attnd::CallResult& r) {
  return {Copy(r.bytes(Piece::kOut)), Copy(r.bytes(Piece::kLse)), Copy(r.bytes(Piece::kAmax))};
}

BackwardResult BackwardOf(const attnd::CallResult& r) {
  BackwardResult result;
  for (int i = 0; i < kNumInputBuffers; ++i) {
    result.grads[i] = Copy(r.bytes(static_cast<Piece>(i)));
  }
  result.d_bias = Copy(r.bytes(Piece::kBias));
  result.d_softmax_offset = Copy(r.bytes(Piece::kSoftmaxOffset));
  result.amax = Copy(r.bytes(Piece::kAmax));
  return result;
}

// What no kernel of the GPU computes, and the CPU does.
bool IsForTheCpu(const GoldenCase& c) { return std::max(c.geometry.d_qk, c.geometry.d_v) > 256; }

TEST_F(CudaEngine, AgreesWithTheOracleFromHostMemoryToHostMemory) {
  int ran = 0, gradients = 0, on_cpu = 0;
  for (const Arrangement& a : AllArrangements()) {
    size_t index = 0;
    for (const GoldenCase& c : GoldenCases()) {
      if (!CanHold(a, c.geometry) || (++index % 13 != 0 && !IsForTheCpu(c))) continue;
      SCOPED_TRACE(std::string(a.name) + " " + c.group + " " + c.name);
      PackedRequest request = MakeRequest(a, c, {.seed = index});
      const auto result = Run(request);
      ASSERT_TRUE(result.ok()) << result.status();
      const AttentionProblem problem = engine_->Check(Describe(request))->problem;
      EXPECT_EQ(Compare(a, c, problem, ForwardOf(*result)), "") << result->report.engine;
      EXPECT_EQ(result->report.backend, IsForTheCpu(c) ? "cpu" : "cuda");
      ++ran;
      on_cpu += IsForTheCpu(c);
      if (a.IsPaged() || !c.has_gradients) continue;
      const BackwardRequest sent = MakeBackwardRequest(a, c, problem, std::move(request));
      const auto backward = Run(sent, problem);
      ASSERT_TRUE(backward.ok()) << backward.status();
      EXPECT_EQ(CompareGradients(a, c, problem, BackwardOf(*backward)), "")
          << backward->report.engine;
      EXPECT_EQ(backward->report.backend, IsForTheCpu(c) ? "cpu" : "cuda");
      ++gradients;
    }
  }
  std::cout << "engine\t" << ran << "\tforward requests, " << on_cpu << " of them on the CPU\n"
            << "engine\t" << gradients << "\tbackward requests\n";
  EXPECT_GT(on_cpu, 0);
  EXPECT_GT(gradients, 1000);
}

TEST_F(CudaEngine, RefusesWithoutAFallback) {
  const auto engine = MakeEngine(false);
  PackedRequest request = SelfAttention(8, DType::kBFloat16);
  EXPECT_EQ(Run(request, *engine)->report.backend, "cuda");
  for (Buffer b : {Buffer::kQ, Buffer::kK, Buffer::kV}) {
    request.inputs.buffers[static_cast<int>(b)]->shape = {1, 8, 1, 512};
  }
  const absl::Status status = Run(request, *engine).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ErrorField(status), "spec.head_dim_qk");
}

TEST_F(CudaEngine, ConcurrentRequestsGetTheBitsOfLoneOnes) {
  std::vector<PackedRequest> requests;
  std::vector<attnd::CallResult> want;
  for (const GoldenCase& c : GoldenCases()) {
    const Arrangement& a = ArrangementOf(Layout::kThdThdThd);
    if (requests.size() >= 16 || !CanHold(a, c.geometry)) continue;
    requests.push_back(MakeRequest(a, c));
    want.push_back(*Run(requests.back()));
  }
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 64; ++i) {
        const size_t n = (i * 5 + t) % requests.size();
        const auto got = Run(requests[n]);
        wrong += !got.ok() || Copy(got->bytes(Piece::kOut)) != Copy(want[n].bytes(Piece::kOut)) ||
                 Copy(got->bytes(Piece::kLse)) != Copy(want[n].bytes(Piece::kLse));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(CudaEngine, AfterTheFirstPassNothingIsBuiltOrAllocated) {
  auto pass = [&] {
    int built = 0;
    for (int64_t s = 1; s <= 300; ++s) {
      const auto result = Run(SelfAttention(s, DType::kBFloat16));
      EXPECT_TRUE(result.ok()) << result.status();
      built += !result->report.plan_cache_hit;
    }
    return built;
  };
  const int64_t before_first = allocation_calls;
  const int built = pass();
  pass();  // The second worker may get its first request here.
  const int64_t before = allocation_calls;
  EXPECT_EQ(pass(), 0);
  EXPECT_EQ(allocation_calls, before);
  EXPECT_GT(before, 0) << "the calls are not counted";
  std::cout << "engine\t" << built << "\tplans for lengths 1..300, " << before - before_first
            << " calls of CUDA's allocator in the first two passes, " << allocation_calls - before
            << " in the third\n";
  EXPECT_LE(built, 12);
}

}  // namespace
}  // namespace attnd::testing
