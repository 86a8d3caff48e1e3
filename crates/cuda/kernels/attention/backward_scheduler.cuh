// The tile scheduler of attention backward: from items to blocks of query rows; and what the roles of a CTA share.
#pragma once

#include "attention/backward_items.cuh"
#include "ptx/mbarrier.cuh"

namespace counterpoint {

namespace backward {

// Blocks that one query head goes through before the next head of the item goes through the same.
struct HeadBlocks {
  u32 run;  // where it begins: the block at `row` of the run before this one
  u32 left;
  i32 row;
};

// From items to their blocks. Only the loading thread uses it; it lies in shared memory because that thread's
// warpgroup has few registers.
//
// Blocks come from the last to the first: under causal masks all tiles of a sequence see its last rows, so tiles
// that start together read the same rows at the same time, from the second level cache. For the same reason the query
// heads of a key head alternate after some blocks (blocks_per_head).
//
// A long item that starts later than its neighbours starts where they are, and goes round: the rows that they read are in
// the cache, and those of the end no longer.
template <typename C>
struct TileScheduler {
  static constexpr i32 kFirstRow = -1;
  static constexpr u32 kMostRunsBack = 4;
  static constexpr u32 kFollowingSteps = 256;
  Step next;               // what the next call of advance() announces
  u32 run;                 // runs come backwards
  u32 last_run;            // where the item's last block is: at last_row of this run,
  i32 last_row;            // or, where that is kFirstRow, at the run's first block
  i32 rows_begin, rows_end;  // of the run
  Item item;
  HeadBlocks head_blocks;
  u32 count;               // steps announced
  u32 items;               // items opened that have something to see

  __device__ __forceinline__ void begin(const BackwardParams<C>& params) {
    count = items = 0;
    open_item(params);
  }

  // Opens the last block of the run before `run`.
  __device__ __forceinline__ void open_run(const BackwardParams<C>& params) {
    const int4 words = __ldg(reinterpret_cast<const int4*>(params.all.runs + --run));
    rows_begin = words.x;
    rows_end = words.y;
    next.row = words.x + (words.y - 1 - words.x) / i32(C::kRows) * i32(C::kRows);
    next.bound_begin = u32(words.z);
    next.bound_end = u32(words.w);
  }

  // Opens the block where an item of so many steps begins.
  __device__ __forceinline__ void open_first_run(const BackwardParams<C>& params, u32 steps) {
    last_run = next.run_begin;
    last_row = kFirstRow;
    open_run(params);
    // A fixed order has one order of blocks; and a short item has its rows in the cache anyway, and no time to look for a place.
    if constexpr (!C::kFixedOrder) {
      if (steps < kFollowingSteps) return;
      go_to(params, Neighbours::row(params, item, next.head_kv));
    }
  }

  // From the item's last block to where the others of its key head are, if the item has that among its last runs. It goes round
  // from there.
  __device__ __forceinline__ void go_to(const BackwardParams<C>& params, i32 cursor) {
    if (cursor >= next.row) return;
    for (u32 i = 0; i < kMostRunsBack && rows_begin > cursor; ++i) {
      if (run == next.run_begin) break;
      open_run(params);
    }
    if (rows_begin > cursor) {
      run = next.run_end;
      open_run(params);
    } else if (cursor < next.row) {
      next.row = rows_begin + (cursor - rows_begin) / i32(C::kRows) * i32(C::kRows);
      last_run = run;
      last_row = next.row + i32(C::kRows);
    } else if (run + 1 < next.run_end) {
      last_run = run + 1;
    }
  }

  // Says what there is to know of the block at next.row.
  __device__ __forceinline__ void open_block(const BackwardParams<C>& params) {
    next.row_end = min(rows_end, next.row + i32(C::kRows));
    const bool bounded = next.bound_begin != next.bound_end || next.key_end - next.key < i32(C::kKeys);
    next.flags = (bounded ? kBounded : 0) | (items % 2 ? 0 : kOdd);
    if (next.row_end - next.row < i32(C::kRows)) next.flags |= kShort;
    if constexpr (C::kFixedOrder) OrderedItems::find_order(params, next, item.tile);
    if (C::kAlone) next.flags |= item.flags;
    if (last_block() && last_head()) next.flags |= kLast;
  }

  __device__ __forceinline__ bool last_block() const {
    return run == last_run && next.row == (last_row == kFirstRow ? rows_begin : last_row);
  }
  __device__ __forceinline__ bool last_head() const { return next.head_q + 1 == item.head_q_end; }

