// Rows of a matrix in shared memory as the portable kernels keep them, and the walk over a tile's blocks.
#pragma once

#include "attention/tile_schedule.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"

namespace counterpoint {

// kRows rows of kColumns elements. A row is 16 bytes longer than its elements: with an odd number of 16-byte pieces a row,
// the 8 rows that ldmatrix reads at once lie in 8 different groups of banks, and every address is a base and a constant.
template <u32 kRowsOf, u32 kColumnsOf>
struct SharedRows {
  static constexpr u32 kRows = kRowsOf;
  static constexpr u32 kColumns = kColumnsOf;
  static constexpr u32 kPitch = 2 * kColumns + 16;  // bytes
  static constexpr u32 kBytes = kRows * kPitch;
  static_assert(kColumns % 16 == 0 && kPitch / 16 % 2 == 1, "an odd number of pieces");

  // The byte offset of an element.
  static __device__ __forceinline__ u32 offset(u32 row, u32 column) { return row * kPitch + 2 * column; }

  // Offsets that a lane gives to ldmatrix, to which `offset` of a corner is added:
  //  - `lane_by_rows`: matrices 0, 1 below each other, 2, 3 to their right. As A, or transposed as two B whose rows run along k.
  //  - `lane_by_columns`: matrices 0, 1 beside each other, 2, 3 below them. As two B whose rows are columns of the product,
  //    or transposed as A.
  static __device__ __forceinline__ u32 lane_by_rows(u32 lane) { return offset(lane % 16, lane / 16 * 8); }
  static __device__ __forceinline__ u32 lane_by_columns(u32 lane) {
    return offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
  }

  // Starts the copy of rows [start, start + kRows) of one head of a tensor [.., pitch] by all kThreads threads. Rows from
  // `end` on and columns from `columns` on become zeros.
  template <u32 kThreads>
  static __device__ __forceinline__ void load(u32 shared, const Element* head, u64 pitch, i32 start, i32 end,
                                              u32 columns) {
    constexpr u32 kPieces = kColumns / 8;
    constexpr u32 kRounds = (kRows * kPieces + kThreads - 1) / kThreads;
#pragma unroll
    for (u32 i = 0; i < kRounds; ++i) {
      const u32 index = threadIdx.x + i * kThreads;
      const u32 row = index / kPieces, column = index % kPieces * 8;
      if (kRows * kPieces % kThreads != 0 && row >= kRows) break;
      cp_async_16(shared + offset(row, column), head + (u64(start) + row) * pitch + column,
                  start + i32(row) < end && column < columns);
    }
  }
};

// The blocks of a tile's runs, one after another.
struct BlockCursor {
  const TileRun* run;
  const TileRun* last;  // one past the tile's runs
  TileRun current;
  i32 start;

  __device__ __forceinline__ void enter() {
    if (run == last) return;
    const int4 bits = __ldg(reinterpret_cast<const int4*>(run));
    current = TileRun{bits.x, bits.y, u32(bits.z), u32(bits.w)};
    start = current.start;
  }
  __device__ __forceinline__ BlockCursor(const TileRun* runs, const Tile& tile)
      : run(runs + tile.run_begin), last(runs + tile.run_end) {
    enter();
  }
  __device__ __forceinline__ bool done() const { return run == last; }
  __device__ __forceinline__ bool bounded() const { return current.bound_begin != current.bound_end; }
  __device__ __forceinline__ void advance(i32 block) {
    start += block;
    if (start >= current.end) {
      ++run;
      enter();
    }
  }
};

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

}  // namespace counterpoint
