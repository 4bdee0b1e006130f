// Two views meet where sum_k x_k * stride_k = distance has a solution with each x_k in its range:
// the axes of one view count up from it, those of the other count down to it. The search takes the
// axes by falling stride and gives each only the values from which the rest can still reach the
// distance: one or two, where an axis steps over all that is inside it, as in any row-major buffer.

#include "engine/core/gradient_views.h"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "engine/core/status.h"

namespace attnd {
namespace {

using Wide = absl::int128;  // Sums of two views' reaches pass 2^63.

constexpr int kMaxSteps = 10'000;

struct Axis {
  int64_t stride;
  int64_t low, high;  // Of the coordinate; low <= 0 <= high.
};

Wide FloorDivide(Wide a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

class Search {
 public:
  explicit Search(std::vector<Axis> axes) : axes_(std::move(axes)) {
    std::sort(axes_.begin(), axes_.end(),
              [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  }

  // Whether some coordinates, not all 0 if `nonzero`, lead to `distance`; true if that takes too
  // long to say.
  bool Reaches(Wide distance, bool nonzero) { return Reaches(axes_, distance, nonzero); }

 private:
  bool Reaches(std::span<const Axis> axes, Wide distance, bool nonzero) {
    if (++steps_ > kMaxSteps) return true;
    if (axes.empty()) return distance == 0 && !nonzero;
    const Axis& axis = axes.front();
    const std::span<const Axis> rest = axes.subspan(1);
    if (axis.stride == 0) return axis.low < axis.high || Reaches(rest, distance, nonzero);
    Wide least = 0, most = 0;  // What the rest reaches.
    for (const Axis& other : rest) {
      least += Wide(other.low) * other.stride;
      most += Wide(other.high) * other.stride;
    }
    const Wide low = std::max<Wide>(axis.low, -FloorDivide(most - distance, axis.stride));
    const Wide high = std::min<Wide>(axis.high, FloorDivide(distance - least, axis.stride));
    for (Wide x = low; x <= high; ++x) {
      if (Reaches(rest, distance - x * axis.stride, nonzero && x == 0)) return true;
    }
    return false;
  }

  std::vector<Axis> axes_;
  int steps_ = 0;
};

struct Occupied {
  const char* name;
  const TensorView* view;
  int64_t start;  // In elements of the buffer.
  // Coordinates: sequence, row, group, head, component. Negative: no element.
  std::array<int64_t, 5> last;

  bool IsEmpty() const {
    return std::any_of(last.begin(), last.end(), [](auto x) { return x < 0; });
  }
  std::array<int64_t, 5> strides() const {
    const Strides& s = view->strides;
    return {s.batch, s.seq, view->group_stride, s.head, s.dim};
  }
};

Occupied Describe(const AttentionProblem& p, const char* name, const TensorView& view) {
  const bool is_q = &view == &p.q;
  const bool is_thd = is_q ? p.q_is_thd : p.kv_is_thd;
  int64_t rows = is_q ? p.max_seqlen_q : p.max_seqlen_kv;
  if (is_thd) {
    rows = 0;
    for (const SequenceExtent& s : p.sequences) {
      rows = std::max(rows, is_q ? s.q_row + s.q_len : s.kv_row + s.kv_len);
    }
  }
  const int64_t heads = is_q ? p.num_heads : p.num_kv_heads;
  const int64_t group = view.group_heads == 0 ? heads : view.group_heads;
  return {name,
          &view,
          view.byte_offset / SizeOf(p.dtype),
          {(is_thd ? 1 : p.batch) - 1, rows - 1, heads / group - 1, group - 1,
           (&view == &p.v ? p.head_dim_v : p.head_dim_qk) - 1}};
}

bool MeetsItself(const Occupied& a) {
  std::vector<Axis> axes;
  for (size_t k = 0; k < a.last.size(); ++k)
    axes.push_back({a.strides()[k], -a.last[k], a.last[k]});
  return Search(std::move(axes)).Reaches(0, true);
}

bool Meet(const Occupied& a, const Occupied& b) {
  if (a.view->buffer != b.view->buffer) return false;
  std::vector<Axis> axes;
  for (size_t k = 0; k < a.last.size(); ++k) {
    if (a.strides()[k] == b.strides()[k]) {
      axes.push_back({a.strides()[k], -b.last[k], a.last[k]});
    } else {
      axes.push_back({a.strides()[k], 0, a.last[k]});
      axes.push_back({b.strides()[k], -b.last[k], 0});
    }
  }
  return Search(std::move(axes)).Reaches(Wide(b.start) - a.start, false);
}

absl::Status Refuse(const std::string& what) {
  return UnimplementedField(
      reason::kNotSupported, "spec.views",
      absl::StrCat("has ", what,
                   ", which cannot hold gradients: an element would have two of "
                   "them; views that keep elements apart work"));
}

}  // namespace

absl::Status CheckGradientViews(const AttentionProblem& problem) {
  if (problem.is_paged) {
    return UnimplementedField(reason::kNotSupported, "spec.layout",
                              "is paged, and pages have no gradients; layouts with K and V in "
                              "tensors of their own work");
  }
  const Occupied all[] = {Describe(problem, "q", problem.q), Describe(problem, "k", problem.k),
                          Describe(problem, "v", problem.v)};
  for (const Occupied& a : all) {
    if (!a.IsEmpty() && MeetsItself(a)) {
      return Refuse(absl::StrCat("elements of ", a.name, " in the same place"));
    }
    for (const Occupied* b = all; b != &a; ++b) {
      if (a.IsEmpty() || b->IsEmpty() || !Meet(*b, a)) continue;
      return Refuse(absl::StrCat(b->name, " and ", a.name, " overlapping"));
    }
  }
  return absl::OkStatus();
}

}  // namespace attnd
