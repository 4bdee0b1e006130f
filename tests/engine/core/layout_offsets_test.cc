// Sizes past 2^31 and 2^32: offsets are computed in 64 bits. Host arithmetic only, no such buffers.

#include <gtest/gtest.h>

#include "tests/engine/core/requests.h"

namespace attnd::testing {
namespace {

TEST(Layout, StartsPastTwoGigaelementsAreExact) {
  Request r;
  r.spec.layout = Layout::kT3hd;
  r.spec.dtype = DType::kBFloat16;
  r.sequences.cu_seqlens_q = r.sequences.cu_seqlens_kv = {0, 43691, 43692};
  r.Input(Buffer::kQkv) = TensorDesc{DType::kBFloat16, {43692, 3, 128, 128}};
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->sequences[1].q_row * p->q.start_multiplier, 2'147'500'032);
  EXPECT_EQ(p->sequences[1].kv_row * p->v.start_multiplier, 2'147'500'032);
  EXPECT_EQ(p->v.byte_offset, 65'536);
  EXPECT_EQ(NumBytes(*p->inputs[0]), 4'295'098'368);
}

TEST(Layout, BatchStridesPastTwoGigaelementsAreExact) {
  Request r;
  r.spec.layout = Layout::kBshdBshdBshd;
  r.spec.dtype = DType::kFloat16;
  for (Buffer buffer : {Buffer::kQ, Buffer::kK, Buffer::kV}) {
    r.Input(buffer) = TensorDesc{DType::kFloat16, {1600, 16, 729, 144}};
  }
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(1599 * p->k.strides.batch, 2685705984);
  EXPECT_EQ(p->lse_desc.shape, (std::vector<int64_t>{1600, 729, 16}));
}

TEST(Layout, PackedOffsetsPastTwoGigabytesAreExact) {
  Request r;
  r.spec.layout = Layout::kSb3hd;
  r.spec.dtype = DType::kFloat32;
  r.Input(Buffer::kQkv) = TensorDesc{DType::kFloat32, {1, 1, 3, 1 << 20, 1 << 12}};
  const auto p = r.Resolve();
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->k.byte_offset, int64_t{1} << 34);
  EXPECT_EQ(p->v.byte_offset, int64_t{1} << 35);
}

}  // namespace
}  // namespace attnd::testing
