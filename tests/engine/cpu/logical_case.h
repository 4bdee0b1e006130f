// Small problems told by their sequences, run in any layout on memory that ends at guard pages.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/backend/attention_backend.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/golden.h"
#include "tests/conformance/pack.h"

namespace attnd::testing {

struct Heads {
  int64_t h = 1, g = 1, d_qk = 8, d_v = 8;
};

// Sequences of (q_len, kv_len), one behind the other; dense axes are as long as the longest, and 1
// at least.
Geometry GeometryOf(const std::vector<std::pair<int64_t, int64_t>>& lengths, const Heads& heads);
// The same with sequences starting at these rows on both sides; the last entry is an end.
Geometry GeometryWithRows(const std::vector<std::pair<int64_t, int64_t>>& lengths,
                          const std::vector<int64_t>& rows, const Heads& heads);

// By row, head and component of the sequences, one after the other; bias and sinks as they are.
struct LogicalAnswer {
  std::vector<float> out, lse;
  std::array<std::vector<float>, 3> dqkv;
  std::vector<float> d_bias, d_sinks;

  bool operator==(const LogicalAnswer&) const = default;
};

struct LogicalCase {
  // Q, K, V and dO of unit variance.
  explicit LogicalCase(const Geometry& geometry, DType dtype = DType::kFloat32);

  void SetBias(BiasKind kind, const std::vector<int64_t>& shape);  // Random.
  void SetSinks(const std::vector<float>& values);

  // Forward, then backward with what forward gave, on poisoned outputs; rows that belong to nobody
  // are NaN in all inputs. Fails the test on a status that is not OK, on a read or write past a
  // buffer's end, and where something other than 0 (-inf in LSE) is in a row that belongs to
  // nobody.
  LogicalAnswer Run(AttentionBackend& backend, const Arrangement& arrangement) const;
  LogicalAnswer Run(AttentionBackend& backend, Layout layout) const {
    return Run(backend, ArrangementOf(layout));
  }
  // Forward alone, for pages.
  LogicalAnswer RunForwardOnly(AttentionBackend& backend, const Arrangement& arrangement) const;

  // What Resolve says of it in a layout.
  absl::StatusOr<AttentionProblem> ResolveIn(Layout layout) const;

  // Where row j, head n, component c of sequence i is in Q, K or V (0, 1, 2) and their gradients.
  size_t At(int tensor, int64_t i, int64_t j, int64_t n, int64_t c) const;

  GoldenCase spec;  // Geometry, mask and parameters; its tensors are set when it runs.
  std::array<std::vector<float>, 3> qkv;
  std::vector<float> d_out, bias, sinks;
};

// Largest |a - b|; infinite where sizes or NaN differ.
double Distance(const std::vector<float>& a, const std::vector<float>& b);
// The largest of all parts.
double Distance(const LogicalAnswer& a, const LogicalAnswer& b);
bool AllFinite(const std::vector<float>& values);
bool AllFinite(const LogicalAnswer& answer);  // But for LSE.

}  // namespace attnd::testing
