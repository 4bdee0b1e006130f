#include "engine/cuda/sdpa_graph.h"

#include <cudnn_frontend.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/core/fp8_scales.h"
#include "engine/core/status.h"
#include "engine/cuda/request_arrays.h"

namespace attnd {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kQOffsets,
  kKOffsets,
  kVOffsets,
  kOutOffsets,
  kLseOffsets,
  kDOutOffsets,
  kDQOffsets,
  kDKOffsets,
  kDVOffsets,
  kQLens,
  kKvLens,
  kPageTableK,
  kPageTableV,
  kScale,
  kBias,
  kSink,
  kDOut,
  kDQ,
  kDK,
  kDV,
  kDBias,
  kFp8Scales,  // And the next ones, in the order of kFp8ScaleFields.
  kFp8Amax = kFp8Scales + kFp8ScaleFields.size(),  // And the next ones.
};

fe::DataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return fe::DataType_t::HALF;
    case DType::kBFloat16: return fe::DataType_t::BFLOAT16;
    case DType::kFloat8E4M3: return fe::DataType_t::FP8_E4M3;
    case DType::kFloat8E5M2: return fe::DataType_t::FP8_E5M2;
    default: return fe::DataType_t::FLOAT;
  }
}

using Four = std::vector<int64_t>;

Four Of(const Strides& s) { return {s.batch, s.head, s.seq, s.dim}; }

