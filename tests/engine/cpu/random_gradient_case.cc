#include "tests/engine/cpu/random_gradient_case.h"

#include <initializer_list>
#include <limits>
#include <random>
#include <sstream>
#include <vector>

namespace attnd::testing {
namespace {

class Choice {
 public:
  explicit Choice(uint64_t seed) : random_(seed) {}
  int64_t Of(std::initializer_list<int64_t> choices) {
    return *(choices.begin() + static_cast<int64_t>(random_() % choices.size()));
  }
  bool OneIn(uint64_t n) { return random_() % n == 0; }

 private:
  std::mt19937_64 random_;
};

void SetRandomShape(Choice& choice, uint64_t seed, bool paged, CaseOptions& options) {
  options.seed = seed;
  options.dtype = static_cast<DType>(choice.Of({1, 1, 2, 3}));
  if (choice.OneIn(4)) options.out_dtype = DType::kFloat32;
  options.q_format = static_cast<Format>(choice.Of({0, 1, 2, 3}));
  options.kv_format = static_cast<Format>(paged ? choice.Of({0, 1}) : choice.Of({0, 1, 2, 3}));
  if (paged) options.page_size = choice.Of({1, 16, 700});
  options.kv_heads = choice.Of({1, 2, 3});
  options.heads = options.kv_heads * choice.Of({1, 2, 3, 5});
  options.d_qk = choice.Of({1, 3, 8, 16, 33, 64});
  options.d_v = choice.Of({1, 5, 8, 32, 64});
  options.dim_stride = choice.Of({1, 1, 1, 2});
  options.extra_rows = choice.Of({0, 1, 3, 70});
  options.lengths.clear();
  for (int64_t b = choice.Of({1, 2, 3}); b > 0; --b) {
    options.lengths.emplace_back(choice.Of({0, 1, 2, 30, 70, 130}),
                                 choice.Of({0, 1, 3, 60, 130, 300, 520}));
  }
  if (choice.OneIn(3)) options.mask.left = choice.Of({0, 1, 7, 100});
  if (choice.OneIn(2)) options.mask.right = choice.Of({0, 0, 1, 9, 300});
  options.mask.bottom_right = choice.OneIn(2);
  if (choice.OneIn(3)) options.softcap = static_cast<double>(choice.Of({1, 10, 50}));
  if (choice.OneIn(4)) options.scale = static_cast<double>(choice.Of({-1, 0, 1})) * 0.3;
}

}  // namespace

GradientOptions RandomGradientOptions(uint64_t seed, bool paged) {
  Choice choice(seed);
  GradientOptions options;
  SetRandomShape(choice, seed, paged, options.shape);
  options.bias_kind = static_cast<BiasKind>(choice.Of({0, 1, 2, 3}));
  options.bias_per_sequence = choice.OneIn(2);
  options.bias_per_head = choice.OneIn(2);
  options.bias_per_row = !choice.OneIn(4);
  options.softmax_kind = static_cast<SoftmaxKind>(choice.Of({0, 1, 2}));
  if (choice.OneIn(2)) {
    options.dropout = {0.1 * static_cast<double>(choice.Of({1, 5, 9})),
                       choice.Of({0, -3, int64_t{1} << 50}), choice.Of({0, 9, int64_t{1} << 35})};
  }
  return options;
}

std::string Describe(const GradientOptions& o) {
  std::ostringstream text;
  text << Describe(o.shape) << " bias=" << static_cast<int>(o.bias_kind) << " per"
       << (o.bias_per_sequence ? " sequence" : "") << (o.bias_per_head ? " head" : "")
       << (o.bias_per_row ? " row" : "") << " softmax=" << static_cast<int>(o.softmax_kind)
       << " dropout=" << o.dropout.probability << "," << o.dropout.seed << "," << o.dropout.offset;
  return text.str();
}

void PoisonUnusedBias(GradientCase& test) {
  const AttentionProblem& p = test.problem();
  std::vector<bool> used(test.bias().size());
  for (int64_t i = 0; p.bias && i < p.batch; ++i) {
    const SequenceExtent& extent = p.sequences[static_cast<size_t>(i)];
    for (int64_t n = 0; n < p.num_heads; ++n) {
      for (int64_t row = 0; row < extent.q_len; ++row) {
        const KeyRange keys = p.mask.VisibleKeys(row, extent.q_len, extent.kv_len);
        for (int64_t j = keys.first; j < keys.last; ++j) {
          const Strides& s = p.bias_strides;
          used[static_cast<size_t>(i * s.batch + n * s.head + row * s.seq + j * s.dim)] = true;
        }
      }
    }
  }
  for (size_t cell = 0; cell < used.size(); ++cell) {
    if (!used[cell]) test.bias()[cell] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace attnd::testing
