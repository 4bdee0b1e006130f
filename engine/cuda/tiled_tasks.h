// How the tiled kernels cut a problem into tasks, and which cells of the attention matrix they
// compute: index arithmetic that the host and the device share. Needs no CUDA header.
//
// A task of rows has up to kRows query rows of one sequence and KV head. Long sequences are cut
// head by head; the rows of a short one (decode) are taken together for all query heads that share
// the KV head. A task of keys has up to kKeys keys of one sequence and KV head. So the cut of a
// sequence depends on nothing but that sequence, and with it the order of every sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/core/attention_problem.h"

#ifdef __CUDACC__
#define ATTND_HD __host__ __device__
#else
#define ATTND_HD
#endif

namespace attnd::tiled {

inline constexpr int kRows = 64;
inline constexpr int kKeys = 64;

struct Sequence {
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t q_row = 0;
  int64_t kv_row = 0;
  int64_t first_row_task = 0;
  int64_t first_key_task = 0;
};

struct Heads {
  int64_t query = 0;
  int64_t kv = 0;

  // Query heads of one KV head.
  ATTND_HD int64_t shared() const { return query / kv; }
};

// BandMask with both sides given: a side beyond every length is unlimited.
struct Band {
  int64_t left = 0;
  int64_t right = 0;
  bool bottom_right = false;
};

Band BandOf(const BandMask& mask);

// Row n of the tile is query row (first + n) % q_len of head `head` + (first + n) / q_len.
struct RowTile {
  int64_t head = 0;
  int64_t first = 0;
  int64_t rows = 0;
};

ATTND_HD inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

ATTND_HD inline bool HeadsShareTiles(int64_t q_len) { return q_len < kRows; }

// Tasks of rows of a sequence. Those of a KV head follow one another: an equal part for each.
ATTND_HD inline int64_t RowTasks(int64_t q_len, const Heads& heads) {
  return HeadsShareTiles(q_len) ? heads.kv * CeilDiv(heads.shared() * q_len, kRows)
                                : heads.query * CeilDiv(q_len, kRows);
}

ATTND_HD inline int64_t KeyTasks(int64_t kv_len, const Heads& heads) {
  return heads.kv * CeilDiv(kv_len, kKeys);
}

// Task n of the sequence's.
ATTND_HD inline RowTile RowTileOf(int64_t q_len, const Heads& heads, int64_t n) {
  const int64_t heads_in_tile = HeadsShareTiles(q_len) ? heads.shared() : 1;
  const int64_t rows = heads_in_tile * q_len;
  const int64_t tiles = CeilDiv(rows, kRows);
  const int64_t first = n % tiles * kRows;
  return {n / tiles * heads_in_tile, first, rows - first < kRows ? rows - first : kRows};
}

// The sequence that has the task: the last one whose first is not behind it.
template <int64_t Sequence::*kFirst>
ATTND_HD int64_t SequenceOfTask(const Sequence* sequences, int64_t batch, int64_t task) {
  int64_t low = 0, high = batch;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (sequences[middle].*kFirst <= task ? low : high) = middle;
  }
  return low;
}

// Keys that rows first_row .. last_row of the sequence see between them; a band has no holes.
ATTND_HD inline KeyRange VisibleKeys(const Band& band, const Sequence& s, int64_t first_row,
                                     int64_t last_row) {
  const int64_t shift = band.bottom_right ? s.kv_len - s.q_len : 0;
  const int64_t first = first_row + shift - band.left;
  const int64_t last = last_row + shift + band.right + 1;
  const KeyRange keys = {first > 0 ? first : 0, last < s.kv_len ? last : s.kv_len};
  return keys.first < keys.last ? keys : KeyRange{0, 0};
}

// Keys that a tile's rows see, and perhaps some that other rows of its sequence see.
ATTND_HD inline KeyRange KeysOfTile(const Band& band, const Sequence& s, const RowTile& tile) {
  if (HeadsShareTiles(s.q_len)) return VisibleKeys(band, s, 0, s.q_len - 1);
  return VisibleKeys(band, s, tile.first, tile.first + tile.rows - 1);
}

struct TaskCounts {
  int64_t rows = 0;
  int64_t keys = 0;
};

// Writes the problem's batch of sequences.
TaskCounts FillSequences(const AttentionProblem& problem, std::span<Sequence> sequences);

}  // namespace attnd::tiled
