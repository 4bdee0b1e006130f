// A message is the concatenation of its fields, and an embedded message may come in pieces that the
// reader merges. So a reply is written as metadata, serialized as usual, followed by one more piece
// of `out` (and of `lse`) that holds nothing but `data`: a short header and the tensor itself.

#include "server/wire/encode.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/core/dtype.h"
#include "server/wire/decode_tensor.h"

namespace attnd::wire {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// Where a tensor is in a reply: field numbers from the reply's down to the tensor's.
using FieldPath = std::vector<int>;

// Tags and lengths of the `data` of the tensor at `path`, with `bytes` bytes of data to follow.
grpc::Slice DataHeader(const FieldPath& path, size_t bytes) {
  FieldPath fields = path;
  fields.push_back(v1::Tensor::kDataFieldNumber);
  // From the inside out: what a field holds is all that has been written so far.
  std::string header;
  size_t content = bytes;
  for (auto field = fields.rbegin(); field != fields.rend(); ++field) {
    std::array<uint8_t, 16> piece;
    uint8_t* end = CodedOutputStream::WriteVarint32ToArray(
        WireFormatLite::MakeTag(*field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED), piece.data());
    end = CodedOutputStream::WriteVarint64ToArray(content, end);
    header.insert(0, reinterpret_cast<const char*>(piece.data()),
                  static_cast<size_t>(end - piece.data()));
    content = bytes + header.size();
  }
  return grpc::Slice(header);
}

using Memory = std::shared_ptr<const PoolBuffer>;

// A slice over a part of the block, which goes back to its pool when gRPC has dropped all its
// slices.
grpc::Slice BlockSlice(std::span<const std::byte> bytes, const Memory& memory) {
  auto* const owner = new Memory(memory);
  return grpc::Slice(
      const_cast<std::byte*>(bytes.data()), bytes.size(),
      [](void* user_data) { delete static_cast<Memory*>(user_data); }, owner);
}

v1::Tensor DescribeTensor(const TensorDesc& desc) {
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::DataType>(desc.dtype));
  tensor.mutable_shape()->Add(desc.shape.begin(), desc.shape.end());
  return tensor;
}

// One output on its way into the reply.
struct Output {
  const TensorDesc& desc;
  std::span<const std::byte> bytes;
  Destination destination;
  FieldPath path;
};

// Numbers into the message, bytes into the slices that follow it.
void PlaceTensor(const Output& output, const Memory& memory, v1::Tensor& tensor,
                 std::vector<grpc::Slice>& slices) {
  tensor = DescribeTensor(output.desc);
  const int64_t elements = *NumElements(output.desc.shape);
  if (elements == 0) return;
  if (output.destination == Destination::kInMessage) {
    slices.push_back(DataHeader(output.path, output.bytes.size()));
    slices.push_back(BlockSlice(output.bytes, memory));
    return;
  }
  for (int64_t i = 0; i < elements; ++i) {
    tensor.add_values(LoadElement(output.desc.dtype, output.bytes.data(), i));
  }
}

v1::ExecutionInfo EncodeInfo(const ExecutionReport& report) {
  v1::ExecutionInfo info;
  info.set_backend(report.backend);
  info.set_device(report.device);
  info.set_engine(report.engine);
  info.set_batch_size(report.batch_size);
  info.set_queue_us(absl::ToDoubleMicroseconds(report.queue));
  info.set_copy_in_us(absl::ToDoubleMicroseconds(report.copy_in));
  info.set_compute_us(absl::ToDoubleMicroseconds(report.compute));
  info.set_copy_out_us(absl::ToDoubleMicroseconds(report.copy_out));
  info.set_transport("message");
  info.set_plan_cache_hit(report.plan_cache_hit);
  return info;
}

// As ForwardBuffers and BackwardBuffers have them; empty where the reply has none.
std::vector<float> AmaxOf(const CallResult& result) {
  const std::span<const std::byte> bytes = result.bytes(Piece::kAmax);
  std::vector<float> amax(bytes.size() / sizeof(float));
  for (size_t i = 0; i < amax.size(); ++i) {
    amax[i] = LoadElement(DType::kFloat32, bytes.data(), static_cast<int64_t>(i));
  }
  return amax;
}

v1::ResolvedView EncodeView(const TensorView& view) {
  v1::ResolvedView proto;
  const std::string_view name = Name(view.buffer);
  proto.set_buffer(name.data(), name.size());
  proto.set_byte_offset(view.byte_offset);
  const Strides& s = view.strides;
  for (int64_t stride : {s.batch, s.seq, s.head, s.dim}) proto.add_strides(stride);
  if (view.group_heads != 0) proto.set_group_stride(view.group_stride);
  return proto;
}

}  // namespace

