// The walker against the generated parser: same verdict and same message, whatever the bytes.

#include "server/wire/tensor_bytes.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "attnd/v1/attention.pb.h"
#include "server/wire/message.h"

namespace attnd::wire {
namespace {

// Slices of random sizes, as a network would cut them.
grpc::ByteBuffer Cut(const std::string& bytes, std::mt19937& random) {
  std::vector<grpc::Slice> slices;
  for (size_t i = 0; i < bytes.size();) {
    const size_t size = std::min<size_t>(1 + random() % 40, bytes.size() - i);
    slices.emplace_back(bytes.data() + i, size);
    i += size;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Puts the data that the walker left outside back into the message's tensors.
void Restore(const TensorBytes& bytes, v1::Tensor& tensor) {
  if (!tensor.has_data()) return;
  std::string data(static_cast<size_t>(bytes.SizeOf(tensor)), '\0');
  bytes.CopyTo(tensor, std::as_writable_bytes(std::span(data)));
  tensor.set_data(data);
}

void RestoreAll(const TensorBytes& bytes, v1::ForwardRequest& request) {
  if (request.has_inputs()) {
    v1::QkvBuffers& inputs = *request.mutable_inputs();
    if (inputs.has_qkv()) Restore(bytes, *inputs.mutable_qkv());
    if (inputs.has_q()) Restore(bytes, *inputs.mutable_q());
    if (inputs.has_kv()) Restore(bytes, *inputs.mutable_kv());
    if (inputs.has_k()) Restore(bytes, *inputs.mutable_k());
    if (inputs.has_v()) Restore(bytes, *inputs.mutable_v());
  }
  if (request.has_bias()) Restore(bytes, *request.mutable_bias());
  if (request.has_softmax_offset()) Restore(bytes, *request.mutable_softmax_offset());
  if (request.has_sequences()) {
    v1::Sequences& sequences = *request.mutable_sequences();
    if (sequences.has_page_table_k()) Restore(bytes, *sequences.mutable_page_table_k());
    if (sequences.has_page_table_v()) Restore(bytes, *sequences.mutable_page_table_v());
  }
}

// True where both accept; both must agree.
bool Compare(const std::string& bytes, std::mt19937& random) {
  v1::ForwardRequest expected, got;
  const bool valid = expected.ParseFromString(bytes);
  TensorBytes tensors;
  const absl::Status status = tensors.Parse(Cut(bytes, random), got);
  EXPECT_EQ(status.ok(), valid) << ::testing::PrintToString(bytes);
  if (!valid || !status.ok()) return false;
  RestoreAll(tensors, got);
  EXPECT_EQ(got.SerializeAsString(), expected.SerializeAsString());
  return true;
}

v1::ForwardRequest Example() {
  v1::ForwardRequest request;
  request.mutable_spec()->set_layout(v1::QKV_LAYOUT_PAGED_KV_BSHD_BSHD_BSHD);
  request.mutable_spec()->set_scale(0.5);
  v1::Tensor* q = request.mutable_inputs()->mutable_q();
  q->set_dtype(v1::DATA_TYPE_FLOAT32);
  q->add_shape(25);
  q->set_data(std::string(100, 'q'));
  request.mutable_inputs()->mutable_k()->set_data("kkkk");
  request.mutable_inputs()->mutable_v()->add_values(1.5f);
  request.mutable_bias()->mutable_handle()->set_id("bias");
  request.mutable_softmax_offset()->set_data("");
  for (int64_t end : {0, 3, 300}) request.mutable_sequences()->add_cu_seqlens_q(end);
  request.mutable_sequences()->mutable_page_table_k()->set_data("pppp");
  request.mutable_out_placement()->mutable_values();
  request.set_return_lse(true);
  return request;
}

TEST(TensorBytes, ReadsAWholeRequestAndLeavesItsDataOutside) {
  std::mt19937 random(1);
  EXPECT_TRUE(Compare(Example().SerializeAsString(), random));
  v1::ForwardRequest request;
  TensorBytes tensors;
  ASSERT_TRUE(tensors.Parse(Cut(Example().SerializeAsString(), random), request).ok());
  EXPECT_EQ(request.inputs().q().data().size(), 0u);
  EXPECT_TRUE(request.inputs().q().has_data());
  EXPECT_EQ(tensors.SizeOf(request.inputs().q()), 100);
  EXPECT_EQ(tensors.SizeOf(request.inputs().v()), 0);
}

TEST(TensorBytes, MergesPiecesAndTheLastDataWins) {
  std::mt19937 random(2);
  v1::ForwardRequest first = Example(), second;
  second.mutable_inputs()->mutable_q()->set_data("later");
  second.mutable_inputs()->mutable_kv()->set_data("new");
  second.mutable_inputs()->mutable_q()->add_shape(7);
  const std::string bytes = first.SerializeAsString() + second.SerializeAsString();
  EXPECT_TRUE(Compare(bytes, random));
  v1::ForwardRequest merged;
  TensorBytes tensors;
  ASSERT_TRUE(tensors.Parse(Cut(bytes, random), merged).ok());
  EXPECT_EQ(tensors.SizeOf(merged.inputs().q()), 5);
  EXPECT_THAT(merged.inputs().q().shape(), ::testing::ElementsAre(25, 7));
}

TEST(TensorBytes, KeepsUnknownFieldsGroupsAndWrongWireTypesToTheGeneratedParser) {
  std::mt19937 random(3);
  const std::string base = Example().SerializeAsString();
  const std::string pieces[] = {
      std::string("\xa2\x06\x02hi", 5),            // Field 100, bytes.
      std::string("\xa3\x06\x08\x01\xa4\x06", 6),  // Field 100, a group.
      std::string("\xa3\x06\x08\x01", 4),          // A group without an end.
      std::string("\x18\x05", 2),                  // inputs as a varint.
      std::string("\x1a\x04\x12\x02\x18\x07", 6),  // inputs.q.data as a varint.
      std::string("\x1a\x7f\x12", 3),              // inputs longer than what is left.
      std::string("\x1a\x04\x12\x05\x1a\x00", 6),  // inputs.q longer than inputs.
      std::string("\x1a\x03\x12\x01\x1a", 5),      // inputs.q ends within a tag's field.
      std::string("\x00", 1),                      // Tag 0.
      std::string("\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 11),
      std::string("\x0c", 1),  // An end-group tag that nothing opened.
  };
  for (const std::string& piece : pieces) {
    Compare(base + piece, random);
    Compare(piece + base, random);
  }
}

TEST(TensorBytes, TakesDataOfAnySizeAndLittleElse) {
  v1::ForwardRequest request;
  request.mutable_inputs()->mutable_q()->set_data(std::string(40 << 20, 'q'));
  const auto parse = [](const v1::ForwardRequest& message) {
    v1::ForwardRequest parsed;
    return TensorBytes().Parse(Serialize(message), parsed);
  };
  EXPECT_TRUE(parse(request).ok());
  request.mutable_sequences()->mutable_cu_seqlens_q()->Resize(40 << 20, 1);
  EXPECT_EQ(parse(request).code(), absl::StatusCode::kResourceExhausted);
}

TEST(TensorBytes, AgreesWithTheGeneratedParserOnMutatedMessages) {
  google::protobuf::SetLogHandler(nullptr);  // It has something to say of each.
  std::mt19937 random(4);
  const std::string base = Example().SerializeAsString();
  int accepted = 0;
  constexpr int kMessages = 100'000;
  for (int i = 0; i < kMessages; ++i) {
    std::string bytes = base;
    for (unsigned edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes.resize(at + 1); break;
        case 2: bytes.insert(at, base, random() % base.size(), random() % 30); break;
        case 3: bytes.erase(at, random() % 10); break;
      }
      if (bytes.empty()) bytes = base;
    }
    accepted += Compare(bytes, random);
  }
  EXPECT_GT(accepted, kMessages / 20);
  EXPECT_LT(accepted, kMessages);
}

}  // namespace
}  // namespace attnd::wire
