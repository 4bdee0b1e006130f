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

// Tags and lengths of `ForwardResponse.<field>.data` with `bytes` bytes of data to follow.
grpc::Slice DataHeader(int field, size_t bytes) {
  const uint32_t outer = WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  const uint32_t inner = WireFormatLite::MakeTag(v1::Tensor::kDataFieldNumber,
                                                 WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  const size_t message =
      CodedOutputStream::VarintSize32(inner) + CodedOutputStream::VarintSize64(bytes) + bytes;
  std::array<uint8_t, 32> header;
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(outer, header.data());
  end = CodedOutputStream::WriteVarint64ToArray(message, end);
  end = CodedOutputStream::WriteVarint32ToArray(inner, end);
  end = CodedOutputStream::WriteVarint64ToArray(bytes, end);
  return grpc::Slice(header.data(), static_cast<size_t>(end - header.data()));
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
  int field;  // Of ForwardResponse.
};

// Numbers into the message, bytes into the slices that follow it.
void PlaceTensor(const Output& output, const Memory& memory, v1::Tensor& tensor,
                 std::vector<grpc::Slice>& slices) {
  tensor = DescribeTensor(output.desc);
  const int64_t elements = *NumElements(output.desc.shape);
  if (elements == 0) return;
  if (output.destination == Destination::kInMessage) {
    slices.push_back(DataHeader(output.field, output.bytes.size()));
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

v1::ResolvedView EncodeView(const TensorView& view) {
  v1::ResolvedView proto;
  const std::string_view name = Name(view.buffer);
  proto.set_buffer(name.data(), name.size());
  proto.set_byte_offset(view.byte_offset);
  const Strides& s = view.strides;
  for (int64_t stride : {s.batch, s.seq, s.head, s.dim}) proto.add_strides(stride);
  return proto;
}

}  // namespace

grpc::ByteBuffer EncodeForward(const DecodedForward& decoded, const ForwardResult& result) {
  v1::ForwardResponse response;
  std::vector<grpc::Slice> slices(1);  // The first is the message, written last.
  *response.mutable_info() = EncodeInfo(result.report);
  PlaceTensor({result.out_desc, result.out, decoded.out, v1::ForwardResponse::kOutFieldNumber},
              result.memory, *response.mutable_out(), slices);
  if (decoded.description.return_lse) {
    PlaceTensor({result.lse_desc, result.lse, decoded.lse, v1::ForwardResponse::kLseFieldNumber},
                result.memory, *response.mutable_lse(), slices);
  }
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
