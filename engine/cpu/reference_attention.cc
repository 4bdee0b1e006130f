#include "engine/cpu/reference_attention.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/core/status.h"

namespace attnd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class ReferenceLoop {
 public:
  ReferenceLoop(const AttentionProblem& problem, const ForwardBuffers& buffers)
      : p_(problem),
        b_(buffers),
        q_(static_cast<size_t>(problem.head_dim_qk)),
        o_(static_cast<size_t>(problem.head_dim_v)) {}

  void Run() {
    ClearOutputs();
    for (int64_t i = 0; i < p_.batch; ++i) {
      for (int64_t n = 0; n < p_.num_heads; ++n) {
        const int64_t q_len = p_.sequences[static_cast<size_t>(i)].q_len;
        for (int64_t row = 0; row < q_len; ++row) ComputeRow(i, n, row);
      }
    }
  }

  void RunRow(int64_t i, int64_t n, int64_t row) {
    const int64_t out_row = p_.q_is_thd ? p_.sequences[static_cast<size_t>(i)].q_row + row : row;
    StoreRow(p_.q_is_thd ? 0 : i, out_row, n, o_, -kInfinity);  // o_ is 0 at first.
    ComputeRow(i, n, row);
  }

 private:
  // Rows of the out buffer per sequence: all of them, whether they belong to a sequence or not.
  void ClearOutputs() {
    const int64_t sequences = p_.q_is_thd ? 1 : p_.batch;
    const int64_t rows = p_.q_is_thd ? p_.out_desc.shape[0] : p_.max_seqlen_q;
    const std::vector<double> zeros(static_cast<size_t>(p_.head_dim_v), 0.0);
    for (int64_t i = 0; i < sequences; ++i) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t n = 0; n < p_.num_heads; ++n) StoreRow(i, row, n, zeros, -kInfinity);
      }
    }
  }

  // q [d_qk], K [kv_len, d_qk], V [kv_len, d_v] -> o [d_v]
  void ComputeRow(int64_t i, int64_t n, int64_t row) {
    const SequenceExtent& extent = p_.sequences[static_cast<size_t>(i)];
    const KeyRange keys = p_.mask.VisibleKeys(row, extent.q_len, extent.kv_len);
    const int64_t kv_head = n / (p_.num_heads / p_.num_kv_heads);
    if (keys.first == keys.last) return;

    const Strides& qs = p_.q.strides;
    const int64_t q_start = i * qs.batch + extent.q_row * p_.q.start_multiplier;
    for (int64_t c = 0; c < p_.head_dim_qk; ++c) {
      q_[static_cast<size_t>(c)] = Load(p_.q, q_start + row * qs.seq + n * qs.head + c * qs.dim);
    }
    logits_.clear();
    double m = -kInfinity;
    for (int64_t j = keys.first; j < keys.last; ++j) {
      const double s = Logit(KeyStart(p_.k, b_.page_table_k, i, j) + kv_head * p_.k.strides.head);
      logits_.push_back(s);
      if (s > m || std::isnan(s)) m = s;  // Once NaN, it stays so: no number is above it.
    }
    if (m == -kInfinity) return;

    double l = 0;
    o_.assign(o_.size(), 0.0);
    for (int64_t j = keys.first; j < keys.last; ++j) {
      const double e = std::exp(logits_[static_cast<size_t>(j - keys.first)] - m);
      const int64_t v = KeyStart(p_.v, b_.page_table_v, i, j) + kv_head * p_.v.strides.head;
      l += e;
      for (int64_t c = 0; c < p_.head_dim_v; ++c) {
        o_[static_cast<size_t>(c)] += e * Load(p_.v, v + c * p_.v.strides.dim);
      }
    }
    for (double& o : o_) o /= l;
    const int64_t out_row = p_.q_is_thd ? extent.q_row + row : row;
    StoreRow(p_.q_is_thd ? 0 : i, out_row, n, o_, m + std::log(l));
  }

  double Logit(int64_t k) const {
    double dot = 0;
    for (int64_t c = 0; c < p_.head_dim_qk; ++c) {
      dot += q_[static_cast<size_t>(c)] * Load(p_.k, k + c * p_.k.strides.dim);
    }
    const double s = p_.scale * dot;
    return p_.logit_softcap ? *p_.logit_softcap * std::tanh(s / *p_.logit_softcap) : s;
  }

  // Element where key j of sequence i starts, head 0.
  int64_t KeyStart(const TensorView& view, const int32_t* pages, int64_t i, int64_t j) const {
    if (p_.is_paged) {
      const int64_t page = pages[i * p_.pages_per_sequence + j / p_.page_size];
      return page * view.strides.batch + (j % p_.page_size) * view.strides.seq;
    }
    const int64_t start = p_.sequences[static_cast<size_t>(i)].kv_row * view.start_multiplier;
    return i * view.strides.batch + start + j * view.strides.seq;
  }

  double Load(const TensorView& view, int64_t element) const {
    const std::byte* base = b_.inputs[static_cast<size_t>(view.buffer)] + view.byte_offset;
    return LoadElement(p_.dtype, base, element);
  }

  // `row` counts from the start of sequence i, or of the token buffer with i = 0.
  void StoreRow(int64_t i, int64_t row, int64_t n, const std::vector<double>& o, double lse) {
    const Strides& os = p_.out.strides;
    const int64_t start = i * os.batch + row * os.seq + n * os.head;
    for (int64_t c = 0; c < p_.head_dim_v; ++c) {
      StoreElement(p_.out_dtype, b_.out + p_.out.byte_offset, start + c * os.dim,
                   static_cast<float>(o[static_cast<size_t>(c)]));
    }
    if (b_.lse == nullptr) return;
    b_.lse[i * p_.lse.batch + row * p_.lse.seq + n * p_.lse.head] = static_cast<float>(lse);
  }

  const AttentionProblem& p_;
  const ForwardBuffers& b_;
  std::vector<double> q_;
  std::vector<double> logits_;
  std::vector<double> o_;
};

}  // namespace

absl::Status ReferenceForward(const AttentionProblem& problem, const ForwardBuffers& buffers) {
  const bool plain = problem.bias_kind == BiasKind::kNone &&
                     problem.softmax_kind == SoftmaxKind::kVanilla &&
                     problem.dropout.probability == 0 && SizeOf(problem.dtype) >= 2;
  if (!plain) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the reference loop was given a problem that it does not compute");
  }
  ReferenceLoop(problem, buffers).Run();
  return absl::OkStatus();
}

void ReferenceForwardRow(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                         int64_t n, int64_t row) {
  ReferenceLoop(problem, buffers).RunRow(i, n, row);
}

}  // namespace attnd
