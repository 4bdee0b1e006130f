#include "engine/cuda/sdpa_graph.h"

#include <cudnn_frontend.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

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
  kQLens,
  kKvLens,
  kPageTableK,
  kPageTableV,
  kScale,
};

fe::DataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return fe::DataType_t::HALF;
    case DType::kBFloat16: return fe::DataType_t::BFLOAT16;
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
    auto options = fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(true);
    options.set_attn_scale(Input(kScale, {1, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::FLOAT, true));
    SetMask(options);
    SetLengths(options);
    const Tensor q =
        Input(kQ, {d_.batch, d_.num_heads, d_.s_q, d_.head_dim_qk}, Of(d_.q), TypeOf(d_.dtype));
    const Tensor k = Input(kK, KvDims(d_.num_pages_k, d_.head_dim_qk), Of(d_.k), TypeOf(d_.dtype));
    const Tensor v = Input(kV, KvDims(d_.num_pages_v, d_.head_dim_v), Of(d_.v), TypeOf(d_.dtype));
    if (d_.ragged_q) q->set_ragged_offset(Offsets(kQOffsets));
    if (d_.ragged_kv) {
      k->set_ragged_offset(Offsets(kKOffsets));
      v->set_ragged_offset(Offsets(kVOffsets));
    }
    auto [out, lse] = graph_.sdpa(q, k, v, options);
    out->set_output(true)
        .set_uid(kOut)
        .set_dim({d_.batch, d_.num_heads, d_.s_q, d_.head_dim_v})
        .set_stride(Of(d_.out))
        .set_data_type(TypeOf(d_.out_dtype));
    lse->set_output(true)
        .set_uid(kLse)
        .set_dim({d_.batch, d_.num_heads, d_.s_q, 1})
        .set_stride(Of(d_.lse))
        .set_data_type(fe::DataType_t::FLOAT);
    if (d_.ragged_q) {
      out->set_ragged_offset(Offsets(kOutOffsets));
      lse->set_ragged_offset(Offsets(kLseOffsets));
    }
    return std::move(graph_);
  }

 private:
  Tensor Input(Uid uid, Four dims, Four strides, fe::DataType_t type, bool by_value = false) {
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

  Four KvDims(int64_t num_pages, int64_t head_dim) const {
    if (d_.is_paged) return {num_pages, d_.num_kv_heads, d_.page_size, head_dim};
    return {d_.batch, d_.num_kv_heads, d_.s_kv, head_dim};
  }

  void SetMask(fe::graph::SDPA_attributes& options) const {
    options.set_diagonal_alignment(d_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                   : fe::DiagonalAlignment_t::TOP_LEFT);
    if (d_.right != kUnbounded) options.set_diagonal_band_right_bound(static_cast<int>(d_.right));
    // cuDNN's left bound is exclusive.
    if (d_.left != kUnbounded) options.set_diagonal_band_left_bound(static_cast<int>(d_.left + 1));
  }

  void SetLengths(fe::graph::SDPA_attributes& options) {
    if (!d_.has_lengths) return;
    const Four dims = {d_.batch, 1, 1, 1}, strides = {1, 1, 1, 1};
    options.set_padding_mask(true)
        .set_seq_len_q(Input(kQLens, dims, strides, fe::DataType_t::INT32))
        .set_seq_len_kv(Input(kKvLens, dims, strides, fe::DataType_t::INT32));
    if (!d_.is_paged) return;
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
  if (d.left != kUnbounded) {
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
  auto add = [&](Uid uid, const void* pointer) { pack[uid] = const_cast<void*>(pointer); };
  float scale = p.scale;
  add(kScale, &scale);
  add(kQ, p.q);
  add(kK, p.k);
  add(kV, p.v);
  add(kOut, p.out);
  add(kLse, p.lse);
  if (d.ragged_q) {
    add(kQOffsets, p.q_offsets);
    add(kOutOffsets, p.out_offsets);
    add(kLseOffsets, p.lse_offsets);
  }
  if (d.ragged_kv) {
    add(kKOffsets, p.k_offsets);
    add(kVOffsets, p.v_offsets);
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
