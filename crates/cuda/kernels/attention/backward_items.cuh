// The queue of items of attention backward, shared by all CTAs: which tile, key head and query heads a ticket means, and where the CTAs
// of a key head are.
//
// An item is asked for only when it is to be opened: a CTA that held one while it is busy would have others wait, to add after it or for it
// to finish last.
#pragma once

#include "attention/backward_work.cuh"
#include "ptx/flag.cuh"

namespace counterpoint {

namespace backward {

// A tile, and some query heads of a key head. What its steps say of it, they say themselves.
struct Item {
  u32 tile;                      // the tile's number, where the order of additions is fixed
  u32 head_q_begin, head_q_end;
  u32 flags;                     // kHalf, kAlone: of all its steps

  // Part `part` of the query heads of a key head, `heads` of them.
  __device__ __forceinline__ void set_heads(const AttentionBackwardArguments& params, Step& step, u32 head_kv, u32 part,
                                            u32 heads) {
    step.head_kv = head_kv;
    head_q_begin = head_kv * params.group + part * heads;
    head_q_end = head_q_begin + heads;
  }
};

// Query heads of an item whose steps have these flags.
template <typename C>
__device__ __forceinline__ u32 item_heads(const BackwardParams<C>& params, u32 flags) {
  if constexpr (C::kSums) {
    return params.all.group / params.sums.parts;
  } else {
    return flags & kHalf ? params.all.group / 2 : params.all.group;
  }
}

// Where the order of additions is fixed, the queue goes tile by tile, some heads of each: the longer before a tile the one that it follows has
// started, the less it waits.
struct OrderedItems {
  // The tile of item `ticket`.
  template <typename C>
  static __device__ __forceinline__ const Tile* find(const BackwardParams<C>& params, u32 ticket, Item& item, Step& step) {
    const BackwardDqOrder& order = params.order;
    const u32 before = ticket / (order.num_tiles * order.heads_at_a_time) * order.heads_at_a_time;
    const u32 heads = min(order.heads_at_a_time, params.all.heads_kv - before);
    const u32 rest = ticket - before * order.num_tiles;
    item.set_heads(params.all, step, before + rest % heads, 0, params.all.group);
    return params.all.tiles + rest / heads;
  }

  // Gives the step the place of the tile of this number among those that add to its block of rows.
  template <typename C>
  static __device__ __forceinline__ void find_order(const BackwardParams<C>& params, Step& step, u32 tile) {
    const BackwardDqOrder& order = params.order;
    const u32 block = u32(step.row) / C::kRows;
    const u32 end = __ldg(order.begins + block + 1);
    for (u32 i = __ldg(order.begins + block); i < end; ++i) {
      const uint4 span = __ldg(reinterpret_cast<const uint4*>(order.spans + i));
      if (tile < span.y) {
        step.order = span.z + tile - span.x;
        step.counter = span.w;
        return;
      }
    }
  }
};

// Elsewhere tiles come in classes of similar work, the heaviest first. Within a class the queue goes head by head, so that CTAs that run
// together read the same rows; and class by class, so that the last items are short ones and CTAs finish together.
struct ClassItems {
  // Items of each tile and key head of a class.
  template <typename C>
  static __device__ __forceinline__ u32 parts_of(const BackwardParams<C>& params, u32 index) {
    if constexpr (C::kSums) {
      return params.sums.parts;
    } else if constexpr (C::kHalfHeads) {
      return index < params.half_heads.classes ? 2 : 1;
    } else {
      return 1;
    }
  }

  // The tile of item `ticket`.
  template <typename C>
  static __device__ __forceinline__ const Tile* find(const BackwardParams<C>& params, u32 ticket, Item& item, Step& step) {
    const u32 heads_kv = params.all.heads_kv;
    const u32* ends = params.order.ends;
    u32 rest = ticket;
    u32 first = 0;
    u32 tiles = ends[0];
    u32 parts = parts_of(params, 0);
    for (u32 i = 1; rest >= tiles * heads_kv * parts; ++i) {
      rest -= tiles * heads_kv * parts;
      first = ends[i - 1];
      tiles = ends[i] - first;
      parts = parts_of(params, i);
    }
    item.flags = C::kHalfHeads && parts == 2 ? kHalf : 0;
    const u32 head = rest / tiles;
    const u32 place = first + rest % tiles;
    item.set_heads(params.all, step, head / parts, head % parts, params.all.group / parts);
    if constexpr (C::kHalfHeads || C::kSums) step.counter = place * heads_kv + step.head_kv;
    if constexpr (C::kAlone) {
      if (params.alone.tiles != nullptr && __ldg(params.alone.tiles + place)) item.flags |= kAlone;
    }
    return params.all.tiles + place;
  }
};

// Where the CTAs that work on a key head are, or on the query heads of an item, which read the same rows: the row where the last of them
// began blocks of a head. It is a hint, and whatever it says, every block comes once. Where the order of additions is fixed, so is that of blocks, and nobody asks.
struct Neighbours {
  template <typename C>
  static __device__ __forceinline__ u32* cursor(const BackwardParams<C>& params, const Item& item, u32 head_kv) {
    return params.order.cursors + (C::kSums ? item.head_q_begin : head_kv);
  }
  template <typename C>
  static __device__ __forceinline__ i32 row(const BackwardParams<C>& params, const Item& item, u32 head_kv) {
    return i32(load_relaxed(cursor(params, item, head_kv)));
  }
  template <typename C>
  static __device__ __forceinline__ void notify(const BackwardParams<C>& params, const Item& item, u32 head_kv, i32 row) {
    store_relaxed(cursor(params, item, head_kv), u32(row));
  }
};

}  // namespace backward

}  // namespace counterpoint
