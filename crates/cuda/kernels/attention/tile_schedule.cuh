// A tile schedule as the host lays it out (`tile_schedule.rs` of the crate `counterpoint-plan` builds it).
//
// Forward: a tile owns query rows and loops over runs of key columns. Backward: a tile owns key columns and loops over runs of query
// rows. Rows and columns are tokens; how heads are packed is the kernel's business.
#pragma once

#include "types.cuh"

namespace counterpoint {

// Rows that one CTA owns, and the runs that it loops over.
struct Tile {
  i32 start;      // first owned row (forward: query row; backward: key row)
  i32 end;        // end of the owned rows; end - start is at most the schedule's tile size
  u32 run_begin;  // into runs
  u32 run_end;    // == run_begin: nothing to see, the results are zeros
  i32 partial;    // -1, or the slot of the partial result that this part of a split tile writes
  u32 blocks;     // blocks in all its runs
  u32 number;     // place of the tile when tiles are ordered by rows; the parts of a split tile share it
  u32 reserved;
};

// Consecutive blocks along the other axis that share one list of bounds.
struct TileRun {
  i32 start;        // first row of the first block
  i32 end;          // end of the last block's rows; blocks are `block` rows from start on, the last may be short
  u32 bound_begin;  // into bounds
  u32 bound_end;    // == bound_begin: every pair of the tile's rows with these rows is unmasked, and no block is short
};

// One part of the mask, in tokens: a rectangle and a range of diagonals. A pair is unmasked when any bound of its run
// holds it: q_start <= q < q_end, k_start <= k < k_end, diag_min <= k - q <= diag_max. Bounds of one run are disjoint.
struct alignas(16) TileBound {
  i32 q_start, q_end;
  i32 k_start, k_end;
  i32 diag_min, diag_max;  // -2^30 and 2^30 where there is no limit
  i32 reserved[2];
};

// A split tile: its rows are merged from the partial results in these slots.
struct TileMerge {
  i32 start, end;
  u32 slot_begin, slot_end;
};

// Key tiles first .. end - 1 (numbers as in Tile) that all add to one block of dq; number n adds
// after order + n - first others have added, which `counter` counts. Only where the order of additions is fixed.
struct DqOrderSpan {
  u32 first, end;
  u32 order;
  u32 counter;
};

// Bounds are read by every thread alike.
__device__ __forceinline__ TileBound load_bound(const TileBound* bound) {
  const int4 low = __ldg(reinterpret_cast<const int4*>(bound));
  const int4 high = __ldg(reinterpret_cast<const int4*>(bound) + 1);
  return TileBound{low.x, low.y, low.z, low.w, high.x, high.y, {0, 0}};
}

static_assert(sizeof(Tile) == 32 && sizeof(TileRun) == 16 && sizeof(TileBound) == 32, "layouts shared with the host");
static_assert(sizeof(TileMerge) == 16 && sizeof(DqOrderSpan) == 16, "layouts shared with the host");

}  // namespace counterpoint
