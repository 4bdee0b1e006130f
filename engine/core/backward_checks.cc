#include "engine/core/backward_checks.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

absl::Status CheckIs(const std::optional<TensorDesc>& desc, const TensorDesc& want,
                     std::string_view field) {
  if (!desc) return InvalidField(reason::kMissingField, field, "is required");
  if (desc->shape != want.shape) {
    return InvalidField(reason::kShapeMismatch, field,
                        absl::StrCat("has shape ", ShapeString(desc->shape), "; forward returns ",
                                     ShapeString(want.shape), " for this spec"));
  }
  if (desc->dtype != want.dtype) {
    return InvalidField(
        reason::kInvalidField, absl::StrCat(View(field), ".dtype"),
        absl::StrCat("is ", View(Name(desc->dtype)), "; it must be ", View(Name(want.dtype))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckBackwardTensors(const AttentionProblem& p, const BackwardDescs& descs) {
  TensorDesc out = p.out_desc;
  // Forward may have been asked for FLOAT32.
  if (descs.out && descs.out->dtype == DType::kFloat32) out.dtype = DType::kFloat32;
  ATTND_RETURN_IF_ERROR(CheckIs(descs.out, out, "out"));
  ATTND_RETURN_IF_ERROR(CheckIs(descs.lse, p.lse_desc, "lse"));
  return CheckIs(descs.d_out, out, "d_out");
}

absl::Status CheckOutGradient(const AttentionProblem& p, const std::optional<TensorDesc>& d_out) {
  return CheckIs(d_out, p.out_desc, "d_out");
}

absl::Status SetBackwardScales(const StatedFp8Scales& stated, AttentionProblem& p) {
  if (!IsFloat8(p.dtype)) {
    return InvalidField(reason::kMisplacedField, "fp8",
                        absl::StrCat("is set, but spec.dtype is ", View(Name(p.dtype))));
  }
  const Fp8Scales scales = Replaced(p.fp8, stated);
  ATTND_RETURN_IF_ERROR(CheckFp8Scales(scales, "fp8"));
  for (size_t i = 0; i < kNumForwardFp8Scales; ++i) {
    const auto& [name, member] = kFp8ScaleFields[i];
    if (scales.*member == p.fp8.*member) continue;
    return InvalidField(reason::kInvalidField, absl::StrCat("fp8.", View(name)),
                        absl::StrCat("is ", scales.*member, ", but forward has ", p.fp8.*member));
  }
  p.fp8 = scales;
  return absl::OkStatus();
}

absl::Status SetScalesOfRetained(const StatedFp8Scales& stated, AttentionProblem& p) {
  const bool is_stated = std::any_of(stated.begin(), stated.end(),
                                     [](const std::optional<float>& scale) { return scale; });
  if (is_stated) ATTND_RETURN_IF_ERROR(SetBackwardScales(stated, p));
  if (!IsFloat8(p.out_dtype)) return absl::OkStatus();
  constexpr auto kIsDescaleO = [](const Fp8ScaleField& field) {
    return field.member == &Fp8Scales::descale_o;
  };
  const auto index = static_cast<size_t>(
      std::find_if(kFp8ScaleFields.begin(), kFp8ScaleFields.end(), kIsDescaleO) -
      kFp8ScaleFields.begin());
  const float descale_o = 1 / p.fp8.scale_o;
  if (!stated[index]) {
    p.fp8.descale_o = descale_o;
  } else if (!(std::abs(*stated[index] - descale_o) <= 1e-5f * descale_o)) {
    return InvalidField(
        reason::kInvalidField, "fp8.descale_o",
        absl::StrCat("is ", *stated[index], ", but forward stored O times ", p.fp8.scale_o));
  }
  return absl::OkStatus();
}

}  // namespace attnd
