// Who hands out the forward's work: one thread takes items from the queue and plans their steps a few ahead, so that nobody
// else waits for the schedule's way through global memory.
#pragma once

#include "attention/attention_forward_work.cuh"

namespace counterpoint {

template <typename C>
struct AttentionForwardWalker {
  const AttentionForwardArguments& arguments;
  AttentionForwardShared<C>& shared;
  u32 index = blockIdx.x;  // of the item in `tile` and `head`
  Tile tile;
  TileRun run;  // the one of its runs that is planned next
  u32 head;
  u32 items = 0;  // planned so far
  u32 steps = 0;

  __device__ __forceinline__ bool more() const { return index < arguments.tile_count * arguments.heads; }

  // Reads the tile of item `index` and its first run. Heaviest tiles first, all heads of a group for one tile after
  // another; the lightest tiles come after those of all groups.
  __device__ __forceinline__ void find() {
    if (!more()) return;
    const u32 grouped = arguments.grouped_tiles * arguments.heads;
    u32 first_tile = arguments.grouped_tiles, first_head = 0, width = arguments.heads, within = index - grouped;
    if (index < grouped) {
      const u32 per_group = arguments.grouped_tiles * arguments.heads_per_group;
      const u32 group = index / per_group;
      first_tile = 0;
      first_head = group * arguments.heads_per_group;
      width = min(arguments.heads_per_group, arguments.heads - first_head);
      within = index - group * per_group;
    }
    tile = arguments.tiles[first_tile + within / width];
    head = first_head + within % width;
    if (tile.run_begin != tile.run_end) run = arguments.runs[tile.run_begin];
  }

  // `bound` is the first bound of a bounded step.
  __device__ __forceinline__ void plan(const AttentionForwardStep& step, const TileBound& bound) {
    mbarrier_wait(&shared.step_empty[steps % kPlanned], ((steps / kPlanned) & 1) ^ 1);
    shared.steps[steps % kPlanned] = step;
    if (step.flags & kStepBounded) shared.bounds[steps % kPlanned] = bound;
    mbarrier_arrive(&shared.step_full[steps % kPlanned]);
    ++steps;
  }

  // Plans the item's steps.
  __device__ __forceinline__ void walk() {
    shared.items[items % kItems] =
        AttentionForwardItem{tile.start, tile.end, head, tile.partial, head / arguments.heads_per_key};
    ++items;
    if (tile.run_begin == tile.run_end) {
      // Nothing to see: one step whose keys lie beyond the tensor, where the copy engine reads zeros, and a bound that holds
      // nothing.
      plan(AttentionForwardStep{arguments.rows_k, 0, 1, kStepFirst | kStepLast | kStepBounded}, TileBound{});
      return;
    }
    u32 first = kStepFirst;
    for (u32 r = tile.run_begin; r < tile.run_end; ++r) {
      const bool last = r + 1 == tile.run_end;
      const u32 bounded = run.bound_begin != run.bound_end ? kStepBounded : 0;
      TileBound bound = {};
      if (bounded) bound = load_bound(arguments.bounds + run.bound_begin);
#pragma unroll 1
      for (i32 start = run.start; start < run.end; start += i32(C::kBlock)) {
        const bool ends = last && start + i32(C::kBlock) >= run.end;
        plan(AttentionForwardStep{start, run.bound_begin, run.bound_end, first | bounded | (ends ? kStepLast : 0)},
             bound);
        first = 0;
      }
      if (!last) run = arguments.runs[r + 1];
    }
  }

  // Asks for the next item when two of the planned steps have no scores yet: they take about twice as long as finding it.
  // An item taken earlier would wait here while another CTA has nothing to do.
  __device__ __forceinline__ void take_next() {
    constexpr u32 kUnscored = 2;
    if (steps > kUnscored) {
      const u32 scored = steps - kUnscored - 1;
      mbarrier_wait(&shared.step_empty[scored % kPlanned], (scored / kPlanned) & 1);
    }
    index = gridDim.x + atomicAdd(&arguments.queue[0], 1u);
    find();
  }

  // The first item is found before; it is not taken from the queue.
  __device__ __forceinline__ void work() {
    while (more()) {
      walk();
      take_next();
    }
    plan(AttentionForwardStep{0, 0, 0, kStepNone}, TileBound{});
    // The last CTA leaves the queue as it was found.
    if (atomicInc(&arguments.queue[1], gridDim.x - 1) == gridDim.x - 1) arguments.queue[0] = 0;
  }
};

}  // namespace counterpoint
