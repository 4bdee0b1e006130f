// What the benches of the CUDA backend share: memory, requests, timing, and a report. Errors end
// the program.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/core/layout.h"
#include "engine/cuda/cudnn_backend.h"

namespace attnd::bench {

inline constexpr int kRepeats = 11;

void Must(cudaError_t error);
void Must(const absl::Status& status);

// Device memory.
class Memory {
 public:
  explicit Memory(int64_t bytes);
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  // Bf16 numbers in -1 .. 1.
  void FillRandom(int64_t elements);

  std::byte* get() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

struct Shape {
  std::string name;
  int64_t b, h, g, s, d_qk, d_v;
  bool causal;
};

// What kernels of attention are compared on.
std::vector<Shape> SixShapes();

// Floating-point operations of the forward pass, causal counted at half.
double Flops(const Shape& shape);

// What a bf16 client asks for; other layouts than BS3HD and BSHD_BS2HD are BSHD_BSHD_BSHD.
struct Asked {
  AttentionSpec spec;
  Sequences sequences;
  InputDescs inputs;
};
Asked AskDense(const Shape& shape, Layout layout);

// A forward request on the device, and its plan.
struct Request {
  AttentionProblem problem;
  std::unique_ptr<AttentionPlan> plan;
  std::vector<std::unique_ptr<Memory>> memory;
  ForwardBuffers buffers;
  std::unique_ptr<DeviceQueue> queue;

  std::byte* New(int64_t bytes, bool random);
  void Run();  // And waits.
};
std::unique_ptr<Request> MakeRequest(CudnnBackend& backend, const Asked& asked);

// The graph of BSHD_BSHD_BSHD, written down by hand.
SdpaDescription BareDescription(const Shape& shape);

// Medians of each contender's microseconds a call; the contenders take turns, and each is given
// about `budget_us` a turn.
std::vector<double> Time(const std::vector<std::function<void()>>& contenders, double budget_us);

// Table rows to stdout, and JSON to a file.
class Report {
 public:
  explicit Report(const char* path) : json_(path) { json_ << "["; }
  ~Report() { json_ << "\n]\n"; }

  void Add(const std::string& what, const std::string& figure, double value);

 private:
  std::ofstream json_;
  bool first_ = true;
};

// Backward through the backend against bare cuDNN, and the tiled kernels.
void BenchBackward(CudnnBackend& backend, DeviceContext& context, Report& report);

// Small calls, together and one at a time.
void BenchJoint(CudnnBackend& backend, DeviceContext& context, Report& report);

}  // namespace attnd::bench
