#include "client/cli/random_tensors.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/local_check.h"

namespace attnd::cli {
namespace {

constexpr int64_t kMaxRandomBytes = std::numeric_limits<int32_t>::max();

HostTensor DrawTensor(v1::DataType dtype, std::vector<int64_t> shape, std::mt19937_64* random) {
  HostTensor tensor = *MakeTensor(dtype, std::move(shape));
  std::normal_distribution<float> normal;
  const int64_t count = tensor.byte_size / SizeOf(dtype);
  for (int64_t i = 0; i < count; ++i) StoreFloat(dtype, tensor.data.get(), i, normal(*random));
  return tensor;
}

bool NeedsPageTables(const v1::ForwardRequest& request) {
  return ShortName(request.spec().layout()).rfind("PAGED_KV_", 0) == 0 &&
         !request.sequences().has_page_table_k() && !request.sequences().has_page_table_v();
}

// Every page is used once as long as the pool has enough of them.
void FillPageTable(int64_t num_pages, std::mt19937_64* random, v1::Tensor* table) {
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), *random);
  std::vector<int32_t> entries(static_cast<size_t>(table->shape(0) * table->shape(1)));
  for (size_t i = 0; i < entries.size(); ++i) entries[i] = pages[i % pages.size()];
  table->set_data(entries.data(), entries.size() * sizeof(int32_t));
}

// What is still to be made, by slot; checked before anything is allocated.
absl::StatusOr<std::map<int, ShapeOf>> MissingTensors(const ForwardCall& call,
                                                      const ResolvedShapes& shapes) {
  std::map<int, ShapeOf> missing = shapes.inputs;
  const auto add = [&](int slot, bool described, const v1::Tensor& tensor) {
    if (!described || call.tensors.count(slot) > 0) return;
    missing[slot] = {tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}};
  };
  add(kBiasSlot, call.request.has_bias(), call.request.bias());
  add(kSoftmaxOffsetSlot, call.request.has_softmax_offset(), call.request.softmax_offset());
  int64_t total = 0;
  for (const auto& [slot, desc] : missing) {
    const std::optional<int64_t> bytes = NumBytes(desc.dtype, desc.shape);
    if (!bytes || __builtin_add_overflow(total, *bytes, &total) || total > kMaxRandomBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the inputs have more than the ", kMaxRandomBytes, " bytes that one message can hold"));
    }
  }
  return missing;
}

}  // namespace

HostTensor RandomTensor(v1::DataType dtype, std::vector<int64_t> shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  return DrawTensor(dtype, std::move(shape), &random);
}

absl::Status DescribePageTables(v1::ForwardRequest* request) {
  if (!NeedsPageTables(*request)) return absl::OkStatus();
  const v1::AttentionSpec& spec = request->spec();
  const auto& ends = request->sequences().cu_seqlens_kv();
  if (spec.page_size() <= 0 || ends.size() < 2) {
    return absl::InvalidArgumentError(
        "a random paged request needs --page-size and --cu-seqlens-kv");
  }
  int64_t longest = std::max<int64_t>(spec.max_seqlen_kv(), 1);
  for (int i = 1; i < ends.size(); ++i) {
    int64_t length = 0;
    if (__builtin_sub_overflow(ends[i], ends[i - 1], &length))
      continue;  // The resolver's to refuse.
    longest = std::max(longest, length);
  }
  const int64_t pages = longest / spec.page_size() + (longest % spec.page_size() != 0);
  if (pages > kMaxRandomBytes / ends.size()) {
    return absl::InvalidArgumentError("the page tables would have too many entries");
  }
  v1::Tensor table;
  table.set_dtype(v1::DATA_TYPE_INT32);
  table.add_shape(ends.size() - 1);
  table.add_shape(pages);
  *request->mutable_sequences()->mutable_page_table_k() = table;
  *request->mutable_sequences()->mutable_page_table_v() = table;
  return absl::OkStatus();
}

absl::Status MakeRandomTensors(uint64_t seed, ForwardCall* call) {
  std::mt19937_64 random(seed);
  const v1::Tensor& table = call->request.sequences().page_table_k();
  const bool make_tables = table.shape_size() > 0 && !table.has_data();
  const absl::StatusOr<ResolvedShapes> shapes = ResolveShapes(call->request);
  if (!shapes.ok()) return shapes.status();
  if (make_tables && (shapes->num_pages_k <= 0 || shapes->num_pages_v <= 0)) {
    return absl::InvalidArgumentError("the page pools have no pages");
  }
  absl::StatusOr<std::map<int, ShapeOf>> missing = MissingTensors(*call, *shapes);
  if (!missing.ok()) return missing.status();
  for (auto& [slot, desc] : *missing) {
    HostTensor tensor = DrawTensor(desc.dtype, std::move(desc.shape), &random);
    *MutableTensor(&call->request, slot) = Describe(tensor);
    call->tensors.emplace(slot, std::move(tensor));
  }
  if (make_tables) {
    v1::Sequences* sequences = call->request.mutable_sequences();
    FillPageTable(shapes->num_pages_k, &random, sequences->mutable_page_table_k());
    FillPageTable(shapes->num_pages_v, &random, sequences->mutable_page_table_v());
  }
  return absl::OkStatus();
}

}  // namespace attnd::cli
