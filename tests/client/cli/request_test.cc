#include "client/cli/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "client/cli/local_check.h"
#include "client/cli/npy.h"
#include "client/cli/random_tensors.h"

namespace attnd::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

RequestOptions Dense(const std::string& layout) {
  RequestOptions options;
  options.layout = layout;
  options.batch = 2;
  options.seqlen_q = 5;
  options.seqlen_kv = 5;
  options.heads = 4;
  options.kv_heads = 4;
  options.head_dim = 8;
  options.head_dim_v = 8;
  options.random = true;
  return options;
}

std::map<int, std::vector<int64_t>> ShapesOf(const ForwardCall& call) {
  std::map<int, std::vector<int64_t>> shapes;
  for (const auto& [field, tensor] : call.tensors) shapes[field] = tensor.shape;
  return shapes;
}

std::string ErrorOf(const RequestOptions& options) {
  return std::string(MakeForwardCall(options).status().message());
}

TEST(Request, RandomTensorsHaveTheShapesOfTheLayout) {
  using Shape = std::vector<int64_t>;
  auto call = MakeForwardCall(Dense("BS3HD"));
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_THAT(ShapesOf(*call), ElementsAre(Pair(1, Shape{2, 5, 3, 4, 8})));
  RequestOptions options = Dense("SBHD_SBH2D");
  options.seqlen_kv = 7;
  options.kv_heads = 2;
  call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_THAT(ShapesOf(*call),
              ElementsAre(Pair(2, Shape{5, 2, 4, 8}), Pair(3, Shape{7, 2, 2, 2, 8})));
  options.layout = "BHSD_BHSD_BHSD";
  options.head_dim_v = 3;
  call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_THAT(ShapesOf(*call), ElementsAre(Pair(2, Shape{2, 4, 5, 8}), Pair(4, Shape{2, 2, 7, 8}),
                                           Pair(5, Shape{2, 2, 7, 3})));
}

TEST(Request, RandomTensorsHaveUnitVarianceInEveryType) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    RequestOptions options = Dense("BS3HD");
    options.seqlen_q = options.seqlen_kv = 100;
    options.dtype = dtype;
    const auto call = MakeForwardCall(options);
    ASSERT_TRUE(call.ok()) << call.status();
    const HostTensor& qkv = call->tensors.at(1);
    const int64_t count = *NumElements(qkv.shape);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double value = LoadFloat(qkv.dtype, qkv.data.get(), i);
      sum += value;
      squares += value * value;
    }
    EXPECT_NEAR(sum / static_cast<double>(count), 0, 0.05) << dtype;
    EXPECT_NEAR(squares / static_cast<double>(count), 1, 0.05) << dtype;
  }
}

TEST(Request, TheSeedDecidesTheElements) {
  RequestOptions options = Dense("BS3HD");
  const auto first = MakeForwardCall(options);
  const auto again = MakeForwardCall(options);
  options.seed = 1;
  const auto other = MakeForwardCall(options);
  const auto bytes = [](const auto& call) {
    const HostTensor& tensor = call->tensors.at(1);
    return std::string(reinterpret_cast<const char*>(tensor.data.get()),
                       static_cast<size_t>(tensor.byte_size));
  };
  EXPECT_EQ(bytes(first), bytes(again));
  EXPECT_NE(bytes(first), bytes(other));
}