class Builder {
 public:
  explicit Builder(const SdpaDescription& d) : d_(d) {
    graph_.set_io_data_type(TypeOf(d.dtype))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  fe::graph::Graph Build() {
    if (IsFloat8(d_.dtype)) {
      d_.is_backward ? BackwardFp8() : ForwardFp8();
    } else {
      d_.is_backward ? Backward() : Forward();
    }
    return std::move(graph_);
  }

 private:
  void Forward() {
    auto options = fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(true);
    SetOptions(options);
    if (d_.has_sink) {
      options.set_sink_token(
          Input(kSink, {1, d_.num_heads, 1, 1}, {d_.num_heads, 1, 1, 1}, fe::DataType_t::FLOAT));
    }
    if (d_.is_paged) SetPages(options);
    auto [out, lse] = graph_.sdpa(Q(), K(), V(), options);
    Output(out, kOut, OutDims(), Of(d_.out), TypeOf(d_.out_dtype));
    Output(lse, kLse, LseDims(), Of(d_.lse), fe::DataType_t::FLOAT);
    if (!d_.ragged_q) return;
    out->set_ragged_offset(Offsets(kOutOffsets));
    lse->set_ragged_offset(Offsets(kLseOffsets));
  }

  void ForwardFp8() {
    auto options = fe::graph::SDPA_fp8_attributes().set_name("sdpa_fp8").set_generate_stats(true);
    SetOptions(options);
    auto scale = [this](float Fp8Scales::*which) { return Fp8Scale(which); };
    using S = Fp8Scales;
    auto [out, lse, amax_s, amax_o] = graph_.sdpa_fp8(
        Q(), K(), V(), scale(&S::descale_q), scale(&S::descale_k), scale(&S::descale_v),
        scale(&S::descale_s), scale(&S::scale_s), scale(&S::scale_o), options);
    Output(out, kOut, OutDims(), Of(d_.out), TypeOf(d_.dtype));
    Output(lse, kLse, LseDims(), Of(d_.lse), fe::DataType_t::FLOAT);
    Amax(amax_s, 0);
    Amax(amax_o, 1);
  }

  void BackwardFp8() {
    auto options = fe::graph::SDPA_fp8_backward_attributes().set_name("sdpa_fp8_backward");
    SetOptions(options);
    options.set_deterministic_algorithm(d_.deterministic);
    auto scale = [this](float Fp8Scales::*which) { return Fp8Scale(which); };
    using S = Fp8Scales;
    const Tensor q = Q(), k = K(), v = V();
    const Tensor out = Input(kOut, OutDims(), Of(d_.out)),
                 d_out = Input(kDOut, OutDims(), Of(d_.out));
    const Tensor lse = Input(kLse, LseDims(), Of(d_.lse), fe::DataType_t::FLOAT);
    auto [dq, dk, dv, amax_dq, amax_dk, amax_dv, amax_dp] = graph_.sdpa_fp8_backward(
        q, k, v, out, d_out, lse, scale(&S::descale_q), scale(&S::descale_k), scale(&S::descale_v),
        scale(&S::descale_o), scale(&S::descale_d_o), scale(&S::descale_s), scale(&S::descale_d_p),
        scale(&S::scale_s), scale(&S::scale_d_q), scale(&S::scale_d_k), scale(&S::scale_d_v),
        scale(&S::scale_d_p), options);
    OutputLike(dq, kDQ, q);
    OutputLike(dk, kDK, k);
    OutputLike(dv, kDV, v);
    Amax(amax_dp, 0);
    Amax(amax_dq, 1);
    Amax(amax_dk, 2);
    Amax(amax_dv, 3);
  }

  Tensor Fp8Scale(float Fp8Scales::*which) {
    int64_t index = 0;
    while (kFp8ScaleFields[static_cast<size_t>(index)].member != which) ++index;
    return Input(kFp8Scales + index, {1, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::FLOAT);
  }

  static void Amax(const Tensor& tensor, int64_t index) {
    Output(tensor, kFp8Amax + index, {1, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::FLOAT);
  }

  void Backward() {
    auto options = fe::graph::SDPA_backward_attributes().set_name("sdpa_backward");
    SetOptions(options);
    options.set_deterministic_algorithm(d_.deterministic);
    if (d_.total_q > 0) options.set_max_total_seq_len_q(d_.total_q);
    if (d_.total_kv > 0) options.set_max_total_seq_len_kv(d_.total_kv);
    if (d_.bias_kind == BiasKind::kPostScale) {
      const Tensor d_bias = graph_.tensor(fe::graph::Tensor_attributes().set_name("d_bias"));
      Output(d_bias, kDBias, BiasDims(), BiasStrides(), TypeOf(d_.dtype));
      options.set_dbias(d_bias);
    }
    const Tensor q = Q(), k = K(), v = V();
    const Tensor out = Input(kOut, OutDims(), Of(d_.out), TypeOf(d_.dtype));
    const Tensor d_out = Input(kDOut, OutDims(), Of(d_.out), TypeOf(d_.dtype));
    const Tensor lse = Input(kLse, LseDims(), Of(d_.lse), fe::DataType_t::FLOAT);
    if (d_.ragged_q) {
      const Tensor offsets = Offsets(kOutOffsets);
      out->set_ragged_offset(offsets);
      d_out->set_ragged_offset(HasGradientOffsets(d_) ? Offsets(kDOutOffsets) : offsets);
      lse->set_ragged_offset(Offsets(kLseOffsets));
    }
    auto [dq, dk, dv] = graph_.sdpa_backward(q, k, v, out, d_out, lse, options);
    OutputLike(dq, kDQ, q);
    OutputLike(dk, kDK, k);
    OutputLike(dv, kDV, v);
    if (!HasGradientOffsets(d_)) return;
    dq->set_ragged_offset(Offsets(kDQOffsets));
    dk->set_ragged_offset(Offsets(kDKOffsets));
    dv->set_ragged_offset(Offsets(kDVOffsets));
  }

  Tensor Input(int64_t uid, const Four& dims, const Four& strides) {
    return Input(uid, dims, strides, TypeOf(d_.dtype));
  }

  Tensor Input(int64_t uid, const Four& dims, const Four& strides, fe::DataType_t type,
               bool by_value = false) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_uid(uid)
                             .set_name(absl::StrCat("t", uid))
                             .set_dim(dims)
                             .set_stride(strides)
                             .set_data_type(type)
                             .set_is_pass_by_value(by_value));
  }

  Tensor Offsets(Uid uid) {
    return Input(uid, {d_.batch + 1, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::INT64);
  }

  Tensor Q() {
    const Tensor q = Input(kQ, {d_.batch, d_.num_heads, d_.s_q, d_.head_dim_qk}, Of(d_.q));
    if (d_.ragged_q) q->set_ragged_offset(Offsets(kQOffsets));
    return q;
  }

  Tensor K() {
    const Tensor k = Input(kK, KvDims(d_.num_pages_k, d_.head_dim_qk), Of(d_.k));
    if (d_.ragged_kv) k->set_ragged_offset(Offsets(kKOffsets));
    return k;
  }

  Tensor V() {
    const Tensor v = Input(kV, KvDims(d_.num_pages_v, d_.head_dim_v), Of(d_.v));
    if (d_.ragged_kv) v->set_ragged_offset(Offsets(kVOffsets));
    return v;
  }

  static void Output(const Tensor& tensor, int64_t uid, const Four& dims, const Four& strides,
                     fe::DataType_t type) {
    tensor->set_output(true).set_uid(uid).set_dim(dims).set_stride(strides).set_data_type(type);
  }

  static void OutputLike(const Tensor& tensor, Uid uid, const Tensor& like) {
    Output(tensor, uid, like->get_dim(), like->get_stride(), like->get_data_type());
    if (like->get_ragged_offset()) tensor->set_ragged_offset(like->get_ragged_offset());
  }

  Four KvDims(int64_t num_pages, int64_t head_dim) const {
    if (d_.is_paged) return {num_pages, d_.num_kv_heads, d_.page_size, head_dim};
    return {d_.batch, d_.num_kv_heads, d_.s_kv, head_dim};
  }

  Four OutDims() const { return {d_.batch, d_.num_heads, d_.s_q, d_.head_dim_v}; }
  Four LseDims() const { return {d_.batch, d_.num_heads, d_.s_q, 1}; }

  Four BiasDims() const {
    return {d_.bias_per_sequence ? d_.batch : 1, d_.bias_per_head ? d_.num_heads : 1,
            d_.bias_per_row ? d_.s_q : 1, d_.s_kv};
  }

  Four BiasStrides() const {
    const Four dims = BiasDims();
    return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
  }

  // What both passes must be told alike.
  template <typename Options>
  void SetOptions(Options& options) {
    options.set_attn_scale(Input(kScale, {1, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::FLOAT, true));
    options.set_diagonal_alignment(d_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                   : fe::DiagonalAlignment_t::TOP_LEFT);
    if (d_.right != kUnbounded) options.set_diagonal_band_right_bound(static_cast<int>(d_.right));
    // cuDNN's left bound is exclusive.
    if (d_.left != kUnbounded) options.set_diagonal_band_left_bound(static_cast<int>(d_.left + 1));
    if constexpr (requires { options.set_alibi_mask(true); }) {
      if (d_.bias_kind == BiasKind::kAlibi) options.set_alibi_mask(true);
    }
    if (d_.bias_kind == BiasKind::kPostScale) {
      options.set_bias(Input(kBias, BiasDims(), BiasStrides()));
    }
    if (!d_.has_lengths) return;
    const Four dims = {d_.batch, 1, 1, 1}, strides = {1, 1, 1, 1};
    options.set_padding_mask(true)
        .set_seq_len_q(Input(kQLens, dims, strides, fe::DataType_t::INT32))
        .set_seq_len_kv(Input(kKvLens, dims, strides, fe::DataType_t::INT32));
  }

  void SetPages(fe::graph::SDPA_attributes& options) {
    const int64_t pages = d_.pages_per_sequence;
    const Four table = {d_.batch, 1, pages, 1}, rows = {pages, pages, 1, 1};
    options.set_paged_attention_k_table(Input(kPageTableK, table, rows, fe::DataType_t::INT32))
        .set_paged_attention_v_table(Input(kPageTableV, table, rows, fe::DataType_t::INT32))
        .set_paged_attention_max_seq_len_kv(static_cast<int>(d_.s_kv));
  }

  const SdpaDescription& d_;
  fe::graph::Graph graph_;
};

// The field that most likely led to a refusal, with the form that runs.
absl::Status Refusal(const SdpaDescription& d, const std::string& words) {
  std::string_view field = "spec.layout", nearest = "a layout without pages";
  if (d.bias_kind != BiasKind::kNone) {
    field = "spec.bias_kind", nearest = "NONE";
  } else if (d.has_sink) {
    field = "spec.softmax_kind", nearest = "VANILLA";
  } else if (d.deterministic) {
    field = "spec.deterministic", nearest = "false";
  } else if (d.left != kUnbounded) {
    field = "spec.window_left", nearest = "no window";
  } else if (d.right != kUnbounded) {
    field = "spec.causal", nearest = "no mask";
  } else if (d.head_dim_qk != d.head_dim_v || d.head_dim_v > 128) {
    field = "spec.head_dim_v", nearest = "equal head dims up to 128";
  } else if (!d.is_paged) {
    nearest = "BSHD_BSHD_BSHD";
  }
  return UnimplementedField(
      reason::kNotSupported, field,
      absl::StrCat("is refused by cuDNN here (", words, "); ",
                   absl::string_view(nearest.data(), nearest.size()), " may work"));
}

// The machine's fault, and maybe gone in a moment; everything else is a property of the graph.
bool FailedHere(fe::error_t& error) {
  switch (error.get_code()) {
    case fe::error_code_t::CUDA_API_FAILED:
    case fe::error_code_t::INVALID_CUDA_DEVICE:
    case fe::error_code_t::HANDLE_ERROR:
    case fe::error_code_t::NVRTC_COMPILATION_FAILED: return true;
    default: return false;
  }
}

absl::Status Failure(const char* what, fe::error_t& error) {
  return MakeError(absl::StatusCode::kInternal, reason::kInternal, "",
                   absl::StrCat("cuDNN failed ", what, ": ", error.get_message()));
}

}  // namespace

struct SdpaGraph::State {
  mutable fe::graph::Graph graph;
  int64_t workspace_bytes = 0;
  SdpaDescription description;
};

SdpaGraph::SdpaGraph(std::unique_ptr<State> state) : state_(std::move(state)) {}
SdpaGraph::~SdpaGraph() = default;

absl::StatusOr<std::unique_ptr<SdpaGraph>> SdpaGraph::Build(const SdpaDescription& d,
                                                            cudnnHandle_t handle) {
  auto state = std::make_unique<State>();
  state->description = d;
  state->graph = Builder(d).Build();
  fe::graph::Graph& graph = state->graph;
  fe::error_t error = graph.validate();
  if (error.is_good()) error = graph.build_operation_graph(handle);
  if (error.is_good()) error = graph.create_execution_plans({fe::HeurMode_t::A});
  if (error.is_good()) error = graph.check_support(handle);
  if (error.is_good()) error = graph.build_plans(handle);
  if (error.is_good()) error = graph.get_workspace_size(state->workspace_bytes);
  if (error.is_bad()) {
    return FailedHere(error) ? Failure("building a graph", error) : Refusal(d, error.get_message());
  }
  return std::unique_ptr<SdpaGraph>(new SdpaGraph(std::move(state)));
}

int64_t SdpaGraph::workspace_bytes() const { return state_->workspace_bytes; }

absl::Status SdpaGraph::Enqueue(cudnnHandle_t handle, const SdpaPointers& p,
                                std::byte* workspace) const {
  const SdpaDescription& d = state_->description;
  std::unordered_map<int64_t, void*> pack;
  auto add = [&](int64_t uid, const void* pointer) { pack[uid] = const_cast<void*>(pointer); };
  float scale = p.scale;
  add(kScale, &scale);
  add(kQ, p.q);
  add(kK, p.k);
  add(kV, p.v);
  add(kOut, p.out);
  add(kLse, p.lse);
  if (d.bias_kind == BiasKind::kPostScale) add(kBias, p.bias);
  if (d.has_sink) add(kSink, p.sink);
  if (d.is_backward) {
    add(kDOut, p.d_out);
    add(kDQ, p.dq);
    add(kDK, p.dk);
    add(kDV, p.dv);
    if (d.bias_kind == BiasKind::kPostScale) add(kDBias, p.d_bias);
  }
  if (IsFloat8(d.dtype)) {
    for (size_t i = 0; i < kFp8ScaleFields.size(); ++i) {
      pack[kFp8Scales + static_cast<int64_t>(i)] = const_cast<float*>(p.fp8_scales + i * kFp8Slot);
    }
    for (int64_t i = 0; i < kMaxFp8Amax; ++i) pack[kFp8Amax + i] = p.fp8_amax + i * kFp8Slot;
  }
  if (d.ragged_q) {
    add(kQOffsets, p.q_offsets);
    add(kOutOffsets, p.out_offsets);
    add(kLseOffsets, p.lse_offsets);
  }
  if (d.ragged_kv) {
    add(kKOffsets, p.k_offsets);
    add(kVOffsets, p.v_offsets);
  }
  if (HasGradientOffsets(d)) {
    add(kDOutOffsets, p.d_out_offsets);
    add(kDQOffsets, p.dq_offsets);
    add(kDKOffsets, p.dk_offsets);
    add(kDVOffsets, p.dv_offsets);
  }
  if (d.has_lengths) {
    add(kQLens, p.q_lens);
    add(kKvLens, p.kv_lens);
  }
  if (d.is_paged) {
    add(kPageTableK, p.page_table_k);
    add(kPageTableV, p.page_table_v);
  }
  fe::error_t error = state_->graph.execute(handle, pack, workspace);
  return error.is_good() ? absl::OkStatus() : Failure("running a graph", error);
}

}  // namespace attnd
