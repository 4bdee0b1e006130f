#include "client/cli/table.h"

#include <gtest/gtest.h>

#include "client/cli/host_tensor.h"
#include "client/cli/progress_bar.h"

namespace attnd::cli {
namespace {

TEST(Table, AlignsColumnsAndLeavesNoSpacesAtTheEnd) {
  EXPECT_EQ(RenderTable({{"tensor"}, {"offset", Align::kRight}, {"buffer"}},
                        {{"q", "0", "qkv"}, {"longer name", "1234567", "q"}}),
            "tensor        offset  buffer\n"
            "q                  0  qkv\n"
            "longer name  1234567  q\n");
}

TEST(Table, HasATitleWithoutRows) { EXPECT_EQ(RenderTable({{"a"}, {"b"}}, {}), "a  b\n"); }

TEST(ProgressLine, GrowsWithWhatIsSentAndThenWaits) {
  EXPECT_EQ(ProgressLine(0, 2048), "[>                             ]   0%  0 B of 2.0 KiB");
  EXPECT_EQ(ProgressLine(1024, 2048), "[===============>              ]  50%  1.0 KiB of 2.0 KiB");
  EXPECT_EQ(ProgressLine(2048, 2048),
            "[==============================] 100%  2.0 KiB sent, waiting for the answer");
  EXPECT_EQ(ProgressLine(0, 0),
            "[==============================] 100%  0 B sent, waiting for the answer");
}

TEST(HostTensor, CountsWithoutOverflow) {
  EXPECT_EQ(NumElements({}), 1);
  EXPECT_EQ(NumElements({2, 0, 3}), 0);
  EXPECT_EQ(NumElements({-1, 0}), std::nullopt);
  EXPECT_EQ(NumElements({int64_t{1} << 32, int64_t{1} << 32}), std::nullopt);
  EXPECT_EQ(NumBytes(v1::DATA_TYPE_FLOAT32, {int64_t{1} << 61}), std::nullopt);
  EXPECT_EQ(NumBytes(v1::DATA_TYPE_BFLOAT16, {3}), 6);
}

TEST(HostTensor, KnowsTheNamesOfTheContract) {
  EXPECT_EQ(ParseLayout("bs3hd"), v1::QKV_LAYOUT_BS3HD);
  EXPECT_EQ(ParseLayout("PAGED_KV_THD_SBHD_SBHD"), v1::QKV_LAYOUT_PAGED_KV_THD_SBHD_SBHD);
  EXPECT_EQ(ParseLayout("BS4HD"), std::nullopt);
  EXPECT_EQ(ParseDataType("bfloat16"), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(ParseDataType("double"), std::nullopt);
  EXPECT_EQ(ShortName(v1::QKV_LAYOUT_STRIDED), "STRIDED");
  EXPECT_EQ(ShortName(v1::DATA_TYPE_FLOAT16), "FLOAT16");
}

}  // namespace
}  // namespace attnd::cli
