#include "engine/cpu/reference_attention.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/core/status.h"
#include "engine/cpu/amax.h"
#include "engine/cpu/reference_row.h"

namespace attnd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class ForwardLoop {
 public:
  ForwardLoop(const AttentionProblem& problem, const ForwardBuffers& buffers)
      : p_(problem),
        b_(buffers),
        row_(problem, {buffers.inputs, buffers.bias, buffers.softmax_offset, buffers.page_table_k,
                       buffers.page_table_v}),
        o_(static_cast<size_t>(problem.head_dim_v)) {}

  void Run() {
    ClearOutputs();
    if (b_.amax != nullptr) std::fill_n(b_.amax, 2, 0.0f);
    for (int64_t i = 0; i < p_.batch; ++i) {
      for (int64_t n = 0; n < p_.num_heads; ++n) {
        const int64_t q_len = p_.sequences[static_cast<size_t>(i)].q_len;
        for (int64_t row = 0; row < q_len; ++row) RunRow(i, n, row);
      }
    }
  }

  // P [keys], V [keys, d_v] -> o [d_v]
  void RunRow(int64_t i, int64_t n, int64_t row) {
    row_.Compute(i, n, row);
    o_.assign(o_.size(), 0.0);
    for (const ReferenceCell& cell : row_.cells()) {
      if (cell.keep_factor == 0) continue;
      const int64_t v = row_.ValueElement(i, n, cell.j);
      const double weight = cell.weight * cell.keep_factor;
      for (int64_t c = 0; c < p_.head_dim_v; ++c) {
        o_[static_cast<size_t>(c)] += weight * row_.LoadV(v + c * p_.v.strides.dim);
      }
    }
    for (const ReferenceCell& cell : row_.cells()) RaiseAmax(b_.amax, cell.weight);
    for (const double o : o_) RaiseAmax(b_.amax == nullptr ? nullptr : b_.amax + 1, o);
    const int64_t q_row = p_.sequences[static_cast<size_t>(i)].q_row;
    StoreRow(p_.q_is_thd ? 0 : i, p_.q_is_thd ? q_row + row : row, n, row_.lse());
  }

 private:
  // Rows of the out buffer per sequence: all of them, whether they belong to a sequence or not.
  void ClearOutputs() {
    const int64_t sequences = p_.q_is_thd ? 1 : p_.batch;
    const int64_t rows = p_.q_is_thd ? p_.out_desc.shape[0] : p_.max_seqlen_q;
    for (int64_t i = 0; i < sequences; ++i) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t n = 0; n < p_.num_heads; ++n) StoreRow(i, row, n, -kInfinity);  // o_ is 0.
      }
    }
  }

  // `row` counts from the start of sequence i, or of the token buffer with i = 0.
  void StoreRow(int64_t i, int64_t row, int64_t n, double lse) {
    const Strides& os = p_.out.strides;
    const int64_t start = i * os.batch + row * os.seq + n * os.head;
    for (int64_t c = 0; c < p_.head_dim_v; ++c) {
      StoreElement(p_.out_dtype, b_.out + p_.out.byte_offset, start + c * os.dim,
                   static_cast<float>(o_[static_cast<size_t>(c)] * p_.out_scale()));
    }
    if (b_.lse == nullptr) return;
    b_.lse[i * p_.lse.batch + row * p_.lse.seq + n * p_.lse.head] = static_cast<float>(lse);
  }

  const AttentionProblem& p_;
  const ForwardBuffers& b_;
  ReferenceRow row_;
  std::vector<double> o_;
};

}  // namespace

absl::Status ReferenceForward(const AttentionProblem& problem, const ForwardBuffers& buffers) {
  if (!IsFloatingPoint(problem.dtype)) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the reference loop was given a problem that it does not compute");
  }
  ForwardLoop(problem, buffers).Run();
  return absl::OkStatus();
}

void ReferenceForwardRow(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                         int64_t n, int64_t row) {
  ForwardLoop(problem, buffers).RunRow(i, n, row);
}

}  // namespace attnd
