#include "tests/bench/support_tensors.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "client/cli/local_check.h"

namespace attnd::support {
namespace {

using cli::HostTensor;
using Random = std::mt19937_64;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// Sinks that change rows of any length.
constexpr float kSinkFactor = 3;

enum class Part { kQ, kK, kV, kOut };

const v1::ResolvedView& ViewOf(const v1::ResolvedViews& views, Part part) {
  switch (part) {
    case Part::kQ: return views.q();
    case Part::kK: return views.k();
    case Part::kV: return views.v();
    default: return views.out();
  }
}

// Calls visit(element) for every element of the part that a sequence has.
template <typename Visit>
void ForEachElement(const Problem& problem, const v1::ResolvedViews& views, Part part,
                    Visit visit) {
  const v1::AttentionSpec& spec = problem.request.spec();
  const v1::ResolvedView& view = ViewOf(views, part);
  const bool is_kv = part == Part::kK || part == Part::kV;
  const v1::Sequences& arrays = problem.request.sequences();
  const v1::Tensor& table = part == Part::kK ? arrays.page_table_k() : arrays.page_table_v();
  const bool is_paged = is_kv && table.shape_size() > 0;
  const int64_t heads = is_kv ? spec.num_kv_heads() : spec.num_heads();
  const int64_t dim = part == Part::kQ || part == Part::kK ? spec.head_dim_qk() : spec.head_dim_v();
  const int64_t first = view.byte_offset() / cli::SizeOf(spec.dtype());
  for (size_t i = 0; i < problem.sequences.size(); ++i) {
    const Extent& sequence = problem.sequences[i];
    for (int64_t r = 0; r < (is_kv ? sequence.kv_len : sequence.q_len); ++r) {
      int64_t row = (is_kv ? sequence.kv_row : sequence.q_row) + r;
      auto outer = static_cast<int64_t>(i);  // THD: the stride is 0.
      if (is_paged) {
        const int64_t entry = outer * table.shape(1) + r / spec.page_size();
        int32_t page = 0;
        std::memcpy(&page, table.data().data() + entry * 4, sizeof(page));
        outer = page;
        row = r % spec.page_size();
      }
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t start =
            first + outer * view.strides(0) + row * view.strides(1) + n * view.strides(2);
        for (int64_t c = 0; c < dim; ++c) visit(start + c * view.strides(3));
      }
    }
  }
}

int64_t Count(const std::vector<int64_t>& shape) { return *cli::NumElements(shape); }

void Fill(float value, HostTensor* tensor) {
  for (int64_t i = 0; i < Count(tensor->shape); ++i) {
    cli::StoreFloat(tensor->dtype, tensor->data.get(), i, value);
  }
}

void FillRandom(float factor, Random* random, HostTensor* tensor) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < Count(tensor->shape); ++i) {
    cli::StoreFloat(tensor->dtype, tensor->data.get(), i, factor * normal(*random));
  }
}

// The factor that turns real values into stored ones.
float StoredFactor(const Problem& problem, Part part) {
  const v1::Fp8Scales& fp8 = problem.request.spec().fp8();
  if (!problem.request.spec().has_fp8()) return 1;
  switch (part) {
    case Part::kQ: return 1 / fp8.descale_q();
    case Part::kK: return 1 / fp8.descale_k();
    case Part::kV: return 1 / fp8.descale_v();
    default: return OutType(problem) == v1::DATA_TYPE_FLOAT32 ? 1 : 1 / fp8.descale_d_o();
  }
}

void FillOwned(const Problem& problem, const v1::ResolvedViews& views, Part part, Random* random,
               HostTensor* tensor) {
  std::normal_distribution<float> normal;
  const float factor = StoredFactor(problem, part);
  ForEachElement(problem, views, part, [&](int64_t element) {
    cli::StoreFloat(tensor->dtype, tensor->data.get(), element, factor * normal(*random));
  });
}

// NaN in the cells that no sequence has.
void PoisonBias(const Problem& problem, HostTensor* bias) {
  const std::vector<int64_t>& shape = bias->shape;
  auto owned = [&](int64_t i, int64_t r, int64_t c) {
    for (size_t k = 0; k < problem.sequences.size(); ++k) {
      const Extent& s = problem.sequences[k];
      if ((shape[0] == 1 || i == static_cast<int64_t>(k)) && r < s.q_len && c < s.kv_len) {
        return true;
      }
    }
    return false;
  };
  for (int64_t index = 0; index < Count(shape); ++index) {
    const int64_t column = index % shape[3], row = index / shape[3] % shape[2];
    const int64_t outer = index / (shape[1] * shape[2] * shape[3]);
    if (!owned(outer, shape[2] == 1 ? 0 : row, column)) {
      cli::StoreFloat(bias->dtype, bias->data.get(), index, kNaN);
    }
  }
}

