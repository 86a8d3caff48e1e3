// Which pairs of a warp's patch of a block are unmasked.
#pragma once

#include "attention/attention_mask.cuh"
#include "attention/portable_tile.cuh"

namespace counterpoint {

// How much of a rectangle of pairs is unmasked. kSome may also be said of an empty one.
enum class Cover : u32 { kNone, kSome, kAll };

// The cover of the pairs of query rows [q_start, q_end) and key rows [k_start, k_end), both not empty.
__device__ __forceinline__ Cover cover(const TileBound& bound, i32 q_start, i32 q_end, i32 k_start, i32 k_end) {
  const i32 first = max(q_start, bound.q_start), last = min(q_end, bound.q_end) - 1;
  const i32 low = max(bound.k_start, first + bound.diag_min), high = min(bound.k_end, last + bound.diag_max + 1);
  if (first > last || low >= k_end || high <= k_start || low >= high) return Cover::kNone;
  const bool all = first == q_start && last == q_end - 1 && max(bound.k_start, last + bound.diag_min) <= k_start &&
                   min(bound.k_end, first + bound.diag_max + 1) >= k_end;
  return all ? Cover::kAll : Cover::kSome;
}

// The cover of such a rectangle by all bounds of the block's run.
__device__ __forceinline__ Cover cover(const TileBound* bounds, const BlockCursor& block, i32 q_start, i32 q_end,
                                       i32 k_start, i32 k_end) {
  if (!block.bounded()) return Cover::kAll;
  if (q_start >= q_end || k_start >= k_end) return Cover::kNone;
  Cover seen = Cover::kNone;
  for (u32 b = block.bound_begin; b < block.bound_end && seen != Cover::kAll; ++b) {
    const Cover one = cover(load_bound(bounds + b), q_start, q_end, k_start, k_end);
    if (one != Cover::kNone) seen = one;
  }
  return seen;
}

// Writes `value` over the masked pairs of a patch of 16 * kRowTiles query rows from `q_start` on and kColumns key rows from
// `k_start` on, held as products leave it.
template <u32 kRowTiles, u32 kColumns>
__device__ __forceinline__ void overwrite_masked(float (&patch)[kRowTiles][kColumns / 2], float value,
                                                 const TileBound* bounds, const BlockCursor& block, i32 q_start,
                                                 i32 k_start, u32 lane) {
#pragma unroll
  for (u32 m = 0; m < kRowTiles; ++m) {
    ColumnMask<kColumns> mask;
    mask.clear();
    for (u32 b = block.bound_begin; b < block.bound_end; ++b) {
      const TileBound bound = load_bound(bounds + b);
#pragma unroll
      for (u32 i = 0; i < 2; ++i) mask.unmask(i, bound, q_start + i32(16 * m + 8 * i + lane / 4), k_start, lane);
    }
#pragma unroll
    for (u32 j = 0; j < kColumns / 2; ++j) {
      const u32 column = j / 4 * 2 + j % 2;
      patch[m][j] = (mask.words[j / 2 % 2][column / 32] >> (column % 32)) & 1u ? patch[m][j] : value;
    }
  }
}

}  // namespace counterpoint
