// A problem on its way from a feature's name to a request.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/bench/support_problem.h"

namespace attnd::support {

using Random = std::mt19937_64;

// Of [first, last], all alike.
int64_t Uniform(Random& random, int64_t first, int64_t last);
double Real(Random& random, double first, double last);
bool OneIn(Random& random, int64_t n);

// How the buffers of layout STRIDED look.
enum class Strided {
  kNone,
  kProjection,   // [b, s, h + 2g, d], or [t, h + 2g, d]
  kStacked,      // [3, b, s, h, d]
  kWideRows,     // Tensors of their own with 8 elements between two heads, or [t, h, d].
  kPagesByHead,  // [pages, g, rows, d]
};

// What a form's tensors share.
inline constexpr unsigned kOneAxis = 1;     // s_q == s_kv
inline constexpr unsigned kEqualHeads = 2;  // h == g
inline constexpr unsigned kEqualDims = 4;   // d_qk == d_v

// A layout. Sides are 'B' (BSHD), 'S' (SBHD), 'H' (BHSD), 'T' (THD); K and V also 'P' (BSHD pages)
// and 'Q' (SBHD pages).
struct Form {
  const char* group;
  v1::QkvLayout layout;
  char q;
  char kv;
  unsigned shared = 0;
  Strided strided = Strided::kNone;

  bool is_paged() const { return kv == 'P' || kv == 'Q'; }
};

std::span<const Form> Forms();

// What a feature asks of a form.
inline constexpr unsigned kNeedsThd = 1;
inline constexpr unsigned kNeedsDense = 2;  // Some side without token rows or pages.
inline constexpr unsigned kNeedsTwoAxes = 4;
inline constexpr unsigned kNeedsFreeHeads = 8;
inline constexpr unsigned kNeedsFreeDims = 16;
inline constexpr unsigned kNeedsPages = 32;

bool Meets(const Form& form, unsigned needs);

struct Draft {
  const Form* form = nullptr;
  v1::AttentionSpec spec;  // dtype, masks and features; no sizes.
  v1::DataType out_dtype = v1::DATA_TYPE_UNSPECIFIED;
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t dim_qk = 64;
  int64_t dim_v = 64;
  int64_t page_size = 16;
  bool has_lengths = false;  // Shorter than a dense axis.
  bool has_gaps = false;
  bool has_empty = false;
  bool is_decode = false;
  bool has_alibi_shard = false;
  std::string bias_shape;  // "1hss"
};

struct Feature {
  const char* name;
  unsigned needs;
  void (*apply)(Draft& draft, Random& random);
};

std::span<const Feature> FeatureTable();

// A plain problem of the form.
Draft DrawPlain(const Form& form, Random& random);

// Draws lengths, arrays and shapes. A request that contradicts itself is a bug of this program.
Problem BuildProblem(const Draft& draft, Random& random);

}  // namespace attnd::support
