#include "engine/core/tensor_view.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

constexpr int64_t kTwoTo62 = int64_t{1} << 62;

TEST(TensorView, CountsElementsAndBytes) {
  EXPECT_EQ(NumElements({2, 3, 4}), 24);
  EXPECT_EQ(NumElements({}), 1);
  EXPECT_EQ(NumElements({5, 0, 7}), 0);
  EXPECT_EQ(NumBytes({DType::kBFloat16, {2, 3}}), 12);
  EXPECT_EQ(NumBytes({DType::kFloat8E4M3, {2, 3}}), 6);
}

TEST(TensorView, RefusesNegativeDimensions) {
  EXPECT_EQ(NumElements({2, -1}), std::nullopt);
  EXPECT_EQ(NumElements({0, -1}), std::nullopt);
  EXPECT_EQ(NumBytes({DType::kFloat32, {-4}}), std::nullopt);
}

TEST(TensorView, RefusesProductsPast63Bits) {
  EXPECT_EQ(NumElements({kTwoTo62, 1}), kTwoTo62);
  EXPECT_EQ(NumElements({kTwoTo62, 2}), std::nullopt);
  EXPECT_EQ(NumElements({kTwoTo62, kTwoTo62, 0}), 0);
  EXPECT_EQ(NumBytes({DType::kFloat8E4M3, {kTwoTo62}}), kTwoTo62);
  EXPECT_EQ(NumBytes({DType::kFloat16, {kTwoTo62}}), std::nullopt);
}

TEST(TensorView, NamesAndShapesReadWell) {
  EXPECT_EQ(ShapeString({2, 3, 64}), "[2, 3, 64]");
  EXPECT_EQ(ShapeString({}), "[]");
  EXPECT_EQ(Name(Buffer::kQkv), "qkv");
  EXPECT_EQ(Name(Buffer::kKv), "kv");
  EXPECT_EQ(Name(Buffer::kOut), "out");
}

}  // namespace
}  // namespace attnd
