#include "client/cpp/client.h"

#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "attnd/v1/attention.grpc.pb.h"
#include "client/cpp/counted_connection.h"
#include "client/cpp/error_details.h"

namespace attnd::client {
namespace {

using ::testing::HasSubstr;

// Answers with Q as O and K as LSE, so that a test sees what arrived.
class EchoService : public v1::Attention::Service {
  grpc::Status Forward(grpc::ServerContext* context, const v1::ForwardRequest* request,
                       v1::ForwardResponse* response) override {
    if (request->spec().batch() < 0) return {grpc::StatusCode::INVALID_ARGUMENT, "negative"};
    if (request->spec().batch() == 0) {
      while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    *response->mutable_out() = request->inputs().q();
    *response->mutable_lse() = request->inputs().k();
    return grpc::Status::OK;
  }
  // Inputs come back as gradients, and of the rest each as something else.
  grpc::Status Backward(grpc::ServerContext*, const v1::BackwardRequest* request,
                        v1::BackwardResponse* response) override {
    *response->mutable_grads() = request->inputs();
    *response->mutable_grads()->mutable_kv() = request->out();
    *response->mutable_grads()->mutable_qkv() = request->lse();
    *response->mutable_grads()->mutable_v() = request->d_out();
    *response->mutable_d_bias() = request->bias();
    *response->mutable_d_softmax_offset() = request->softmax_offset();
    return grpc::Status::OK;
  }
};

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(-1);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
    client_.emplace(address_);
    request_.mutable_spec()->set_batch(1);
  }
  ~ClientTest() override { server_->Shutdown(std::chrono::system_clock::now()); }

  // Adds the tensor at `path`: `size` bytes that count up from `first`.
  void AddTensor(std::vector<int> path, v1::Tensor* description, int64_t size, int first) {
    description->set_dtype(v1::DATA_TYPE_FLOAT16);
    description->add_shape(size / 2);
    auto bytes = std::make_shared<std::byte[]>(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) bytes[static_cast<size_t>(i)] = std::byte(first + i);
    tensors_.push_back({std::move(path), bytes, size});
  }
  void AddInput(int field, v1::Tensor* description, int64_t size, int first) {
    AddTensor({v1::ForwardRequest::kInputsFieldNumber, field}, description, size, first);
  }

  EchoService service_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
  std::optional<Client> client_;
  v1::ForwardRequest request_;
  std::vector<TensorBytes> tensors_;
  v1::ForwardResponse response_;
};

TEST_F(ClientTest, PayloadsArriveInTheirTensors) {
  // Lengths of one, two and more bytes of length prefix, and none at all.
  for (const int64_t size : {0, 2, 126, 128, 16384, 3 << 20}) {
    request_.clear_inputs();
    tensors_.clear();
    AddInput(v1::QkvBuffers::kQFieldNumber, request_.mutable_inputs()->mutable_q(), size, 1);
    AddInput(v1::QkvBuffers::kKFieldNumber, request_.mutable_inputs()->mutable_k(), 40, 7);
    const grpc::Status status = client_->Forward(request_, tensors_, {}, &response_);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response_.out().dtype(), v1::DATA_TYPE_FLOAT16);
    ASSERT_EQ(response_.out().shape_size(), 1);
    EXPECT_EQ(response_.out().shape(0), size / 2);
    EXPECT_TRUE(response_.out().has_data());
    ASSERT_EQ(static_cast<int64_t>(response_.out().data().size()), size);
    EXPECT_EQ(std::memcmp(response_.out().data().data(), tensors_[0].data.get(),
                          static_cast<size_t>(size)),
              0);
    EXPECT_EQ(std::memcmp(response_.lse().data().data(), tensors_[1].data.get(), 40), 0);
  }
}