  // Remembers the block at next.row as the one from which the other heads start too.
  __device__ __forceinline__ void begin_head_blocks(const BackwardParams<C>& params) {
    next.head_q = item.head_q_begin;
    head_blocks = HeadBlocks{run + 1, params.all.blocks_per_head, next.row};
    if constexpr (!C::kFixedOrder) Neighbours::notify(params, item, next.head_kv, next.row);
  }

  // Opens it again, for the next head.
  __device__ __forceinline__ void repeat_head_blocks(const BackwardParams<C>& params) {
    ++next.head_q;
    run = head_blocks.run;
    open_run(params);
    next.row = head_blocks.row;
    head_blocks.left = params.all.blocks_per_head;
  }

  __device__ __forceinline__ void open_item(const BackwardParams<C>& params) {
    const u32 ticket = atomicAdd(params.all.queue, 1u);
    if (ticket >= params.all.items) {
      next.flags = kExit;
      return;
    }
    using Items = typename ChooseType<C::kFixedOrder, OrderedItems, ClassItems>::Type;
    const Tile* tile = Items::find(params, ticket, item, next);
    const int4 words = __ldg(reinterpret_cast<const int4*>(tile));
    const u32 blocks = __ldg(&tile->blocks);
    if (C::kFixedOrder) item.tile = __ldg(&tile->number);
    next.key = words.x;
    next.key_end = words.y;
    next.run_begin = u32(words.z);
    run = next.run_end = u32(words.w);
    if (run == next.run_begin) {
      next.flags = kFirst | kLast | kEmpty | (C::kAlone ? item.flags : 0);
      return;
    }
    ++items;
    open_first_run(params, blocks * (item.head_q_end - item.head_q_begin));
    begin_head_blocks(params);
    open_block(params);
    next.flags |= kFirst;
  }

  // Goes on from the step in `next`.
  __device__ __forceinline__ void advance(const BackwardParams<C>& params) {
    if (next.flags & kLast) {
      open_item(params);
      return;
    }
    const bool blocks_end = --head_blocks.left == 0 || last_block();
    if (blocks_end && !last_head()) {
      repeat_head_blocks(params);
    } else {
      if (next.row > rows_begin) {
        next.row -= C::kRows;
      } else {
        if (run == next.run_begin) run = next.run_end;
        open_run(params);
      }
      if (blocks_end) begin_head_blocks(params);
    }
    open_block(params);
  }
};

template <typename C>
struct Storage {
  u8 k[C::kKeyBytes];
  u8 v[C::kKeyBytes];
  u8 q[C::kStages][C::kRowBytes];
  u8 dout[C::kStages][C::kRowBytes];
  u8 ds[2][C::kDsBytes];
  u8 dq[C::kDqBuffers + C::kGradientBuffers][kPartBytes];
  float lse[C::kStages][C::kRows];
  float delta[C::kStages][C::kRows];
  Step steps[kSteps];
  AddedItem added[2];
  SummedSlab found[2];
  TileScheduler<C> scheduler;
  Delivered delivered;
  u64 full_k, full_v;
  u64 full_q[C::kStages], full_dout[C::kStages], empty[C::kStages];
  u64 full_ds[2], empty_ds[2];
  u64 full_dq[C::kDqBuffers], empty_dq[C::kDqBuffers];
  u64 full_added[2], empty_added[2];
  u64 full_found[2], empty_found[2];
  u32 parts_before[2];  // see has_sums

  // By one thread, before anybody waits.
  __device__ __forceinline__ void initialise() {
    mbarrier_init(&full_k, 1);
    mbarrier_init(&full_v, 1);
    for (u32 i = 0; i < C::kStages; ++i) {
      mbarrier_init(&full_q[i], 1);
      mbarrier_init(&full_dout[i], 1);
      mbarrier_init(&empty[i], 8);  // warps of the key warpgroups
    }
    for (u32 i = 0; i < 2; ++i) {
      mbarrier_init(&full_ds[i], 8);
      mbarrier_init(&empty_ds[i], 4);  // warps of the query warpgroup
      mbarrier_init(&full_added[i], 1);
      mbarrier_init(&empty_added[i], 1);
      mbarrier_init(&full_found[i], 1);
      mbarrier_init(&empty_found[i], 4);
    }
    for (u32 i = 0; i < C::kDqBuffers; ++i) {
      mbarrier_init(&full_dq[i], 4);
      mbarrier_init(&empty_dq[i], 1);
    }
    fence_mbarrier_init();
    fence_async_proxy();
  }
};

}  // namespace backward

}  // namespace counterpoint
