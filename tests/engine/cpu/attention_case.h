// Builds attention problems directly, without the resolver, and runs them on poisoned memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/backend/attention_backend.h"
#include "engine/core/attention_problem.h"

namespace attnd::testing {

enum class Format { kBshd, kSbhd, kBhsd, kThd };

// What a problem looks like. Lengths make it: one (q_len, kv_len) per sequence.
struct CaseOptions {
  DType dtype = DType::kFloat32;
  std::optional<DType> out_dtype;  // Default: dtype.
  std::vector<std::pair<int64_t, int64_t>> lengths = {{1, 1}};
  int64_t extra_rows = 0;  // Allocated rows past the longest dense sequence, or of each THD gap.
  Format q_format = Format::kBshd;
  Format kv_format = Format::kBshd;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t d_qk = 8;
  int64_t d_v = 8;
  int64_t dim_stride = 1;  // Of Q, K and V.
  int64_t page_size = 0;   // Above 0: K and V are pools of pages in shuffled order.
  BandMask mask;
  std::optional<double> scale;  // Default: 1 / sqrt(d_qk).
  std::optional<double> softcap;
  bool batch_invariant = false;
  uint64_t seed = 1;
};

// "F32 b=2 h=4/2 d=8/16 ..." for failure messages.
std::string Describe(const CaseOptions& options);

struct Output {
  std::vector<float> out;  // In the order of the out buffer, widened.
  std::vector<float> lse;  // In the order of the lse buffer.
};

class AttentionCase {
 public:
  // Elements of the sequences are normally distributed with unit variance; every other element of
  // the buffers is NaN.
  explicit AttentionCase(const CaseOptions& options);

  AttentionProblem& problem() { return problem_; }
  const AttentionProblem& problem() const { return problem_; }

  // Element c of row j of head n of sequence i.
  float Get(const TensorView& view, int64_t i, int64_t j, int64_t n, int64_t c) const;
  void Set(const TensorView& view, int64_t i, int64_t j, int64_t n, int64_t c, float value);
  // Rows of out and lse of sequence i: where they are in Output's vectors.
  int64_t OutIndex(int64_t i, int64_t j, int64_t n, int64_t c) const;
  int64_t LseIndex(int64_t i, int64_t j, int64_t n) const;

  // Inputs and page tables; out, lse and workspace are the caller's to set.
  ForwardBuffers Inputs() const;

  // Runs a plan of `backend` with outputs of 0xFF bytes and a workspace of NaN; fails the test if
  // the status is not OK, or if bytes after an output or after the workspace were touched.
  Output Run(AttentionBackend& backend, bool want_lse = true) const;

 private:
  TensorView MakeInput(Buffer buffer, Format format, int64_t heads, int64_t dim);
  int64_t ElementOf(const TensorView& view, int64_t i, int64_t j, int64_t n, int64_t c) const;
  void MakeSequences();
  void MakeOutput();
  void FillInputs();

  CaseOptions options_;
  AttentionProblem problem_;
  int64_t q_rows_ = 0;  // Of the token buffers, where a side is THD.
  int64_t kv_rows_ = 0;
  std::vector<int32_t> page_table_k_;
  std::vector<int32_t> page_table_v_;
  std::vector<std::vector<std::byte>> inputs_{kNumInputBuffers};
};

// sqrt(sum (a - b)^2 / sum b^2), over all elements; NaN must match NaN, or the result is infinite.
double RelativeRms(const std::vector<float>& actual, const std::vector<float>& expected);

// Largest |a - b| of two LSE vectors; -inf must match -inf and NaN NaN, or the result is infinite.
double MaxDifference(const std::vector<float>& actual, const std::vector<float>& expected);

}  // namespace attnd::testing
