// Per-tensor scales of the FP8 types.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

#include "absl/status/status.h"

namespace attnd {

// descale_* turns what a tensor stores into real values, scale_* the reverse. S and dP are matrices
// that only some backends store.
struct Fp8Scales {
  float descale_q = 1;
  float descale_k = 1;
  float descale_v = 1;
  float scale_s = 1;
  float descale_s = 1;
  float scale_o = 1;
  // The rest is for the backward pass.
  float descale_o = 1;
  float descale_d_o = 1;
  float scale_d_p = 1;
  float descale_d_p = 1;
  float scale_d_q = 1;
  float scale_d_k = 1;
  float scale_d_v = 1;

  bool operator==(const Fp8Scales&) const = default;
};

struct Fp8ScaleField {
  std::string_view name;
  float Fp8Scales::*member;
};

// Names and order are those of attnd.v1.Fp8Scales; those of forward come first.
inline constexpr std::array<Fp8ScaleField, 13> kFp8ScaleFields = {{
    {"descale_q", &Fp8Scales::descale_q},
    {"descale_k", &Fp8Scales::descale_k},
    {"descale_v", &Fp8Scales::descale_v},
    {"scale_s", &Fp8Scales::scale_s},
    {"descale_s", &Fp8Scales::descale_s},
    {"scale_o", &Fp8Scales::scale_o},
    {"descale_o", &Fp8Scales::descale_o},
    {"descale_d_o", &Fp8Scales::descale_d_o},
    {"scale_d_p", &Fp8Scales::scale_d_p},
    {"descale_d_p", &Fp8Scales::descale_d_p},
    {"scale_d_q", &Fp8Scales::scale_d_q},
    {"scale_d_k", &Fp8Scales::scale_d_k},
    {"scale_d_v", &Fp8Scales::scale_d_v},
}};
inline constexpr size_t kNumForwardFp8Scales = 6;

// What a message states, by kFp8ScaleFields.
using StatedFp8Scales = std::array<std::optional<float>, kFp8ScaleFields.size()>;

// `scales` with those that are stated in place of its own.
Fp8Scales Replaced(Fp8Scales scales, const StatedFp8Scales& stated);

// INVALID_ARGUMENT with the field ("spec.fp8.descale_q") for one that is not finite and above 0.
// `message` is where they are stated: "spec.fp8".
absl::Status CheckFp8Scales(const Fp8Scales& scales, std::string_view message);

}  // namespace attnd
