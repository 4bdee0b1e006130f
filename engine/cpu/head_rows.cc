#include "engine/cpu/head_rows.h"

#include <algorithm>
#include <cmath>

#include "engine/cpu/row_kernels.h"

namespace attnd {
namespace {

HeadRows MakeRows(const AttentionProblem& problem, const ForwardBuffers& buffers,
                  const TensorView& view, int64_t start) {
  HeadRows rows;
  rows.dtype = problem.dtype;
  rows.base = buffers.inputs[static_cast<size_t>(view.buffer)] + view.byte_offset +
              start * SizeOf(problem.dtype);
  rows.seq_stride = view.strides.seq;
  rows.dim_stride = view.strides.dim;
  return rows;
}

HeadRows MakeKvRows(const AttentionProblem& problem, const ForwardBuffers& buffers,
                    const TensorView& view, int64_t i, int64_t n) {
  const int64_t head_start = n * view.strides.head;
  if (problem.is_paged) {
    HeadRows rows = MakeRows(problem, buffers, view, head_start);
    rows.page_size = problem.page_size;
    rows.page_stride = view.strides.batch;
    return rows;
  }
  const int64_t kv_row = problem.sequences[static_cast<size_t>(i)].kv_row;
  const int64_t start = i * view.strides.batch + kv_row * view.start_multiplier;
  return MakeRows(problem, buffers, view, start + head_start);
}

const std::byte* RowStart(const HeadRows& rows, int64_t j) {
  int64_t element = j * rows.seq_stride;
  if (rows.pages != nullptr) {
    const int64_t page = rows.pages[j / rows.page_size];
    element = page * rows.page_stride + (j % rows.page_size) * rows.seq_stride;
  }
  return rows.base + element * SizeOf(rows.dtype);
}

}  // namespace

HeadRows QueryRows(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                   int64_t n) {
  const TensorView& view = problem.q;
  const int64_t q_row = problem.sequences[static_cast<size_t>(i)].q_row;
  const int64_t start = i * view.strides.batch + q_row * view.start_multiplier + view.HeadStart(n);
  HeadRows rows = MakeRows(problem, buffers, view, start);
  rows.cols = problem.head_dim_qk;
  rows.factor = problem.fp8.descale_q;
  return rows;
}

HeadRows KeyRows(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                 int64_t n) {
  HeadRows rows = MakeKvRows(problem, buffers, problem.k, i, n);
  rows.cols = problem.head_dim_qk;
  rows.factor = problem.fp8.descale_k;
  if (problem.is_paged) rows.pages = buffers.page_table_k + i * problem.pages_per_sequence;
  return rows;
}

HeadRows ValueRows(const AttentionProblem& problem, const ForwardBuffers& buffers, int64_t i,
                   int64_t n) {
  HeadRows rows = MakeKvRows(problem, buffers, problem.v, i, n);
  rows.cols = problem.head_dim_v;
  rows.factor = problem.fp8.descale_v;
  if (problem.is_paged) rows.pages = buffers.page_table_v + i * problem.pages_per_sequence;
  return rows;
}

HeadRows BiasRows(const AttentionProblem& problem, const std::byte* bias, const SequenceHead& at,
                  const KeyRange& keys) {
  const Strides& s = problem.bias_strides;
  HeadRows rows;
  rows.dtype = problem.dtype;
  rows.base = bias + (at.sequence * s.batch + at.head * s.head + keys.first * s.dim) *
                         SizeOf(problem.dtype);
  rows.cols = keys.last - keys.first;
  rows.seq_stride = s.seq;
  rows.dim_stride = s.dim;
  return rows;
}

namespace {

// GatherRows without the zeros and the factor.
void CopyRows(const HeadRows& rows, int64_t first, int64_t count, float* dst, int64_t dst_stride) {
  if (rows.dim_stride != 1) {
    for (int64_t j = 0; j < count; ++j) {
      const std::byte* row = RowStart(rows, first + j);
      for (int64_t c = 0; c < rows.cols; ++c) {
        dst[j * dst_stride + c] = LoadElement(rows.dtype, row, c * rows.dim_stride);
      }
    }
    return;
  }
  for (int64_t j = 0; j < count;) {  // Page by page.
    const int64_t run = rows.pages == nullptr
                            ? count
                            : std::min(count - j, rows.page_size - (first + j) % rows.page_size);
    ToFloat({rows.dtype, RowStart(rows, first + j), rows.seq_stride, run, rows.cols,
             dst + j * dst_stride, dst_stride});
    j += run;
  }
}

}  // namespace

void GatherRows(const HeadRows& rows, int64_t first, int64_t count, float* dst,
                int64_t dst_stride) {
  for (int64_t j = 0; j < count && dst_stride > rows.cols; ++j) {
    std::fill(dst + j * dst_stride + rows.cols, dst + (j + 1) * dst_stride, 0.0f);
  }
  CopyRows(rows, first, count, dst, dst_stride);
  if (rows.factor == 1) return;
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t c = 0; c < rows.cols; ++c) dst[j * dst_stride + c] *= rows.factor;
  }
}

const float* FloatsInPlace(const HeadRows& rows, int64_t first) {
  const bool is_float = rows.dtype == DType::kFloat32 && rows.dim_stride == 1 &&
                        reinterpret_cast<uintptr_t>(rows.base) % alignof(float) == 0;
  if (!is_float || rows.pages != nullptr) return nullptr;
  return reinterpret_cast<const float*>(RowStart(rows, first));
}

bool IsRowOf(const HeadRows& rows, int64_t j, float value) {
  const std::byte* row = RowStart(rows, j);
  for (int64_t c = 0; c < rows.cols; ++c) {
    if (LoadElement(rows.dtype, row, c * rows.dim_stride) != value) return false;
  }
  return true;
}

bool AllRowsFinite(const HeadRows& rows, int64_t first, int64_t count) {
  for (int64_t j = first; j < first + count; ++j) {
    const std::byte* row = RowStart(rows, j);
    for (int64_t c = 0; c < rows.cols; ++c) {
      if (!std::isfinite(LoadElement(rows.dtype, row, c * rows.dim_stride))) return false;
    }
  }
  return true;
}

}  // namespace attnd