HostTensor Make(const v1::Tensor& desc) {
  return *cli::MakeTensor(desc.dtype(), {desc.shape().begin(), desc.shape().end()});
}

const v1::Tensor* InputOf(const v1::QkvBuffers& inputs, int slot) {
  const auto* field = v1::QkvBuffers::descriptor()->FindFieldByNumber(slot);
  const google::protobuf::Reflection& reflection = *inputs.GetReflection();
  if (!reflection.HasField(inputs, field)) return nullptr;
  return static_cast<const v1::Tensor*>(&reflection.GetMessage(inputs, field));
}

constexpr Part kInputParts[] = {Part::kQ, Part::kK, Part::kV};

}  // namespace

v1::DataType OutType(const Problem& problem) {
  return problem.request.out_dtype() == v1::DATA_TYPE_UNSPECIFIED ? problem.request.spec().dtype()
                                                                  : problem.request.out_dtype();
}

cli::CallTensors MakeTensors(const Problem& problem, const v1::ResolvedViews* views) {
  Random random(problem.seed);
  const v1::ForwardRequest& request = problem.request;
  cli::CallTensors tensors;
  for (int slot = 1; slot <= cli::kNumInputSlots; ++slot) {
    const v1::Tensor* desc = InputOf(request.inputs(), slot);
    if (desc == nullptr) continue;
    HostTensor& tensor = tensors[slot] = Make(*desc);
    if (views == nullptr) {
      FillRandom(1, &random, &tensor);
      continue;
    }
    Fill(kNaN, &tensor);
    for (const Part part : kInputParts) {
      if (ViewOf(*views, part).buffer() != cli::SlotName(slot)) continue;
      FillOwned(problem, *views, part, &random, &tensor);
    }
  }
  if (request.has_bias()) {
    HostTensor& bias = tensors[cli::kBiasSlot] = Make(request.bias());
    FillRandom(1, &random, &bias);
    PoisonBias(problem, &bias);
  }
  if (request.has_softmax_offset()) {
    FillRandom(kSinkFactor, &random,
               &(tensors[cli::kSoftmaxOffsetSlot] = Make(request.softmax_offset())));
  }
  return tensors;
}

HostTensor MakeOutGradient(const Problem& problem, const v1::ResolvedViews* views) {
  Random random(problem.seed + 1);
  HostTensor gradient = *cli::MakeTensor(OutType(problem), problem.out_shape);
  if (views == nullptr) {
    FillRandom(1, &random, &gradient);
  } else {
    Fill(kNaN, &gradient);
    FillOwned(problem, *views, Part::kOut, &random, &gradient);
  }
  return gradient;
}

std::vector<bool> OwnedOut(const Problem& problem, const v1::ResolvedViews& views) {
  std::vector<bool> owned(static_cast<size_t>(Count(problem.out_shape)));
  ForEachElement(problem, views, Part::kOut,
                 [&](int64_t element) { owned.at(static_cast<size_t>(element)) = true; });
  return owned;
}

std::vector<bool> OwnedGradient(const Problem& problem, const v1::ResolvedViews& views, int slot) {
  if (slot > cli::kNumInputSlots) return {};
  const v1::Tensor& desc = *InputOf(problem.request.inputs(), slot);
  std::vector<bool> owned(static_cast<size_t>(Count({desc.shape().begin(), desc.shape().end()})));
  for (const Part part : kInputParts) {
    if (ViewOf(views, part).buffer() != cli::SlotName(slot)) continue;
    ForEachElement(problem, views, part,
                   [&](int64_t element) { owned.at(static_cast<size_t>(element)) = true; });
  }
  return owned;
}

void PoisonOut(const Problem& problem, const v1::ResolvedViews& views, HostTensor* out) {
  const std::vector<bool> owned = OwnedOut(problem, views);
  for (size_t i = 0; i < owned.size(); ++i) {
    if (owned[i]) continue;
    cli::StoreFloat(out->dtype, out->data.get(), static_cast<int64_t>(i), kNaN);
  }
}

void PoisonLse(const Problem& problem, HostTensor* lse) {
  const int64_t heads = problem.request.spec().num_heads();
  const int64_t axis = problem.request.spec().max_seqlen_q();
  HostTensor poisoned = *cli::MakeTensor(lse->dtype, lse->shape);
  Fill(kNaN, &poisoned);
  for (size_t i = 0; i < problem.sequences.size(); ++i) {
    const Extent& s = problem.sequences[i];
    for (int64_t r = 0; r < s.q_len; ++r) {
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t element = problem.q_is_thd ? (s.q_row + r) * heads + n
                                                 : (static_cast<int64_t>(i) * heads + n) * axis + r;
        cli::StoreFloat(lse->dtype, poisoned.data.get(), element,
                        cli::LoadFloat(lse->dtype, lse->data.get(), element));
      }
    }
  }
  *lse = std::move(poisoned);
}

}  // namespace attnd::support