TEST_F(ClientTest, PayloadsOfGradientCallsArriveInTheirTensors) {
  using Request = v1::BackwardRequest;
  Request request;
  request.mutable_spec()->set_batch(1);
  AddTensor({Request::kInputsFieldNumber, v1::QkvBuffers::kKFieldNumber},
            request.mutable_inputs()->mutable_k(), 300, 1);
  AddTensor({Request::kOutFieldNumber}, request.mutable_out(), 20, 2);
  AddTensor({Request::kLseFieldNumber}, request.mutable_lse(), 22, 3);
  AddTensor({Request::kDOutFieldNumber}, request.mutable_d_out(), 24, 4);
  AddTensor({Request::kBiasFieldNumber}, request.mutable_bias(), 1 << 20, 5);
  AddTensor({Request::kSoftmaxOffsetFieldNumber}, request.mutable_softmax_offset(), 2, 6);
  v1::BackwardResponse response;
  const grpc::Status status = client_->Backward(request, tensors_, {}, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const v1::QkvBuffers& grads = response.grads();
  const v1::Tensor* arrived[] = {&grads.k(), &grads.kv(),        &grads.qkv(),
                                 &grads.v(), &response.d_bias(), &response.d_softmax_offset()};
  for (size_t i = 0; i < tensors_.size(); ++i) {
    ASSERT_EQ(static_cast<int64_t>(arrived[i]->data().size()), tensors_[i].size) << i;
    ASSERT_EQ(arrived[i]->shape_size(), 1) << i;
    EXPECT_EQ(arrived[i]->shape(0) * 2, tensors_[i].size) << i;
    EXPECT_EQ(
        std::memcmp(arrived[i]->data().data(), tensors_[i].data.get(), arrived[i]->data().size()),
        0)
        << i;
  }
}

TEST_F(ClientTest, CountedConnectionsCountWhileBytesTravel) {
  constexpr int64_t kSize = 64 << 20;
  AddInput(v1::QkvBuffers::kQFieldNumber, request_.mutable_inputs()->mutable_q(), kSize, 3);
  const auto connection = CountedConnection::Connect(address_, std::chrono::seconds(10));
  ASSERT_NE(connection, nullptr);
  std::atomic<bool> done = false;
  int64_t between = 0;  // A count seen that is neither nothing nor all.
  std::thread watcher([&] {
    while (!done) {
      const int64_t sent = connection->sent_bytes();
      if (sent > kSize / 16 && sent < kSize) between = sent;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  Client client(connection->channel());
  const grpc::Status status = client.Forward(request_, tensors_, {}, &response_);
  done = true;
  watcher.join();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(std::memcmp(response_.out().data().data(), tensors_[0].data.get(), kSize), 0);
  EXPECT_GT(between, 0);
  EXPECT_GT(connection->sent_bytes(), kSize);
  EXPECT_LT(connection->sent_bytes(), kSize + kSize / 100);
}

TEST_F(ClientTest, CountedConnectionsEndWithTheServer) {
  const auto connection = CountedConnection::Connect(address_, std::chrono::seconds(10));
  ASSERT_NE(connection, nullptr);
  Client client(connection->channel());
  ASSERT_TRUE(client.Forward(request_, tensors_, {}, &response_).ok());
  server_->Shutdown(std::chrono::system_clock::now());
  EXPECT_EQ(client.Forward(request_, tensors_, {}, &response_).error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ClientTest, CountedConnectionsMayEndBeforeTheirCalls) {
  request_.mutable_spec()->set_batch(0);
  auto connection = CountedConnection::Connect(address_, std::chrono::seconds(10));
  ASSERT_NE(connection, nullptr);
  Client client(connection->channel());
  std::thread ender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    connection.reset();
  });
  EXPECT_EQ(client.Forward(request_, tensors_, {}, &response_).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  ender.join();
}

TEST_F(ClientTest, TheChannelHoldsNoPayloadAfterAnAnswer) {
  AddInput(v1::QkvBuffers::kQFieldNumber, request_.mutable_inputs()->mutable_q(), 4 << 20, 0);
  ASSERT_TRUE(client_->Forward(request_, tensors_, {}, &response_).ok());
  EXPECT_EQ(tensors_[0].data.use_count(), 1);
}

TEST_F(ClientTest, RefusesMessagesThatCannotTravel) {
  tensors_.push_back({{v1::ForwardRequest::kInputsFieldNumber, v1::QkvBuffers::kQFieldNumber},
                      std::make_shared<std::byte[]>(1),
                      std::numeric_limits<int32_t>::max()});
  v1::BackwardResponse gradients;
  for (const grpc::Status& status : {client_->Forward(request_, tensors_, {}, &response_),
                                     client_->Backward({}, tensors_, {}, &gradients)}) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(), HasSubstr("2147483647"));
  }
}

TEST_F(ClientTest, DeadlinesAndErrorsComeBack) {
  request_.mutable_spec()->set_batch(0);
  const auto start = std::chrono::steady_clock::now();
  grpc::Status status =
      client_->Forward(request_, tensors_, {.timeout = std::chrono::milliseconds(50)}, &response_);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  request_.mutable_spec()->set_batch(-1);
  status = client_->Forward(request_, tensors_, {}, &response_);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(ParseErrorDetails(status).reason.empty());
}

TEST_F(ClientTest, MemoryMayGoWhileAFailedCallIsStillBeingWritten) {
  AddInput(v1::QkvBuffers::kQFieldNumber, request_.mutable_inputs()->mutable_q(), 64 << 20, 0);
  const grpc::Status status =
      client_->Forward(request_, tensors_, {.timeout = std::chrono::milliseconds(1)}, &response_);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  tensors_.clear();
  request_.clear_inputs();
  EXPECT_TRUE(client_->Forward(request_, tensors_, {}, &response_).ok());
}

TEST_F(ClientTest, AnUnknownMethodIsUnimplemented) {
  v1::GetCapabilitiesResponse reply;
  EXPECT_EQ(client_->GetCapabilities({}, &reply).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(ClientWithoutServer, IsUnavailableAtOnce) {
  // Port 1 of the loopback interface: nobody listens there.
  Client client("127.0.0.1:1");
  ::grpc::health::v1::HealthCheckResponse reply;
  EXPECT_EQ(client.CheckHealth("", {}, &reply).error_code(), grpc::StatusCode::UNAVAILABLE);
  for (const char* address : {"127.0.0.1:1", "unix:/nowhere", "no port", "127.0.0.1:x"}) {
    EXPECT_EQ(CountedConnection::Connect(address, std::chrono::seconds(1)), nullptr) << address;
  }
}

}  // namespace
}  // namespace attnd::client
