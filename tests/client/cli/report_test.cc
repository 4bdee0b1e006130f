#include "client/cli/report.h"

#include <gmock/gmock.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <limits>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace attnd::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

grpc::Status RichStatus() {
  google::rpc::Status rich;
  google::rpc::ErrorInfo info;
  info.set_reason("SHAPE_MISMATCH");
  rich.add_details()->PackFrom(info);
  google::rpc::BadRequest bad_request;
  bad_request.add_field_violations()->set_field("spec.head_dim_v");
  rich.add_details()->PackFrom(bad_request);
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(500'000'000);
  rich.add_details()->PackFrom(retry);
  return {grpc::StatusCode::INVALID_ARGUMENT, "spec.head_dim_v is \"8\"\nnot 4",
          rich.SerializeAsString()};
}

google::protobuf::Struct ParseJson(const std::string& json) {
  google::protobuf::Struct parsed;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &parsed);
  EXPECT_TRUE(status.ok()) << status.ToString() << "\n" << json;
  return parsed;
}

v1::Tensor Tensor(const std::vector<float>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DATA_TYPE_FLOAT32);
  tensor.add_shape(static_cast<int64_t>(values.size()));
  tensor.set_data(values.data(), values.size() * sizeof(float));
  return tensor;
}

TEST(Report, ErrorsAreOneLineWithFieldAndReason) {
  EXPECT_EQ(ErrorLine(RichStatus()),
            "INVALID_ARGUMENT: spec.head_dim_v is \"8\" not 4 (field spec.head_dim_v, reason "
            "SHAPE_MISMATCH, retry after 1500 ms)");
  EXPECT_EQ(ErrorLine({grpc::StatusCode::UNAVAILABLE, "no one there"}),
            "UNAVAILABLE: no one there");
  EXPECT_EQ(ErrorLine({grpc::StatusCode::INTERNAL, "x", "no google.rpc.Status"}), "INTERNAL: x");
}

TEST(Report, ErrorsAreJsonToo) {
  const auto json = ParseJson(ErrorJson(RichStatus())).fields().at("error").struct_value();
  EXPECT_EQ(json.fields().at("code").string_value(), "INVALID_ARGUMENT");
  EXPECT_EQ(json.fields().at("message").string_value(), "spec.head_dim_v is \"8\"\nnot 4");
  EXPECT_EQ(json.fields().at("field").string_value(), "spec.head_dim_v");
  EXPECT_EQ(json.fields().at("reason").string_value(), "SHAPE_MISMATCH");
  EXPECT_EQ(json.fields().at("retry_after_ms").number_value(), 1500);
}

TEST(Report, PlanIsATableOfViews) {
  v1::PlanResponse reply;
  reply.set_supported(true);
  reply.set_backend("cpu");
  reply.set_engine("tiled");
  reply.set_workspace_bytes(2048);
  reply.set_device_bytes(3 << 20);
  v1::ResolvedView* k = reply.mutable_resolved()->mutable_k();
  k->set_buffer("qkv");
  k->set_byte_offset(1024);
  for (int64_t stride : {98304, 768, 64, 1}) k->add_strides(stride);
  const std::string text = PlanText(reply);
  EXPECT_THAT(text,
              HasSubstr("tensor  buffer  byte offset  batch stride  seq stride  head stride  dim "
                        "stride\n"));
  EXPECT_THAT(text, HasSubstr("k       qkv            1024         98304         768           64"
                              "           1\n"));
  EXPECT_THAT(text, HasSubstr("supported by cpu, engine tiled\nworkspace 2.0 KiB, device memory "
                              "3.0 MiB, deterministic not available\n"));
  EXPECT_THAT(text, Not(HasSubstr("group stride")));
  v1::ResolvedView* q = reply.mutable_resolved()->mutable_q();
  q->CopyFrom(*k);
  q->set_group_stride(320);
  EXPECT_THAT(PlanText(reply), HasSubstr("dim stride  group stride\n"));
  EXPECT_THAT(PlanText(reply), HasSubstr("           1           320\n"));
  reply.set_supported(false);
  reply.set_reason("`spec.dropout` is not built");
  EXPECT_THAT(PlanText(reply), HasSubstr("not supported: `spec.dropout` is not built\n"));
}

