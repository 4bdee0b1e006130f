// Rows of one head of one sequence of Q, K or V, wherever a layout put them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/backend/attention_plan.h"
#include "engine/core/attention_problem.h"

namespace attnd {

// [rows, cols] elements of `dtype`. Row j starts seq_stride * j elements after base; where `pages`
// is set, at row j % page_size of page pages[j / page_size]. Its real values are `factor` times
// what is stored.
struct HeadRows {
  DType dtype = DType::kUnspecified;
  const std::byte* base = nullptr;
  int64_t cols = 0;
  int64_t seq_stride = 0;
  int64_t dim_stride = 0;
  const int32_t* pages = nullptr;
  int64_t page_size = 0;
  int64_t page_stride = 0;
  float factor = 1;
};

// Rows of sequence i; `n` is a query head for queries, a KV head for keys and values.
HeadRows QueryRows(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                   int64_t n);
HeadRows KeyRows(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                 int64_t n);
HeadRows ValueRows(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                   int64_t n);

struct SequenceHead {
  int64_t sequence = 0;
  int64_t head = 0;
};

// Of the problem's bias: query rows of that query head, and columns for `keys` alone.
HeadRows BiasRows(const AttentionProblem& problem, const std::byte* bias, const SequenceHead& at,
                  const KeyRange& keys);

// Copies real rows first .. first + count - 1 to dst as float32, rows dst_stride apart, with zeros
// between them where that is more than cols.
void GatherRows(const HeadRows& rows, int64_t first, int64_t count, float* dst, int64_t dst_stride);

// Row `first` where rows are contiguous float32 at distances of seq_stride, else null.
const float* FloatsInPlace(const HeadRows& rows, int64_t first);

// Whether every stored element of row j is `value`.
bool IsRowOf(const HeadRows& rows, int64_t j, float value);

// Whether none of these stored elements is infinite or NaN. Slow: for what should not happen.
bool AllRowsFinite(const HeadRows& rows, int64_t first, int64_t count);

}  // namespace attnd