TEST(Request, CarriesWhatTheOptionsSay) {
  RequestOptions options = Dense("THD_T2HD");
  options.batch.reset();
  options.cu_seqlens_q = "0,3,5";
  options.cu_seqlens_kv = "0,2,5";
  options.cu_seqlens_q_padded = "0,4,9";
  options.window = "3,-1";
  options.window_alignment = "bottom-right";
  options.causal = "bottom-right";
  options.scale = 0.25;
  options.softcap = 30;
  options.dtype = "float16";
  options.out_dtype = "float32";
  options.lse = true;
  const auto call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  const v1::ForwardRequest& request = call->request;
  EXPECT_EQ(request.spec().layout(), v1::QKV_LAYOUT_THD_T2HD);
  EXPECT_EQ(request.spec().dtype(), v1::DATA_TYPE_FLOAT16);
  EXPECT_EQ(request.out_dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_FALSE(request.spec().has_batch());
  EXPECT_EQ(request.spec().causal(), v1::CAUSAL_BOTTOM_RIGHT);
  EXPECT_EQ(request.spec().window().left(), 3);
  EXPECT_EQ(request.spec().window().right(), -1);
  EXPECT_EQ(request.spec().window_alignment(), v1::ALIGNMENT_BOTTOM_RIGHT);
  EXPECT_EQ(request.spec().scale(), 0.25);
  EXPECT_EQ(request.spec().logit_softcap(), 30);
  EXPECT_TRUE(request.return_lse());
  EXPECT_THAT(request.sequences().cu_seqlens_q_padded(), ElementsAre(0, 4, 9));
  EXPECT_THAT(call->tensors.at(2).shape, ElementsAre(9, 4, 8));
  EXPECT_THAT(request.inputs().q().shape(), ElementsAre(9, 4, 8));
  EXPECT_FALSE(request.inputs().q().has_data());
}

TEST(Request, ShapesMayBeLargerThanTheSizesNeed) {
  RequestOptions options = Dense("T3HD");
  options.batch.reset();
  options.cu_seqlens_q = options.cu_seqlens_kv = "0,3,5";
  options.shapes = {"qkv:11,3,4,8"};
  const auto call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_THAT(call->tensors.at(1).shape, ElementsAre(11, 3, 4, 8));
}

TEST(Request, ViewsPlaceTensorsInPlainBuffers) {
  RequestOptions options = Dense("STRIDED");
  options.kv_heads = 2;
  // [b * s, h + 2g, d] as models project it.
  options.views = {"q:qkv:0:320,64,8,1", "k:qkv:128:320,64,8,1", "v:qkv:192:320,64,8,1"};
  options.shapes = {"qkv:10,8,8"};
  const auto call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->request.spec().views().k().byte_offset(), 128);
  EXPECT_THAT(call->request.spec().views().v().strides(), ElementsAre(320, 64, 8, 1));
  EXPECT_FALSE(call->request.spec().views().q().has_group_stride());
}

TEST(Request, AViewMayHaveGroups) {
  RequestOptions options = Dense("STRIDED");
  options.kv_heads = 2;
  // [b, s, g, h/g + 2, d]
  options.views = {"q:qkv:0:320,64,8,1:32", "k:qkv:64:320,64,32,1", "v:qkv:96:320,64,32,1"};
  options.shapes = {"qkv:10,2,4,8"};
  const auto call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->request.spec().views().q().group_stride(), 32);
  EXPECT_FALSE(call->request.spec().views().k().has_group_stride());
}

TEST(Request, PagedRequestsGetTablesThatUseEveryPageOnce) {
  RequestOptions options;
  options.layout = "PAGED_KV_THD_BSHD_BSHD";
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = options.head_dim_v = 8;
  options.page_size = 4;
  options.cu_seqlens_q = "0,1,3";
  options.cu_seqlens_kv = "0,9,14";
  options.random = true;
  const auto call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  for (const v1::Tensor* table :
       {&call->request.sequences().page_table_k(), &call->request.sequences().page_table_v()}) {
    EXPECT_THAT(table->shape(), ElementsAre(2, 3));
    std::vector<int32_t> pages(table->data().size() / sizeof(int32_t));
    std::memcpy(pages.data(), table->data().data(), table->data().size());
    EXPECT_EQ(std::set<int32_t>(pages.begin(), pages.end()), (std::set<int32_t>{0, 1, 2, 3, 4, 5}));
  }
}

TEST(Request, PlanHasNoShapesWhereNoneAreSaid) {
  const auto plan = MakePlanRequest(Dense("BS3HD"));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->has_inputs());
  EXPECT_FALSE(plan->has_sequences());
  EXPECT_EQ(plan->spec().batch(), 2);
  EXPECT_EQ(plan->spec().dtype(), v1::DATA_TYPE_FLOAT32);
}

