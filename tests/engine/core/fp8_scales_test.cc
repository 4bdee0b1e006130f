// Scales of FP8 problems, and of their backward passes.
#include "engine/core/fp8_scales.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "engine/core/backward_checks.h"
#include "engine/core/status.h"
#include "tests/engine/core/requests.h"

namespace attnd::testing {
namespace {

Request Fp8Request() {
  Request r = SmallRequest(Layout::kBs3hd);
  r.spec.dtype = DType::kFloat8E5M2;
  r.Input(Buffer::kQkv)->dtype = DType::kFloat8E5M2;
  return r;
}

TEST(Fp8Scales, AreOneUnlessTheSpecStatesThem) {
  Request r = Fp8Request();
  EXPECT_EQ(r.Resolve()->fp8, Fp8Scales());
  r.spec.fp8 = Fp8Scales{.descale_k = 0.25f, .scale_d_v = 3};
  EXPECT_EQ(r.Resolve()->fp8.descale_k, 0.25f);
  EXPECT_EQ(r.Resolve()->fp8, *r.spec.fp8);
}

TEST(Fp8Scales, OfOutDoNotCountWhereItIsFloat32) {
  Request r = Fp8Request();
  r.spec.fp8 = Fp8Scales{.scale_o = 8, .descale_o = 0.125f, .descale_d_o = 2};
  const auto fp8 = r.Resolve();
  EXPECT_EQ(fp8->out_scale(), 8);
  EXPECT_EQ(fp8->out_descale(), 0.125f);
  EXPECT_EQ(fp8->d_out_descale(), 2);
  r.options.out_dtype = DType::kFloat32;
  const auto wide = r.Resolve();
  EXPECT_EQ(wide->out_scale(), 1);
  EXPECT_EQ(wide->out_descale(), 1);
  EXPECT_EQ(wide->d_out_descale(), 1);
}

TEST(Fp8Scales, AreFiniteAndAboveZero) {
  for (const Fp8ScaleField& field : kFp8ScaleFields) {
    for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
      Request r = Fp8Request();
      r.spec.fp8.emplace();
      (*r.spec.fp8).*field.member = bad;
      const absl::Status status = r.Resolve().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorField(status), "spec.fp8." + std::string(field.name));
    }
  }
}

// Numbers of fields are their positions in kFp8ScaleFields.
constexpr size_t kDescaleV = 2, kDescaleO = 6, kScaleDQ = 10;

TEST(BackwardScales, ReplaceThoseOfTheSpec) {
  Request r = Fp8Request();
  r.spec.fp8 = Fp8Scales{.descale_v = 0.5f, .descale_o = 4, .scale_d_k = 9};
  AttentionProblem p = *r.Resolve();
  StatedFp8Scales stated;
  stated[kDescaleV] = 0.5f;  // As forward had it.
  stated[kDescaleO] = 2;
  stated[kScaleDQ] = 7;
  ASSERT_TRUE(SetBackwardScales(stated, p).ok());
  EXPECT_EQ(p.fp8, (Fp8Scales{.descale_v = 0.5f, .descale_o = 2, .scale_d_q = 7, .scale_d_k = 9}));
}

TEST(BackwardScales, RefuseAnotherForward) {
  AttentionProblem p = *Fp8Request().Resolve();
  StatedFp8Scales stated;
  stated[kDescaleV] = 0.5f;
  const absl::Status status = SetBackwardScales(stated, p);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorField(status), "fp8.descale_v");
  EXPECT_EQ(p.fp8, Fp8Scales());
}

TEST(BackwardScales, RefuseWhatIsNoScaleAndWhatHasNone) {
  StatedFp8Scales stated;
  stated[kScaleDQ] = -1.0f;
  AttentionProblem p = *Fp8Request().Resolve();
  EXPECT_EQ(ErrorField(SetBackwardScales(stated, p)), "fp8.scale_d_q");
  AttentionProblem half = *SmallRequest(Layout::kBs3hd).Resolve();
  const absl::Status status = SetBackwardScales({}, half);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorField(status), "fp8");
  EXPECT_EQ(ErrorReason(status), reason::kMisplacedField);
}

}  // namespace
}  // namespace attnd::testing
