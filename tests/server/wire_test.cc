// Messages to requests and results to messages, against the generated parser.

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "engine/core/layout.h"
#include "engine/core/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/wire/decode.h"
#include "server/wire/decode_tensor.h"
#include "server/wire/encode.h"
#include "server/wire/message.h"
#include "server/wire/status.h"

namespace attnd::wire {
namespace {

std::shared_ptr<const PoolBuffer> Floats(MemoryPool& pool, const std::vector<float>& values) {
  PoolBuffer buffer = *pool.Allocate(static_cast<int64_t>(values.size() * 4));
  std::copy_n(values.begin(), values.size(), reinterpret_cast<float*>(buffer.data()));
  return std::make_shared<const PoolBuffer>(std::move(buffer));
}

CallResult TwoOutputs(MemoryPool& pool) {
  CallResult result;
  result.layout.Add(Piece::kOut, {DType::kFloat32, {1, 2, 1, 2}});
  result.layout.Add(Piece::kLse, {DType::kFloat32, {1, 1, 2}});
  std::vector<float> block(static_cast<size_t>(result.layout.bytes() / 4));
  for (int i = 0; i < 4; ++i) block[static_cast<size_t>(i)] = static_cast<float>(i + 1);
  block[256 / 4] = 5;
  block[256 / 4 + 1] = 6;
  result.memory = Floats(pool, block);
  result.report.backend = "cpu";
  return result;
}

v1::ForwardResponse Decode(const grpc::ByteBuffer& bytes) {
  v1::ForwardResponse response;
  EXPECT_TRUE(Parse(bytes, response).ok());
  return response;
}

TEST(Encode, OutputsTravelAsSlicesThatTheGeneratedParserReads) {
  auto pool = MakeHostPool(1 << 20, "--pool");
  DecodedCall decoded;
  decoded.description.return_lse = true;
  {
    const v1::ForwardResponse response = Decode(EncodeForward(decoded, TwoOutputs(*pool)));
    EXPECT_EQ(response.out().dtype(), v1::DATA_TYPE_FLOAT32);
    EXPECT_EQ(response.out().shape_size(), 4);
    const float out[] = {1, 2, 3, 4}, lse[] = {5, 6};
    EXPECT_EQ(response.out().data(), std::string(reinterpret_cast<const char*>(out), sizeof(out)));
    EXPECT_EQ(response.lse().data(), std::string(reinterpret_cast<const char*>(lse), sizeof(lse)));
    EXPECT_EQ(response.info().backend(), "cpu");
  }
  EXPECT_EQ(pool->stats().in_use_bytes, 0) << "sent slices give their blocks back";
}

TEST(Encode, AmaxIsInTheReplyWhereTheCallHasIt) {
  auto pool = MakeHostPool(1 << 20, "--pool");
  EXPECT_FALSE(Decode(EncodeForward({}, TwoOutputs(*pool))).has_amax());
  CallResult forward;
  forward.layout.Add(Piece::kOut, {DType::kFloat8E4M3, {0}});
  forward.layout.Add(Piece::kAmax, {DType::kFloat32, {2}});
  forward.memory = Floats(*pool, {0.5f, 3});
  const v1::ForwardResponse response = Decode(EncodeForward({}, forward));
  EXPECT_EQ(response.amax().s(), 0.5f);
  EXPECT_EQ(response.amax().o(), 3);
  EXPECT_FALSE(response.amax().has_d_p());
  CallResult backward;
  backward.layout.Add(Piece::kAmax, {DType::kFloat32, {4}});
  backward.memory = Floats(*pool, {1, 2, 3, 0});
  v1::BackwardResponse gradients;
  ASSERT_TRUE(Parse(EncodeBackward({}, backward), gradients).ok());
  EXPECT_EQ(gradients.amax().d_p(), 1);
  EXPECT_EQ(gradients.amax().d_q(), 2);
  EXPECT_EQ(gradients.amax().d_k(), 3);
  EXPECT_TRUE(gradients.amax().has_d_v());
  EXPECT_FALSE(gradients.amax().has_s());
}

TEST(Encode, TheBlockStaysWhileTheReplyDoes) {
  auto pool = MakeHostPool(1 << 20, "--pool");
  grpc::ByteBuffer reply = EncodeForward({}, TwoOutputs(*pool));
  EXPECT_GT(pool->stats().in_use_bytes, 0);
  reply.Clear();
  EXPECT_EQ(pool->stats().in_use_bytes, 0);
}

TEST(Encode, SmallOutputsMayTravelAsNumbers) {
  auto pool = MakeHostPool(1 << 20, "--pool");
  DecodedCall decoded;
  decoded.out = Destination::kValues;
  const v1::ForwardResponse response = Decode(EncodeForward(decoded, TwoOutputs(*pool)));
  EXPECT_EQ(std::vector<float>(response.out().values().begin(), response.out().values().end()),
            (std::vector<float>{1, 2, 3, 4}));
  EXPECT_FALSE(response.out().has_data());
  EXPECT_FALSE(response.has_lse());
}

TEST(Encode, LengthsOfEverySizeAreRight) {
  auto pool = MakeHostPool(64 << 20, "--pool");
  for (int64_t elements : {0, 1, 31, 32, 4095, 4096, 530'000, 4'200'000}) {
    CallResult result;
    result.layout.Add(Piece::kOut, {DType::kFloat32, {elements}});
    const auto block = static_cast<size_t>(result.layout.bytes() / 4);
    result.memory = Floats(*pool, std::vector<float>(block, 0.5f));
    const v1::ForwardResponse response = Decode(EncodeForward({}, std::exchange(result, {})));
    EXPECT_EQ(response.out().data().size(), static_cast<size_t>(elements * 4));
  }
}

TEST(Encode, GradientsLieInTheReplyAsTheInputsDidInTheRequest) {
  auto pool = MakeHostPool(64 << 20, "--pool");
  for (int64_t elements : {3, 1000, 2'200'000}) {
    CallResult result;
    result.layout.Add(Piece::kQ, {DType::kFloat32, {elements}});
    result.layout.Add(Piece::kKv, {DType::kFloat32, {2, elements}});
    result.layout.Add(Piece::kBias, {DType::kFloat32, {1, 1, 1, 4}});
    std::vector<float> block(static_cast<size_t>(result.layout.bytes() / 4));
    std::iota(block.begin(), block.end(), 0.0f);
    result.memory = Floats(*pool, block);
    const grpc::ByteBuffer reply = EncodeBackward({}, result);
    v1::BackwardResponse response;
    ASSERT_TRUE(Parse(reply, response).ok());
    auto bytes = [&](Piece piece) {
      const auto span = result.bytes(piece);
      return std::string(reinterpret_cast<const char*>(span.data()), span.size());
    };
    EXPECT_FALSE(response.grads().has_qkv());
    EXPECT_FALSE(response.grads().has_k());
    EXPECT_FALSE(response.has_d_softmax_offset());
    EXPECT_EQ(response.grads().q().data(), bytes(Piece::kQ));
    EXPECT_EQ(response.grads().kv().data(), bytes(Piece::kKv));
    EXPECT_EQ(response.grads().kv().shape(0), 2);
    EXPECT_EQ(response.d_bias().data(), bytes(Piece::kBias));
    EXPECT_EQ(response.d_bias().shape_size(), 4);
  }
}

TEST(Decode, EveryFp8ScaleOfTheContractIsRead) {
  v1::BackwardRequest request;
  const auto& fields = *v1::Fp8Scales::descriptor();
  ASSERT_EQ(static_cast<size_t>(fields.field_count()), kFp8ScaleFields.size());
  v1::Fp8Scales& scales = *request.mutable_fp8();
  for (int i = 0; i < fields.field_count(); ++i) {
    EXPECT_EQ(fields.field(i)->name(), kFp8ScaleFields[static_cast<size_t>(i)].name);
    if (i != 3) scales.GetReflection()->SetFloat(&scales, fields.field(i), 1.0f + i);
  }
  *request.mutable_spec()->mutable_fp8() = scales;
  const auto decoded = DecodeBackward(request, TensorBytes());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const CallDescription& d = decoded->description;
  for (size_t i = 0; i < kFp8ScaleFields.size(); ++i) {
    const float value = 1.0f + static_cast<float>(i);
    EXPECT_EQ((*d.spec.fp8).*kFp8ScaleFields[i].member, i == 3 ? 1.0f : value);
    EXPECT_EQ((*d.backward.fp8)[i], i == 3 ? std::nullopt : std::optional<float>(value));
  }
}

TEST(Message, BytesThatAreNoMessageAreInvalid) {
  const grpc::Slice slice(std::string("\xff\xff\xff\xff"));
  v1::ForwardRequest request;
  const absl::Status status = Parse(grpc::ByteBuffer(&slice, 1), request);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(status), reason::kMalformedMessage);
}

// A tensor as it arrives: inside a request, from bytes.
struct Received {
  explicit Received(const v1::Tensor& tensor) {
    *request.mutable_inputs()->mutable_q() = tensor;
    const grpc::ByteBuffer buffer = Serialize(request);
    request.Clear();
    EXPECT_TRUE(bytes.Parse(buffer, request).ok());
  }
  const v1::Tensor& tensor() const { return request.inputs().q(); }

