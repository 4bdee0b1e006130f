// With D = sum_j P_j dP_j and the names of ReferenceCell:
//   dP_j = keep_factor_j * (dO . v_j)      dv_j += keep_factor_j P_j dO
//   dx_j = P_j (dP_j - D)                  dsink -= P_sink D
//   dq += scale cap_slope_j dx_j k_j       dk_j += scale cap_slope_j dx_j q
// and a bias gets dx_j where it is added to the capped logit, what dq gets of dx_j where it is
// added to q.k.

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/core/status.h"
#include "engine/cpu/amax.h"
#include "engine/cpu/reference_attention.h"
#include "engine/cpu/reference_row.h"

namespace attnd {
namespace {

using Doubles = std::vector<double>;

size_t ElementsOf(const std::optional<TensorDesc>& desc) {
  return desc ? static_cast<size_t>(*NumElements(desc->shape)) : 0;
}

class BackwardLoop {
 public:
  BackwardLoop(const AttentionProblem& problem, const BackwardBuffers& buffers)
      : p_(problem),
        b_(buffers),
        row_(problem, {.buffers = buffers.inputs,
                       .bias = buffers.bias,
                       .softmax_offset = buffers.softmax_offset}),
        d_qk_(static_cast<size_t>(problem.head_dim_qk)),
        d_v_(static_cast<size_t>(problem.head_dim_v)),
        dq_out_(OutputOf(p_.q, d_qk_, p_.fp8.scale_d_q, 1)),
        dk_out_(OutputOf(p_.k, d_qk_, p_.fp8.scale_d_k, 2)),
        dv_out_(OutputOf(p_.v, d_v_, p_.fp8.scale_d_v, 3)),
        dq_(d_qk_),
        do_(d_v_),
        d_bias_(ElementsOf(problem.bias)),
        d_sink_(ElementsOf(problem.softmax_offset)) {}

  void Run() {
    ClearGradients();
    if (b_.amax != nullptr) std::fill_n(b_.amax, 4, 0.0f);
    for (int64_t i = 0; i < p_.batch; ++i) {
      for (int64_t n = 0; n < p_.num_kv_heads; ++n) RunKvHead(i, n);
    }
    if (b_.d_bias != nullptr) {
      for (size_t e = 0; e < d_bias_.size(); ++e) Store(b_.d_bias, e, d_bias_[e]);
    }
    if (b_.d_softmax_offset != nullptr) {
      for (size_t n = 0; n < d_sink_.size(); ++n) {
        b_.d_softmax_offset[n] = static_cast<float>(d_sink_[n]);
      }
    }
  }

 private:
  // Slots of a packed gradient interleave, and some rows belong to nobody: all bytes at once.
  void ClearGradients() {
    for (size_t k = 0; k < b_.grads.size(); ++k) {
      if (b_.grads[k] == nullptr) continue;
      std::memset(b_.grads[k], 0, static_cast<size_t>(*NumBytes(*p_.inputs[k])));
    }
  }

  // All that reads K and V of one sequence and KV head, and so adds to the same dK and dV.
  void RunKvHead(int64_t i, int64_t kv_head) {
    const SequenceExtent& extent = p_.sequences[static_cast<size_t>(i)];
    dk_.assign(static_cast<size_t>(extent.kv_len) * d_qk_, 0.0);
    dv_.assign(static_cast<size_t>(extent.kv_len) * d_v_, 0.0);
    const int64_t shared = p_.num_heads / p_.num_kv_heads;
    const int64_t first = kv_head * shared;
    for (int64_t n = first; n < first + shared; ++n) {
      for (int64_t row = 0; row < extent.q_len; ++row) RunRow(i, n, row);
    }
    for (int64_t j = 0; j < extent.kv_len; ++j) {
      StoreRow(dk_out_, row_.KeyElement(i, first, j), &dk_[static_cast<size_t>(j) * d_qk_]);
      StoreRow(dv_out_, row_.ValueElement(i, first, j), &dv_[static_cast<size_t>(j) * d_v_]);
    }
  }