TEST(Request, FeaturesGetTensorsOfTheSpecsSizes) {
  using Shape = std::vector<int64_t>;
  const std::pair<const char*, Shape> shapes[] = {{"", {1, 4, 5, 7}},     {"11ss", {1, 1, 5, 7}},
                                                  {"1hss", {1, 4, 5, 7}}, {"b1ss", {2, 1, 5, 7}},
                                                  {"bhss", {2, 4, 5, 7}}, {"111s", {1, 1, 1, 7}}};
  for (const auto& [text, shape] : shapes) {
    RequestOptions options = Dense("BSHD_BSHD_BSHD");
    options.seqlen_kv = 7;
    options.dtype = "bfloat16";
    options.bias_kind = "post-scale";
    options.bias_shape = text;
    options.softmax = "learnable";
    options.dropout = 0.25;
    options.dropout_seed = 3;
    options.dropout_offset = 4;
    options.alibi = "8,32";
    options.deterministic = true;
    options.batch_invariant = true;
    const auto call = MakeForwardCall(options);
    ASSERT_TRUE(call.ok()) << call.status();
    EXPECT_EQ(call->tensors.at(kBiasSlot).shape, shape) << text;
    EXPECT_EQ(call->tensors.at(kBiasSlot).dtype, v1::DATA_TYPE_BFLOAT16);
    EXPECT_EQ(call->tensors.at(kSoftmaxOffsetSlot).shape, Shape{4});
    EXPECT_EQ(call->tensors.at(kSoftmaxOffsetSlot).dtype, v1::DATA_TYPE_FLOAT32);
    EXPECT_THAT(call->request.bias().shape(), ::testing::ElementsAreArray(shape));
    EXPECT_EQ(call->request.spec().bias_kind(), v1::BIAS_KIND_POST_SCALE);
    EXPECT_EQ(call->request.spec().softmax_kind(), v1::SOFTMAX_KIND_LEARNABLE);
    EXPECT_EQ(call->request.spec().dropout().probability(), 0.25);
    EXPECT_EQ(call->request.spec().dropout().seed(), 3);
    EXPECT_EQ(call->request.spec().dropout().offset(), 4);
    EXPECT_EQ(call->request.spec().alibi().head_offset(), 8);
    EXPECT_EQ(call->request.spec().alibi().total_heads(), 32);
    EXPECT_TRUE(call->request.spec().deterministic());
    EXPECT_TRUE(call->request.spec().batch_invariant());
    const auto plan = MakePlanRequest(options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_THAT(plan->bias().shape(), ::testing::ElementsAreArray(shape));
    EXPECT_FALSE(plan->bias().has_data());
    EXPECT_THAT(plan->softmax_offset().shape(), ElementsAre(4));
    EXPECT_FALSE(plan->backward());
  }
}

TEST(Request, FeaturesWithoutTensorsHaveNone) {
  RequestOptions options = Dense("BS3HD");
  options.bias_kind = "alibi";
  options.softmax = "off-by-one";
  options.backward = true;
  const auto call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->tensors.size(), 1u);
  EXPECT_EQ(call->request.spec().bias_kind(), v1::BIAS_KIND_ALIBI);
  EXPECT_EQ(call->request.spec().softmax_kind(), v1::SOFTMAX_KIND_OFF_BY_ONE);
  EXPECT_FALSE(call->request.spec().has_dropout());
  EXPECT_TRUE(MakePlanRequest(options)->backward());
}

TEST(Request, PagedRequestsMayHaveSinks) {
  RequestOptions options;
  options.layout = "PAGED_KV_THD_BSHD_BSHD";
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = options.head_dim_v = 8;
  options.page_size = 4;
  options.cu_seqlens_q = "0,1,3";
  options.cu_seqlens_kv = "0,9,14";
  options.softmax = "learnable";
  options.random = true;
  const auto call = MakeForwardCall(options);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_THAT(call->tensors.at(kSoftmaxOffsetSlot).shape, ElementsAre(4));
  EXPECT_TRUE(call->request.sequences().page_table_v().has_data());
}

