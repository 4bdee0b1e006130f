#include "engine/core/backward_checks.h"

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

}  // namespace attnd
