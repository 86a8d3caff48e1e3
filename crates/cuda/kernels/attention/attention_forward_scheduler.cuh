// Who hands out the forward's work: one thread takes items from the queue and plans their steps a few ahead, so that nobody
// else waits for the schedule's way through global memory.
#pragma once

#include "attention/attention_forward_work.cuh"
#include "ptx/cluster.cuh"

namespace counterpoint {

template <typename C>
struct AttentionForwardScheduler {
  const AttentionForwardArguments& arguments;
  AttentionForwardShared<C>& shared;
  u32 index = C::kCtas > 1 ? cluster_index() : blockIdx.x;  // of the item in `tile` and `head`
  Tile tile;
  TileRun run;  // the one of its runs that is planned next
  u32 head;
  const u32 rank = C::kCtas > 1 ? cluster_rank() : 0;
  u32 tickets = 0;  // taken by the cluster so far
  u32 items = 0;  // planned so far
  u32 steps = 0;

  // Which tiles are taken next, as long as there are some.
  enum Order : u32 {
    kReadyFirst,    // until the rows of the others are there
    kWaitingFirst,  // they are heavy and light ones, and what comes last should be light
    kReadyOnly,
  };
  // Items with which a launch begins.
  __device__ __forceinline__ static u32 begun() { return gridDim.x / C::kCtas; }
  u32 order = arguments.waiting.count != 0 ? kReadyFirst : kReadyOnly;

  __device__ __forceinline__ u32 ready_items() const { return arguments.ready.count * arguments.heads; }
  __device__ __forceinline__ u32 all_items() const {
    return (arguments.ready.count + arguments.waiting.count) * arguments.heads;
  }
  __device__ __forceinline__ bool more() const { return index < all_items(); }

  // Reads the tile of item `index` and its first run. Heaviest tiles first, all heads of a group for one tile after
  // another; the lightest tiles come after those of all groups.
  __device__ __forceinline__ void find() {
    if (!more()) return;
    const bool waits = index >= ready_items();
    const ForwardTiles& tiles = waits ? arguments.waiting : arguments.ready;
    const u32 place = waits ? index - ready_items() : index;
    const u32 grouped = tiles.grouped * arguments.heads;
    u32 first_tile = tiles.grouped, first_head = 0, width = arguments.heads, within = place - grouped;
    if (place < grouped) {
      const u32 per_group = tiles.grouped * tiles.heads_per_group;
      const u32 group = place / per_group;
      first_tile = 0;
      first_head = group * tiles.heads_per_group;
      width = min(tiles.heads_per_group, arguments.heads - first_head);
      within = place - group * per_group;
    }
    tile = arguments.tiles[tiles.first + first_tile + within / width];
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
  __device__ __forceinline__ void plan_item() {
    const i32 before = i32(rank * C::kTokens);
    shared.items[items % kItems] =
        AttentionForwardItem{tile.start + before, tile.end, head, tile.partial, head / arguments.heads_per_key};
    ++items;
    if (tile.run_begin == tile.run_end) {
      // Nothing to see: one step whose keys lie beyond the tensor, where TMA reads zeros, and a bound that holds
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
    if constexpr (C::kCtas == 1) {
      index = next();
    } else {
      index = cluster_next();
    }
    find();
  }

  // The item that the cluster takes.
  __device__ __forceinline__ u32 cluster_next() {
    const u32 slot = tickets % 2, parity = tickets / 2 % 2;
    ++tickets;
    u32 taken;
    if (rank == 0) {
      taken = next();
      mbarrier_wait_cluster(&shared.ticket_empty[slot], parity ^ 1);
#pragma unroll
      for (u32 other = 1; other < C::kCtas; ++other) {
        peer_store(peer_address(shared_address(&shared.tickets[slot]), other), taken,
                   peer_address(shared_address(&shared.ticket_full[slot]), other));
      }
    } else {
      mbarrier_arrive_expect(&shared.ticket_full[slot], sizeof(shared.tickets[slot]));
      mbarrier_wait_cluster(&shared.ticket_full[slot], parity);
      taken = *static_cast<volatile u32*>(&shared.tickets[slot]);
      peer_arrive(peer_address(shared_address(&shared.ticket_empty[slot]), 0));
    }
    return taken;
  }

  __device__ __forceinline__ u32 next() {
    const auto delivered = [&] {
      return arguments.arrivals.mailbox == nullptr || link_all_delivered(arguments.arrivals);
    };
    if (order == kReadyFirst && delivered()) order = kWaitingFirst;
    if (order == kWaitingFirst) {
      const u32 waiting = next_waiting();
      if (waiting < all_items()) return waiting;
      order = kReadyOnly;
    }
    // The first ones were begun by CTAs, or clusters, that had just started.
    const u32 ready = min(begun(), ready_items()) + atomicAdd(&arguments.queue[0], 1u);
    if (ready < ready_items()) return ready;
    return order == kReadyFirst ? next_waiting() : all_items();
  }
  __device__ __forceinline__ u32 next_waiting() const {
    return max(begun(), ready_items()) + atomicAdd(&arguments.queue[2], 1u);
  }

  // The first item is found before; it is not taken from the queue.
  __device__ __forceinline__ void work() {
    while (more()) {
      plan_item();
      take_next();
    }
    plan(AttentionForwardStep{0, 0, 0, kStepNone}, TileBound{});
  }
};

}  // namespace counterpoint