  v1::ForwardRequest request;
  TensorBytes bytes;
};

absl::StatusOr<TensorDesc> DecodeOne(const v1::Tensor& tensor) {
  const Received received(tensor);
  absl::Status unbuilt;
  auto desc = DecodeTensor(received.tensor(), &received.bytes, "inputs.q", unbuilt);
  return desc.ok() && !unbuilt.ok() ? unbuilt : desc;
}

v1::Tensor TwoFloats() {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DATA_TYPE_FLOAT32);
  tensor.add_shape(2);
  return tensor;
}

TEST(DecodeTensor, WantsExactlyOneSourceOfTheRightSize) {
  v1::Tensor tensor = TwoFloats();
  EXPECT_EQ(ErrorField(DecodeOne(tensor).status()), "inputs.q");
  tensor.set_data(std::string(7, 'x'));
  EXPECT_EQ(ErrorField(DecodeOne(tensor).status()), "inputs.q.data");
  tensor.set_data(std::string(8, 'x'));
  EXPECT_TRUE(DecodeOne(tensor).ok());
  tensor.add_values(1);
  EXPECT_EQ(ErrorReason(DecodeOne(tensor).status()), reason::kMisplacedField);
  tensor.clear_data();
  EXPECT_EQ(ErrorField(DecodeOne(tensor).status()), "inputs.q.values");
  tensor.add_values(2);
  EXPECT_TRUE(DecodeOne(tensor).ok());
}

TEST(DecodeTensor, AnEmptyTensorNeedsNoSource) {
  v1::Tensor tensor = TwoFloats();
  tensor.add_shape(0);
  EXPECT_TRUE(DecodeOne(tensor).ok());
}

TEST(DecodeTensor, SourcesThatAreNotBuiltAreNamed) {
  v1::Tensor tensor = TwoFloats();
  tensor.mutable_handle()->set_id("x");
  const absl::Status status = DecodeOne(tensor).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ErrorField(status), "inputs.q.handle");
}

