// A walk over the wire format, which is a list of fields: those that can hold a tensor are entered,
// a tensor's data is stepped over and its place noted, and everything else is collected as it is
// and left to the generated parser. So unknown fields, groups, wrong wire types and repeated fields
// mean what they mean there: a later data replaces an earlier one, and pieces of a message merge.

#include "server/wire/tensor_bytes.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"
#include "server/wire/message.h"

namespace attnd::wire {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;

namespace {

// The contract's messages nest without cycles, so this ends.
bool HoldsTensor(const Descriptor* type) {
  if (type == v1::Tensor::descriptor()) return true;
  for (int i = 0; i < type->field_count(); ++i) {
    const Descriptor* field_type = type->field(i)->message_type();
    if (field_type != nullptr && HoldsTensor(field_type)) return true;
  }
  return false;
}

}  // namespace

class TensorWalker {
 public:
  TensorWalker(CodedInputStream& input, int64_t total_bytes, TensorBytes& result)
      : input_(input), total_bytes_(total_bytes), result_(result) {}

  // Reads fields up to the current limit; false where the bytes are no message of this type.
  bool ReadMessage(Message& message) {
    std::string rest;
    {
      StringOutputStream rest_stream(&rest);
      CodedOutputStream rest_output(&rest_stream);
      while (const uint32_t tag = input_.ReadTag()) {
        if (!ReadField(message, tag, rest_output) || MetadataIsTooLarge(0)) return false;
      }
    }
    if (!input_.ConsumedEntireMessage()) return false;
    if (rest.empty()) return true;
    CodedInputStream rest_input(reinterpret_cast<const uint8_t*>(rest.data()),
                                static_cast<int>(rest.size()));
    return message.MergeFromCodedStream(&rest_input) && rest_input.ConsumedEntireMessage();
  }

  // Bytes beside data, where they are why ReadMessage failed; else 0.
  int64_t too_many_bytes() const { return too_many_bytes_; }

 private:
  // Of what has been read and the next `more` bytes.
  bool MetadataIsTooLarge(int64_t more) {
    const int64_t bytes = input_.CurrentPosition() - data_bytes_ + more;
    if (bytes > kMostMetadataBytes) too_many_bytes_ = bytes;
    return bytes > kMostMetadataBytes;
  }

  bool ReadField(Message& message, uint32_t tag, CodedOutputStream& rest) {
    const bool delimited =
        WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    const int number = WireFormatLite::GetTagFieldNumber(tag);
    const FieldDescriptor* field = message.GetDescriptor()->FindFieldByNumber(number);
    if (!delimited) return WireFormatLite::SkipField(&input_, tag, &rest);
    if (field == nullptr) return CopyField(tag, rest);
    if (message.GetDescriptor() == v1::Tensor::descriptor() &&
        number == v1::Tensor::kDataFieldNumber) {
      return NoteData(static_cast<v1::Tensor&>(message));
    }
    if (field->message_type() == nullptr || !HoldsTensor(field->message_type())) {
      return CopyField(tag, rest);
    }
    int size = 0;
    if (!input_.ReadVarintSizeAsInt(&size)) return false;
    Message* child = field->is_repeated()
                         ? message.GetReflection()->AddMessage(&message, field)
                         : message.GetReflection()->MutableMessage(&message, field);
    const CodedInputStream::Limit outer = input_.PushLimit(size);
    if (input_.BytesUntilLimit() != size) return false;  // It would leave its parent.
    // The bytes may end before the message does.
    const bool ok = ReadMessage(*child) && input_.BytesUntilLimit() == 0;
    input_.PopLimit(outer);
    return ok;
  }

  // A length-delimited field, as it is; its length is looked at before its bytes are taken.
  bool CopyField(uint32_t tag, CodedOutputStream& rest) {
    int size = 0;
    if (!input_.ReadVarintSizeAsInt(&size)) return false;
    if (size > total_bytes_ - input_.CurrentPosition() || MetadataIsTooLarge(size)) return false;
    std::string bytes;
    if (!input_.ReadString(&bytes, size)) return false;
    rest.WriteVarint32(tag);
    rest.WriteVarint32(static_cast<uint32_t>(size));
    rest.WriteString(bytes);
    return true;
  }

  bool NoteData(v1::Tensor& tensor) {
    int size = 0;
    if (!input_.ReadVarintSizeAsInt(&size)) return false;
    tensor.set_data("");
    result_.ranges_[&tensor] = {input_.CurrentPosition(), size};
    data_bytes_ += size;
    return input_.Skip(size);
  }

  CodedInputStream& input_;
  const int64_t total_bytes_;
  TensorBytes& result_;
  int64_t data_bytes_ = 0;
  int64_t too_many_bytes_ = 0;
};

absl::Status TensorBytes::Parse(const grpc::ByteBuffer& bytes, Message& message) {
  // The reader only reads; its interface predates const.
  grpc::ProtoBufferReader reader(const_cast<grpc::ByteBuffer*>(&bytes));
  CodedInputStream input(&reader);
  TensorWalker walker(input, static_cast<int64_t>(bytes.Length()), *this);
  if (!reader.status().ok() || !bytes.Dump(&slices_).ok() || !walker.ReadMessage(message)) {
    if (walker.too_many_bytes() > 0) return MetadataTooLarge(walker.too_many_bytes());
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformedMessage, "",
                     absl::StrCat("the request's ", bytes.Length(), " bytes are no valid ",
                                  message.GetTypeName()));
  }
  int64_t end = 0;
  for (const grpc::Slice& slice : slices_) {
    end += static_cast<int64_t>(slice.size());
    slice_ends_.push_back(end);
  }
  return absl::OkStatus();
}

int64_t TensorBytes::SizeOf(const v1::Tensor& tensor) const {
  const auto it = ranges_.find(&tensor);
  return it == ranges_.end() ? 0 : it->second.size;
}

void TensorBytes::CopyTo(const v1::Tensor& tensor, std::span<std::byte> target) const {
  if (target.empty()) return;
  int64_t offset = ranges_.at(&tensor).offset;
  auto slice = static_cast<size_t>(
      std::upper_bound(slice_ends_.begin(), slice_ends_.end(), offset) - slice_ends_.begin());
  for (; !target.empty(); ++slice) {
    const auto size = static_cast<int64_t>(slices_[slice].size());
    const int64_t skipped = offset - (slice_ends_[slice] - size);
    const size_t count = std::min(target.size(), static_cast<size_t>(size - skipped));
    std::memcpy(target.data(), slices_[slice].begin() + skipped, count);
    target = target.subspan(count);
    offset += static_cast<int64_t>(count);
  }
}

}  // namespace attnd::wire