grpc::ByteBuffer EncodeForward(const DecodedCall& decoded, const CallResult& result) {
  v1::ForwardResponse response;
  std::vector<grpc::Slice> slices(1);  // The first is the message, written last.
  *response.mutable_info() = EncodeInfo(result.report);
  if (decoded.description.spec.dropout) {
    response.mutable_rng()->set_probability(decoded.description.spec.dropout->probability);
    response.mutable_rng()->set_seed(decoded.description.spec.dropout->seed);
    response.mutable_rng()->set_offset(decoded.description.spec.dropout->offset);
  }
  if (const std::vector<float> amax = AmaxOf(result); !amax.empty()) {
    response.mutable_amax()->set_s(amax[0]);
    response.mutable_amax()->set_o(amax[1]);
  }
  if (!result.context.empty()) {
    response.mutable_context()->set_id(result.context);
    response.mutable_context()->set_owner(decoded.owner);
  }
  auto place = [&](Piece piece, Destination destination, int field, v1::Tensor& tensor) {
    PlaceTensor({*result.layout.desc(piece), result.bytes(piece), destination, {field}},
                result.memory, tensor, slices);
  };
  place(Piece::kOut, decoded.out, v1::ForwardResponse::kOutFieldNumber, *response.mutable_out());
  if (decoded.description.return_lse) {
    place(Piece::kLse, decoded.lse, v1::ForwardResponse::kLseFieldNumber, *response.mutable_lse());
  }
  slices[0] = grpc::Slice(response.SerializeAsString());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer EncodeBackward(const DecodedCall& decoded, const CallResult& result) {
  v1::BackwardResponse response;
  std::vector<grpc::Slice> slices(1);  // The first is the message, written last.
  *response.mutable_info() = EncodeInfo(result.report);
  if (const std::vector<float> amax = AmaxOf(result); !amax.empty()) {
    response.mutable_amax()->set_d_p(amax[0]);
    response.mutable_amax()->set_d_q(amax[1]);
    response.mutable_amax()->set_d_k(amax[2]);
    response.mutable_amax()->set_d_v(amax[3]);
  }
  auto place = [&](Piece piece, FieldPath path,
                   v1::Tensor* (*mutable_tensor)(v1::BackwardResponse&)) {
    const TensorDesc* const desc = result.layout.desc(piece);
    if (desc == nullptr) return;
    PlaceTensor({*desc, result.bytes(piece), decoded.grads, std::move(path)}, result.memory,
                *mutable_tensor(response), slices);
  };
  using Response = v1::BackwardResponse;
  using Grads = v1::QkvBuffers;
  constexpr int kGrads = Response::kGradsFieldNumber;
  place(Piece::kQkv, {kGrads, Grads::kQkvFieldNumber},
        [](Response& r) { return r.mutable_grads()->mutable_qkv(); });
  place(Piece::kQ, {kGrads, Grads::kQFieldNumber},
        [](Response& r) { return r.mutable_grads()->mutable_q(); });
  place(Piece::kKv, {kGrads, Grads::kKvFieldNumber},
        [](Response& r) { return r.mutable_grads()->mutable_kv(); });
  place(Piece::kK, {kGrads, Grads::kKFieldNumber},
        [](Response& r) { return r.mutable_grads()->mutable_k(); });
  place(Piece::kV, {kGrads, Grads::kVFieldNumber},
        [](Response& r) { return r.mutable_grads()->mutable_v(); });
  place(Piece::kBias, {Response::kDBiasFieldNumber},
        [](Response& r) { return r.mutable_d_bias(); });
  place(Piece::kSoftmaxOffset, {Response::kDSoftmaxOffsetFieldNumber},
        [](Response& r) { return r.mutable_d_softmax_offset(); });
  slices[0] = grpc::Slice(response.SerializeAsString());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

v1::PlanResponse Unsupported(const absl::Status& reason) {
  v1::PlanResponse response;
  response.set_reason(std::string(reason.message()));
  return response;
}

v1::PlanResponse EncodePlan(const PlanReport& report, const absl::Status& obstacle) {
  const absl::Status& support = obstacle.ok() ? report.support : obstacle;
  v1::PlanResponse response = Unsupported(support);
  if (support.ok()) {
    response.set_supported(true);
    response.set_backend(report.backend);
    response.set_engine(report.engine);
    response.set_workspace_bytes(report.workspace_bytes);
    response.set_device_bytes(report.device_bytes);
    response.set_deterministic_available(report.deterministic_available);
  }
  v1::ResolvedViews& views = *response.mutable_resolved();
  *views.mutable_q() = EncodeView(report.problem.q);
  *views.mutable_k() = EncodeView(report.problem.k);
  *views.mutable_v() = EncodeView(report.problem.v);
  *views.mutable_out() = EncodeView(report.problem.out);
  return response;
}

}  // namespace attnd::wire