TEST(DecodeTensor, ValuesAreConverted) {
  v1::Tensor tensor;
  for (float value : {1.0f, -2.5f, 65504.0f}) tensor.add_values(value);
  std::array<uint16_t, 3> half{};
  FillTensor(tensor, TensorBytes(), DType::kFloat16, std::as_writable_bytes(std::span(half)));
  EXPECT_EQ(half, (std::array<uint16_t, 3>{0x3c00, 0xc100, 0x7bff}));
}

TEST(DecodeTensor, DataIsCopiedAsItIs) {
  v1::Tensor tensor = TwoFloats();
  tensor.set_data("12345678");
  const Received received(tensor);
  std::string copy(8, '\0');
  FillTensor(received.tensor(), received.bytes, DType::kFloat32,
             std::as_writable_bytes(std::span(copy)));
  EXPECT_EQ(copy, "12345678");
}

TEST(DecodeTensor, PageNumbersAreIntegers) {
  v1::Tensor tensor;
  std::array<int32_t, 1> page{};
  tensor.add_values(3);
  EXPECT_TRUE(FillInt32(tensor, TensorBytes(), "t", page).ok());
  EXPECT_EQ(page[0], 3);
  for (float bad : {0.5f, 3e9f, NAN, INFINITY}) {
    tensor.set_values(0, bad);
    EXPECT_EQ(FillInt32(tensor, TensorBytes(), "t", page).code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
}

TEST(Status, CarriesReasonFieldAndRetryHint) {
  const absl::Status error =
      WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "spec.x",
                               "spec.x is bad"),
                     absl::Milliseconds(1500));
  const grpc::Status status = ToGrpc(error);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 8);
  ASSERT_EQ(details.details_size(), 3);
  google::rpc::BadRequest bad;
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(details.details(0).UnpackTo(&bad));
  ASSERT_TRUE(details.details(1).UnpackTo(&info));
  ASSERT_TRUE(details.details(2).UnpackTo(&retry));
  EXPECT_EQ(bad.field_violations(0).field(), "spec.x");
  EXPECT_EQ(info.reason(), "QUEUE_FULL");
  EXPECT_EQ(info.domain(), "attnd");
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 500'000'000);
}

TEST(Status, LongSentencesAreCutBetweenCharacters) {
  std::string sentence;
  while (sentence.size() < 5000) sentence += "\xc3\xa4";
  const grpc::Status status = ToGrpc(InvalidField(reason::kInvalidField, "f", sentence));
  EXPECT_LT(status.error_message().size(), 1100u);
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
}

}  // namespace
}  // namespace attnd::wire