TEST(Request, TheGradientCallRepeatsTheForwardCall) {
  RequestOptions options = Dense("THD_T2HD");
  options.batch.reset();
  options.cu_seqlens_q = options.cu_seqlens_kv = "0,3,5";
  options.softmax = "learnable";
  options.bias_kind = "pre-scale";
  auto forward = MakeForwardCall(options);
  ASSERT_TRUE(forward.ok()) << forward.status();
  const v1::ForwardRequest before = forward->request;
  CallTensors results;
  results.emplace(kOutSlot, RandomTensor(v1::DATA_TYPE_FLOAT32, {5, 4, 8}, 1));
  results.emplace(kLseSlot, RandomTensor(v1::DATA_TYPE_FLOAT32, {5, 4}, 2));
  results.emplace(kOutGradientSlot, RandomTensor(v1::DATA_TYPE_FLOAT32, {5, 4, 8}, 3));
  const BackwardCall call = MakeBackwardCall(*std::move(forward), results);
  EXPECT_EQ(call.request.spec().SerializeAsString(), before.spec().SerializeAsString());
  EXPECT_EQ(call.request.sequences().SerializeAsString(), before.sequences().SerializeAsString());
  EXPECT_EQ(call.request.inputs().SerializeAsString(), before.inputs().SerializeAsString());
  EXPECT_EQ(call.request.bias().SerializeAsString(), before.bias().SerializeAsString());
  EXPECT_THAT(call.request.softmax_offset().shape(), ElementsAre(4));
  EXPECT_THAT(call.request.out().shape(), ElementsAre(5, 4, 8));
  EXPECT_THAT(call.request.lse().shape(), ElementsAre(5, 4));
  EXPECT_THAT(call.request.d_out().shape(), ElementsAre(5, 4, 8));
  std::vector<int> slots;
  for (const auto& [slot, tensor] : call.tensors) slots.push_back(slot);
  EXPECT_THAT(slots, ElementsAre(2, 3, kBiasSlot, kSoftmaxOffsetSlot, kOutSlot, kLseSlot,
                                 kOutGradientSlot));
  EXPECT_THAT(PathOf(call.request, kOutGradientSlot),
              ElementsAre(v1::BackwardRequest::kDOutFieldNumber));
  EXPECT_THAT(PathOf(call.request, 3), ElementsAre(v1::BackwardRequest::kInputsFieldNumber, 3));
}

TEST(Request, BackwardFilesGoTogether) {
  RequestOptions options = Dense("BS3HD");
  const auto message = [&options] {
    return std::string(ReadBackwardFiles(options, v1::DATA_TYPE_FLOAT32).status().message());
  };
  EXPECT_TRUE(ReadBackwardFiles(options, v1::DATA_TYPE_FLOAT32)->empty());
  options.random = false;
  EXPECT_THAT(message(), HasSubstr("--d-out"));
  options.random = true;
  const std::string path = ::testing::TempDir() + "request_test_lse.npy";
  ASSERT_TRUE(WriteNpy(path, v1::DATA_TYPE_FLOAT32, {1}, std::string(4, '\0')).ok());
  options.saved_lse_file = path;
  EXPECT_THAT(message(), HasSubstr("--lse go together"));
  options.saved_out_file = path;
  EXPECT_EQ(ReadBackwardFiles(options, v1::DATA_TYPE_FLOAT32)->size(), 2u);
  options.d_out_file = "/nowhere.npy";
  EXPECT_THAT(message(), HasSubstr("/nowhere.npy"));
}

