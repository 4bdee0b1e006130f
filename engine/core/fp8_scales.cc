#include "engine/core/fp8_scales.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

}  // namespace

Fp8Scales Replaced(Fp8Scales scales, const StatedFp8Scales& stated) {
  for (size_t i = 0; i < stated.size(); ++i) {
    if (stated[i]) scales.*kFp8ScaleFields[i].member = *stated[i];
  }
  return scales;
}

absl::Status CheckFp8Scales(const Fp8Scales& scales, std::string_view message) {
  for (const Fp8ScaleField& field : kFp8ScaleFields) {
    const float value = scales.*field.member;
    if (std::isfinite(value) && value > 0) continue;
    return InvalidField(reason::kInvalidField, absl::StrCat(View(message), ".", View(field.name)),
                        absl::StrCat("is ", value, "; it must be finite and above 0"));
  }
  return absl::OkStatus();
}

}  // namespace attnd