  void RunRow(int64_t i, int64_t n, int64_t row) {
    row_.Compute(i, n, row);
    if (row_.cells().empty()) return;
    const int64_t d_out = row_.QueryElement(p_.out, i, n, row);
    for (size_t c = 0; c < d_v_; ++c) {
      do_[c] = LoadElement(p_.out_dtype, b_.d_out + p_.out.byte_offset,
                           d_out + static_cast<int64_t>(c) * p_.out.strides.dim) *
               p_.d_out_descale();
    }
    const double d = ComputeWeightGradients(i, n);
    if (!d_sink_.empty()) d_sink_[static_cast<size_t>(n)] -= row_.sink_weight() * d;
    dq_.assign(d_qk_, 0.0);
    for (size_t x = 0; x < dp_.size(); ++x) AddLogitGradient(i, n, row, x, d);
    StoreRow(dq_out_, row_.QueryElement(p_.q, i, n, row), dq_.data());
  }

  // dO [d_v], V [cells, d_v] -> dP [cells], and adds to dV. Returns D.
  double ComputeWeightGradients(int64_t i, int64_t n) {
    dp_.clear();
    double d = 0;
    for (const ReferenceCell& cell : row_.cells()) {
      dp_.push_back(0);
      if (cell.keep_factor == 0) continue;
      const int64_t v = row_.ValueElement(i, n, cell.j);
      double* dv = &dv_[static_cast<size_t>(cell.j) * d_v_];
      for (size_t c = 0; c < d_v_; ++c) {
        const int64_t component = static_cast<int64_t>(c) * p_.v.strides.dim;
        dp_.back() += cell.keep_factor * do_[c] * row_.LoadV(v + component);
        dv[c] += cell.keep_factor * cell.weight * do_[c];
      }
      d += cell.weight * dp_.back();
    }
    return d;
  }

  // From the row's cell x to dQ, dK and dBias.
  void AddLogitGradient(int64_t i, int64_t n, int64_t row, size_t x, double d) {
    const ReferenceCell& cell = row_.cells()[x];
    const double dx = cell.weight * (dp_[x] - d);
    const double d_product = p_.scale * cell.cap_slope * dx;
    RaiseAmax(b_.amax, static_cast<float>(d_product));
    const int64_t k = row_.KeyElement(i, n, cell.j);
    double* dk = &dk_[static_cast<size_t>(cell.j) * d_qk_];
    for (size_t c = 0; c < d_qk_; ++c) {
      dq_[c] += d_product * row_.LoadK(k + static_cast<int64_t>(c) * p_.k.strides.dim);
      dk[c] += d_product * row_.q()[c];
    }
    if (d_bias_.empty()) return;
    d_bias_[static_cast<size_t>(row_.BiasElement(i, n, row, cell.j))] +=
        p_.bias_kind == BiasKind::kPreScale ? d_product : dx;
  }

  // Where rows of a gradient go.
  struct Output {
    const TensorView& view;
    size_t count;  // Of a row's elements.
    float scale;
    float* amax;
  };
  Output OutputOf(const TensorView& view, size_t count, float scale, int64_t amax) const {
    return {view, count, scale, b_.amax == nullptr ? nullptr : b_.amax + amax};
  }

  void StoreRow(const Output& out, int64_t element, const double* values) {
    std::byte* base = b_.grads[static_cast<size_t>(out.view.buffer)] + out.view.byte_offset;
    for (size_t c = 0; c < out.count; ++c) {
      RaiseAmax(out.amax, static_cast<float>(values[c]));
      Store(base, static_cast<size_t>(element) + c * static_cast<size_t>(out.view.strides.dim),
            values[c] * out.scale);
    }
  }

  void Store(std::byte* base, size_t element, double value) {
    StoreElement(p_.dtype, base, static_cast<int64_t>(element), static_cast<float>(value));
  }

  const AttentionProblem& p_;
  const BackwardBuffers& b_;
  ReferenceRow row_;
  const size_t d_qk_, d_v_;
  const Output dq_out_, dk_out_, dv_out_;
  Doubles dq_, do_, dp_;  // Of one row.
  Doubles dk_, dv_;       // [kv_len, d_qk] and [kv_len, d_v] of one sequence and KV head.
  Doubles d_bias_, d_sink_;
};

}  // namespace

absl::Status ReferenceBackward(const AttentionProblem& problem, const BackwardBuffers& buffers) {
  if (!IsFloatingPoint(problem.dtype)) {
    return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                     "the reference loop was given a problem that it does not compute");
  }
  BackwardLoop(problem, buffers).Run();
  return absl::OkStatus();
}

}  // namespace attnd