TEST(Report, CapabilitiesNameEverything) {
  v1::GetCapabilitiesResponse reply;
  v1::Version* version = reply.add_versions();
  version->set_component("attnd");
  version->set_version("0.1.0");
  v1::BackendCapabilities* backend = reply.add_backends();
  backend->set_name("cpu");
  backend->add_engines("tiled");
  backend->add_dtypes(v1::DATA_TYPE_BFLOAT16);
  backend->add_layouts(v1::QKV_LAYOUT_BS3HD);
  backend->add_features("logit_softcap");
  reply.mutable_limits()->set_values_elements(4096);
  reply.set_lse_base("e");
  reply.set_incarnation("abc");
  const std::string text = CapabilitiesText(reply);
  for (const char* part : {"attnd 0.1.0", "backend cpu", "tiled", "BFLOAT16", "BS3HD",
                           "logit_softcap", "4096 elements", "LSE base e, incarnation abc"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(Report, ForwardShowsTheFirstNumbersAndTheCheck) {
  ForwardCall call;
  call.request.mutable_spec()->set_layout(v1::QKV_LAYOUT_BS3HD);
  call.tensors.emplace(1, *MakeTensor(v1::DATA_TYPE_FLOAT32, {1, 2, 3, 4, 5}));
  v1::ForwardResponse reply;
  *reply.mutable_out() = Tensor({1, 2, 3, 4, 5, 6.5, 7});
  *reply.mutable_lse() = Tensor({-std::numeric_limits<float>::infinity()});
  reply.mutable_info()->set_backend("cpu");
  const Traffic traffic{.sent_bytes = 480, .received_bytes = 32, .seconds = 0.5};
  const CheckResult check{.out_error = 1e-3, .out_bound = 1e-6, .passed = false};
  const std::string text = ForwardText(call, reply, traffic, check);
  EXPECT_THAT(text, HasSubstr("sent BS3HD\n"));
  EXPECT_THAT(text, HasSubstr("qkv     [1, 2, 3, 4, 5]  FLOAT32  480 B\n"));
  EXPECT_THAT(text, HasSubstr("out begins  1 2 3 4 5 6.5 ...\n"));
  EXPECT_THAT(text, HasSubstr("lse begins  -inf\n"));
  EXPECT_THAT(text, HasSubstr("took 500.000 ms, 1.0 KiB/s"));
  EXPECT_THAT(text, HasSubstr("check FAIL: relative RMS error of O 1.00e-03 (bound 1.00e-06)\n"));
}

TEST(Report, ForwardJsonHasNoElements) {
  v1::ForwardResponse reply;
  *reply.mutable_out() = Tensor({1, 2});
  *reply.mutable_lse() = Tensor({3});
  reply.mutable_info()->set_engine("tiled");
  const Traffic traffic{.sent_bytes = 480, .received_bytes = 12, .seconds = 0.5};
  const CheckResult check_result{.out_error = 1e-7,
                                 .out_bound = 1e-6,
                                 .lse_error = std::numeric_limits<double>::infinity(),
                                 .lse_bound = 1e-6,
                                 .passed = false};
  const std::string json = ForwardJson(reply, traffic, check_result);
  EXPECT_THAT(json, Not(HasSubstr("\"data\"")));
  const auto fields = ParseJson(json).fields();
  EXPECT_EQ(fields.at("sent_bytes").number_value(), 480);
  EXPECT_EQ(fields.at("seconds").number_value(), 0.5);
  const auto& reply_fields = fields.at("reply").struct_value().fields();
  EXPECT_EQ(reply_fields.at("info").struct_value().fields().at("engine").string_value(), "tiled");
  EXPECT_EQ(reply_fields.at("out").struct_value().fields().at("shape").list_value().values_size(),
            1);
  const auto& check = fields.at("check").struct_value().fields();
  EXPECT_FALSE(check.at("passed").bool_value());
  EXPECT_EQ(check.at("out_bound").number_value(), 1e-6);
  EXPECT_EQ(check.at("lse_max_abs_error").string_value(), "Infinity");
}

// Gradients of K and of a bias.
v1::BackwardResponse GradientReply() {
  v1::BackwardResponse reply;
  *reply.mutable_grads()->mutable_k() = Tensor({1, 2, 3});
  *reply.mutable_d_bias() = Tensor({0.5f});
  reply.mutable_info()->set_backend("cpu");
  return reply;
}

const GradientCheck kGradientCheck{
    .gradients = {{4, 2e-6}, {kBiasSlot, 1e-4}}, .bound = 3e-5, .passed = false};

TEST(Report, BackwardShowsTheGradientsAndTheCheck) {
  BackwardCall call;
  call.request.mutable_spec()->set_layout(v1::QKV_LAYOUT_THD_THD_THD);
  call.tensors.emplace(kOutGradientSlot, *MakeTensor(v1::DATA_TYPE_FLOAT16, {2, 3}));
  const Traffic traffic{.sent_bytes = 12, .received_bytes = 16, .seconds = 0.5};
  const std::string text = BackwardText(call, GradientReply(), traffic, kGradientCheck);
  EXPECT_THAT(text, HasSubstr("sent THD_THD_THD\n"));
  EXPECT_THAT(text, HasSubstr("d_out   [2, 3]  FLOAT16  12 B\n"));
  EXPECT_THAT(text, HasSubstr("d_k begins  1 2 3\n"));
  EXPECT_THAT(text, HasSubstr("d_bias begins  0.5\n"));
  EXPECT_THAT(text, HasSubstr("ran on cpu"));
  EXPECT_THAT(text, HasSubstr("check FAIL: RMS error of d_k 2.00e-06, d_bias 1.00e-04 (bound "
                              "3.00e-05)\n"));
  EXPECT_THAT(BackwardText(call, GradientReply(), traffic, std::nullopt), Not(HasSubstr("check")));
}

TEST(Report, BackwardOfAContextNamesIt) {
  v1::Handle context;
  context.set_id("abc-1");
  const BackwardCall call = MakeRetainedCall(context, *MakeTensor(v1::DATA_TYPE_FLOAT16, {2, 3}));
  const std::string text = BackwardText(call, GradientReply(), {}, std::nullopt);
  EXPECT_THAT(text, HasSubstr("sent for context abc-1\n"));
  EXPECT_THAT(text, HasSubstr("d_out   [2, 3]  FLOAT16  12 B\n"));
}

TEST(Report, BackwardJsonHasNoElements) {
  const Traffic traffic{.sent_bytes = 12, .received_bytes = 16, .seconds = 0.5};
  const std::string json = BackwardJson(GradientReply(), traffic, kGradientCheck);
  EXPECT_THAT(json, Not(HasSubstr("\"data\"")));
  const auto fields = ParseJson(json).fields();
  EXPECT_EQ(fields.at("received_bytes").number_value(), 16);
  const auto& grads = fields.at("reply").struct_value().fields().at("grads").struct_value();
  EXPECT_EQ(grads.fields().at("k").struct_value().fields().at("shape").list_value().values_size(),
            1);
  const auto& check = fields.at("check").struct_value().fields();
  EXPECT_FALSE(check.at("passed").bool_value());
  const auto& errors = check.at("rms_errors").struct_value().fields();
  EXPECT_EQ(errors.at("d_k").number_value(), 2e-6);
  EXPECT_EQ(errors.at("d_bias").number_value(), 1e-4);
  EXPECT_EQ(check.at("bound").number_value(), 3e-5);
}

}  // namespace
}  // namespace attnd::cli