TEST(Request, ErrorsNameTheOption) {
  const auto with = [](auto change) {
    RequestOptions options = Dense("BS3HD");
    change(options);
    return ErrorOf(options);
  };
  using O = RequestOptions;
  EXPECT_THAT(with([](O& o) { o.layout = "BS4HD"; }), HasSubstr("--layout is no layout: BS4HD"));
  EXPECT_THAT(with([](O& o) { o.dtype = "int3"; }), HasSubstr("--dtype"));
  EXPECT_THAT(with([](O& o) { o.dtype = "int32"; }), HasSubstr("INT32"));
  EXPECT_THAT(with([](O& o) { o.fp8_scales = {"scale_o"}; }), HasSubstr("NAME=VALUE"));
  EXPECT_THAT(with([](O& o) { o.fp8_scales = {"scale_o=x"}; }), HasSubstr("NAME=VALUE"));
  EXPECT_THAT(with([](O& o) { o.fp8_scales = {"scale_x=1"}; }), HasSubstr("named scale_x"));
  EXPECT_THAT(with([](O& o) { o.fp8_scales = {"scale_o=1"}; }), HasSubstr("field spec.fp8"));
  EXPECT_THAT(with([](O& o) { o.out_dtype = "x"; }), HasSubstr("--out-dtype"));
  EXPECT_THAT(with([](O& o) { o.causal = "yes"; }), HasSubstr("--causal"));
  EXPECT_THAT(with([](O& o) { o.window = "3"; }), HasSubstr("--window is LEFT,RIGHT"));
  EXPECT_THAT(with([](O& o) { o.window = "3,b"; }), HasSubstr("--window has 'b'"));
  EXPECT_THAT(with([](O& o) { o.window_alignment = "left"; }), HasSubstr("--window-alignment"));
  EXPECT_THAT(with([](O& o) { o.cu_seqlens_q = "0,,3"; }), HasSubstr("--cu-seqlens-q has ''"));
  EXPECT_THAT(with([](O& o) { o.views = {"q:qkv:0"}; }), HasSubstr("--view"));
  EXPECT_THAT(with([](O& o) { o.views = {"q:qkv:0:1,1,1:x"}; }), HasSubstr("GROUP_STRIDE"));
  EXPECT_THAT(with([](O& o) { o.views = {"x:qkv:0:1,1,1,1"}; }), HasSubstr("not of x"));
  EXPECT_THAT(with([](O& o) { o.views = {"q:q:0:1,1,1", "q:q:0:1,1,1"}; }), HasSubstr("twice"));
  EXPECT_THAT(with([](O& o) { o.shapes = {"z:1"}; }), HasSubstr("--shape"));
  EXPECT_THAT(with([](O& o) { o.input_files[0] = "/nowhere.npy"; }), HasSubstr("/nowhere.npy"));
  EXPECT_THAT(with([](O& o) { o.random = false; }), HasSubstr("--random"));
  EXPECT_THAT(with([](O& o) { o.bias_kind = "scaled"; }), HasSubstr("--bias-kind"));
  EXPECT_THAT(with([](O& o) { o.softmax = "hard"; }), HasSubstr("--softmax"));
  EXPECT_THAT(with([](O& o) { o.bias_shape = "1hss"; }), HasSubstr("--bias-shape goes with"));
  for (const char* shape : {"1hs", "h1ss", "1hs1", "bhsss", "2hss"}) {
    RequestOptions options = Dense("BS3HD");
    options.bias_kind = "pre-scale";
    options.bias_shape = shape;
    EXPECT_THAT(ErrorOf(options), HasSubstr(shape));
  }
  EXPECT_THAT(with([](O& o) { o.bias_file = "/nowhere.npy"; }), HasSubstr("/nowhere.npy"));
  EXPECT_THAT(with([](O& o) { o.kv_heads = 2; }),
              HasSubstr("INVALID_ARGUMENT: spec.num_kv_heads is 2"));
  EXPECT_THAT(with([](O& o) { o.kv_heads = 2; }), HasSubstr("(field spec.num_kv_heads, reason "));
  EXPECT_THAT(with([](O& o) { o.seqlen_q = o.seqlen_kv = 1 << 24; }), HasSubstr("2147483647"));
}

}  // namespace
}  // namespace attnd::cli
