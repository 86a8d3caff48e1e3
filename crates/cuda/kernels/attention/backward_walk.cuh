// What a CTA of attention backward does, and where in shared memory: its items, their blocks, and the buffers and
// barriers by which its roles pass them on.
#pragma once

#include "attention/tile_schedule.cuh"
#include "link_meeting.cuh"
#include "ptx/flag.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

// What the launcher chooses when it compiles.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef OUTPUT_F32
#define OUTPUT_F32 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif

namespace backward {

constexpr u32 kHeadDim = HEAD_DIM;             // of the tile; the tensors' may be smaller, the rest reads as zeros
constexpr u32 kKeys = 128;                     // keys of a tile
constexpr u32 kRows = HEAD_DIM <= 64 && !SOFTCAP ? 128 : 64;  // query rows of a block
constexpr u32 kStages = 2;  // of q and dout
constexpr u32 kChunks = (kHeadDim + 63) / 64;  // operands lie in shared memory as columns of 64 elements (128 bytes)
constexpr u32 kCtas = HEAD_DIM > 128 ? 2 : 1;  // that share a tile; a cluster of two in attention_backward_pair.cuh
constexpr u32 kOwnKeys = kKeys / kCtas;        // of a tile's keys
constexpr u32 kThreads = 512;
constexpr u32 kKeyRegisters = 208;
constexpr u32 kQueryRegisters = 64;
constexpr u32 kLoadRegisters = 32;
constexpr u32 kItemClasses = 16;
constexpr u32 kAdders = DETERMINISTIC ? 2 : 1;  // threads that add to dq, block by block in turn
constexpr bool kSoftcap = SOFTCAP != 0;
constexpr bool kDeterministic = DETERMINISTIC != 0;
constexpr bool kOutputF32 = OUTPUT_F32 != 0;
// Of the elements of dk and dv.
#if OUTPUT_F32
using Gradient = float;
#else
using Gradient = Element;
#endif
constexpr bool kAlones = kOutputF32 && !kDeterministic;  // whether some tiles' gradients are results, others' shares
constexpr bool kHalves = kOutputF32 && !kDeterministic && kHeadDim == 128;  // whether there are any: shorter heads have no register for it
static_assert(kHeadDim == 64 || kHeadDim == 128 || kCtas == 2, "head sizes that the accumulators of two warpgroups hold");

// A block of query rows, as the query warpgroup announces it to the key warpgroups.
struct Step {
  i32 row, row_end;            // its rows, in the tensor of queries; those from row_end on belong to others
  u32 bound_begin, bound_end;  // equal: nothing of it is masked, but for keys beyond the tile's end
  i32 key, key_end;            // the tile
  u32 head_kv;
  u32 flags;
  u32 head_q;
  u32 turn, counter;       // how many add to these rows before, where turns are taken, and what counts them; or, of a half, which
  u32 run_begin, run_end;  // of the item
};

// An item whose additions to dq are done; without runs: there are no more.
struct AddedItem {
  u32 head_q, heads;  // the first of its query heads, and how many
  u32 run_begin, run_end;
};

// Rows of a head of dq to which nothing is added any more (backward_rounding.cuh); without rows: there are no more.
struct SummedSlab {
  u64 begin;  // where its first row is in dq, in elements
  u32 rows;
};
constexpr u32 kFirst = 1, kLast = 2, kEmpty = 4, kExit = 8, kBounded = 16;
constexpr u32 kShort = 64;  // the block has fewer rows than others
constexpr u32 kOdd = 32;   // the item is the second, fourth ... of those that are not empty
constexpr u32 kAlone = 256;  // nobody else has gradients of the tile's keys
constexpr u32 kHalf = 128;  // the item is half of the query heads of a tile and a key head (backward_halves.cuh)
constexpr u32 kSteps = 8;  // announcements in flight; more than stages, because the query warpgroup reads them late

constexpr u32 kKeyBytes = kChunks * kKeys * 128;
constexpr u32 kRowBytes = kChunks * kRows * 128;
constexpr u32 kStatisticBytes = kRows * 4;
constexpr u32 kDsBytes = kKeys * kRows * 2;
constexpr u32 kPartBytes = 64 * 64 * 4;  // dq leaves in parts of 64 rows x 64 columns
constexpr u32 kParts = kChunks * kRows / 64;
constexpr u32 kDqBuffers = 2 * kParts;  // so that the additions of a block have the time of a block

}  // namespace backward

// The one parameter of the kernel. Row strides of the tensors are in the tensor maps.
struct AttentionBackwardArguments {
  TensorMap q, dout;  // elements [rows_q, heads_q, head_dim], box 64 x 1 x kRows / kCtas, swizzle 128
  TensorMap k, v;     // elements [rows_k, heads_kv, head_dim], box 64 x 1 x kOwnKeys, swizzle 128
  TensorMap arriving_k, arriving_v;  // likewise, of the rows from own_rows on
  TensorMap dq;       // f32 [rows_q, heads_q, head_dim], box 32 x 1 x 64, swizzle 128
  TensorMap statistics;  // f32 [8, heads_q, rows_q], box kRows x 1 x 1: lse and delta (attention_backward_rows.cuh)
  void* dk;           // [rows_k, heads_kv, head_dim], f32 or elements
  void* dv;           // [rows_k, heads_kv, head_dim_v], likewise
  const Tile* tiles;
  const TileRun* runs;
  const TileBound* bounds;
  float* dq_rows;              // what the tensor map of dq describes
  void* rounded_dq;            // elements [rows_q, heads_q, head_dim]: dq rounded; or null
  const u32* coverage;         // rows of each slab of dq that all tiles add, see backward_rounding.cuh
  u32* summed_rows;            // [slabs, heads_q], zero before each launch: rows added; this and the next two for rounded_dq
  u32* summed;                 // [slabs * heads_q], likewise: 1 + index of the slabs that are summed, in that order
  u32* rounding;               // two words, likewise: how many of `summed` somebody rounds, and how many there are
  u32* cursors;                // [heads_kv]: rows, see Walk
  u32* queue;                  // two words, zero before the first launch; each launch leaves them zero
  const TurnSpan* turn_spans;  // with DETERMINISTIC: who adds to dq when
  const u32* turn_begins;      // into turn_spans, for each block of kRows rows
  u32* turns;                  // [counters of turn_spans, heads_q], zero before each launch: how many have added
  WaitLimit wait;              // for a turn, the other half of a tile, or a slab that is summed
  const u32* alone;            // of each tile, 1: its dk and dv go rounded to the next two; or null
  void* rounded_dk;            // elements, rows as dk has them
  void* rounded_dv;
  u32* halves;                 // [tiles of halved classes, heads_kv, 8], zero before each launch, which leaves them so: backward_halves.cuh
  u32 ordered_from;            // turns before this one need not be waited for
  u32 zeroes_sums;             // 1: who rounds dq sets its sums to zero
  u32 heads_at_a_time;         // key heads, see Walk
  u32 num_tiles;
  u32 items;           // of the queue
  u32 halved_classes;  // items of the first classes are halves
  u32 rounds;         // slabs that will be summed, of all heads
  u32 rounds_beside;  // so many of them, the first, are rounded beside other work
  u32 rows_q;
  u32 heads_kv;
  u32 group;  // query heads of a key head
  u32 head_dim;
  u32 head_dim_v;
  u32 stretch;                            // blocks, see Walk
  LinkArrivals arrivals;
  i32 own_rows;                           // rows of k and v; no tile has rows on both sides
  i32 homed_from;                         // keys from here on have gradients that leave
  const u64* homes;                       // of each of them, where its rows of dk and dv go: addresses on any GPU
  u32 classes;                            // of tiles, see Walk
  u32 class_end[backward::kItemClasses];  // tiles up to which each class goes
  float scale;
  float scale_log2;  // scale * log2(e); with SOFTCAP: 2 * log2(e) * scale / softcap
  float cap_log2;    // softcap * log2(e)
};

namespace backward {

// The low word of wgmma_descriptor; the high word is the same for all operands. Words are half the registers.
__device__ __forceinline__ u32 operand(u32 address, u32 chunk_bytes = 16) {
  if (kCtas > 1) address &= 0x3ffffu;  // in a cluster, higher bits say whose shared memory it is
  return (address >> 4) | ((chunk_bytes >> 4) << 16);
}
__device__ __forceinline__ u64 descriptor(u32 operand, u32 bytes) {
  return (u64(0x40000040u) << 32) | (operand + (bytes >> 4));
}

// Which of two buffers step `count` uses, and the parity of the round in which it does.
__device__ __forceinline__ u32 slot_of(u32 count) { return count % 2; }
__device__ __forceinline__ u32 parity_of(u32 count) { return count / 2 % 2; }

// The buffer of a part of dq, and the parity of its round. Buffers are a power of two.
__device__ __forceinline__ u32 dq_slot_of(u32 count, u32 part) { return (count * kParts + part) % kDqBuffers; }
__device__ __forceinline__ u32 dq_parity_of(u32 count, u32 part) { return (count * kParts + part) / kDqBuffers % 2; }

// The parity of the round of K's and V's buffers in which a step's item uses them.
__device__ __forceinline__ u32 item_parity_of(u32 flags) { return flags & kOdd ? 1 : 0; }

// Tells the step the turn of the tile of this number among those that add to its block of rows.
__device__ __forceinline__ void find_turn(const AttentionBackwardArguments& params, Step& step, u32 tile) {
  const u32 block = u32(step.row) / kRows;
  const u32 end = __ldg(params.turn_begins + block + 1);
  for (u32 i = __ldg(params.turn_begins + block); i < end; ++i) {
    const uint4 span = __ldg(reinterpret_cast<const uint4*>(params.turn_spans + i));
    if (tile < span.y) {
      step.turn = span.z + tile - span.x;
      step.counter = span.w;
      return;
    }
  }
}

// The walk over items and blocks. Only the loading thread uses it; it lies in shared memory because that thread's
// warpgroup has few registers.
//
// Tiles come in classes of similar work, the heaviest first. Within a class the queue goes head by head, so that CTAs
// that run together read the same rows; and class by class, so that the last items are short ones and CTAs finish
// together. Where additions take turns, the queue goes tile by tile, some heads of each: the longer before a tile the one that it
// follows has started, the less it waits. An item is asked for only when it is to be opened: a CTA that held one while it is
// busy would have others wait, for their turns or for it to finish last.
//
// Blocks are walked from the last to the first: under causal masks all tiles of a sequence see its last rows, so tiles
// that start together read the same rows at the same time, from the second level cache. For the same reason the query
// heads of a key head take turns after a stretch of blocks.
//
// A long item that starts later than its neighbours starts where they are, and goes round: the rows that they read are in
// the cache, and those of the end no longer. `cursors` says of each key head where the last stretch began; it is a
// hint, and whatever it says, every block is walked once.
struct Walk {
  static constexpr i32 kFirstRow = -1;
  static constexpr u32 kMostRunsBack = 4;
  static constexpr u32 kFollowingSteps = 256;
  Step next;               // what the next call of advance() announces
  u32 run;                 // runs are walked backwards
  u32 last_run;            // where the item's last block is: at last_row of this run,
  i32 last_row;            // or, where that is kFirstRow, at the run's first block
  i32 rows_begin, rows_end;  // of the run
  u32 tile;                // number of the item's tile, where turns are taken
  u32 head_q_begin, head_q_end;  // the item's query heads
  u32 item_flags;
  u32 stretch_run, stretch_left;  // blocks that one head walks before the next head walks the same
  i32 stretch_row;
  u32 count;               // steps announced
  u32 items;               // items opened that have something to see

  __device__ __forceinline__ void begin(const AttentionBackwardArguments& params) {
    count = items = 0;
    open_item(params);
  }

  // Opens the last block of the run before `run`.
  __device__ __forceinline__ void open_run(const AttentionBackwardArguments& params) {
    const int4 words = __ldg(reinterpret_cast<const int4*>(params.runs + --run));
    rows_begin = words.x;
    rows_end = words.y;
    next.row = words.x + (words.y - 1 - words.x) / i32(kRows) * i32(kRows);
    next.bound_begin = u32(words.z);
    next.bound_end = u32(words.w);
  }

  // Opens the block where the others of this key head are now, if the item has it among its last runs, or else its last
  // block. The walk goes round from there.
  __device__ __forceinline__ void open_first_run(const AttentionBackwardArguments& params, u32 steps) {
    last_run = next.run_begin;
    last_row = kFirstRow;
    open_run(params);
    // Turns are taken in one order; and a short item has its rows in the cache anyway, and no time to look for a place.
    if (kDeterministic || steps < kFollowingSteps) return;
    const i32 cursor = i32(load_relaxed(params.cursors + next.head_kv));
    if (cursor >= next.row) return;
    for (u32 i = 0; i < kMostRunsBack && rows_begin > cursor; ++i) {
      if (run == next.run_begin) break;
      open_run(params);
    }
    if (rows_begin > cursor) {
      run = next.run_end;
      open_run(params);
    } else if (cursor < next.row) {
      next.row = rows_begin + (cursor - rows_begin) / i32(kRows) * i32(kRows);
      last_run = run;
      last_row = next.row + i32(kRows);
    } else if (run + 1 < next.run_end) {
      last_run = run + 1;
    }
  }

  // Says what there is to know of the block at next.row.
  __device__ __forceinline__ void open_block(const AttentionBackwardArguments& params) {
    next.row_end = min(rows_end, next.row + i32(kRows));
    const bool bounded = next.bound_begin != next.bound_end || next.key_end - next.key < i32(kKeys);
    next.flags = (bounded ? kBounded : 0) | (items % 2 ? 0 : kOdd);
    if (next.row_end - next.row < i32(kRows)) next.flags |= kShort;
    if (kDeterministic) find_turn(params, next, tile);
    if (kAlones) next.flags |= item_flags;
    if (last_block() && last_head()) next.flags |= kLast;
  }

  __device__ __forceinline__ bool last_block() const {
    return run == last_run && next.row == (last_row == kFirstRow ? rows_begin : last_row);
  }
  __device__ __forceinline__ bool last_head() const { return next.head_q + 1 == head_q_end; }

  // Remembers the block at next.row as the one from which the other heads start too.
  __device__ __forceinline__ void open_stretch(const AttentionBackwardArguments& params) {
    next.head_q = head_q_begin;
    stretch_run = run + 1;
    stretch_row = next.row;
    stretch_left = params.stretch;
    if (!kDeterministic) store_relaxed(params.cursors + next.head_kv, u32(next.row));
  }

  // The tile of the queue's item `ticket`, whose head goes to `next`.
  __device__ __forceinline__ const Tile* find_item(const AttentionBackwardArguments& params, u32 ticket) {
    if (kDeterministic) {
      const u32 before = ticket / (params.num_tiles * params.heads_at_a_time) * params.heads_at_a_time;
      const u32 heads = min(params.heads_at_a_time, params.heads_kv - before);
      const u32 rest = ticket - before * params.num_tiles;
      set_heads(params, before + rest % heads, 0, params.group);
      return params.tiles + rest / heads;
    }
    u32 rest = ticket;
    u32 first = 0;
    u32 tiles = params.class_end[0];
    u32 parts = kHalves && params.halved_classes > 0 ? 2 : 1;
    for (u32 i = 1; rest >= tiles * params.heads_kv * parts; ++i) {
      rest -= tiles * params.heads_kv * parts;
      first = params.class_end[i - 1];
      tiles = params.class_end[i] - first;
      parts = kHalves && i < params.halved_classes ? 2 : 1;
    }
    item_flags = parts == 2 ? kHalf : 0;
    const u32 head = rest / tiles;
    const u32 place = first + rest % tiles;
    set_heads(params, head / parts, head % parts, params.group / parts);
    if (kHalves) next.counter = place * params.heads_kv + next.head_kv;
    if (kAlones && params.alone != nullptr && __ldg(params.alone + place)) item_flags |= kAlone;
    return params.tiles + place;
  }

  // Part `part` of the query heads of a key head, `heads` of them.
  __device__ __forceinline__ void set_heads(const AttentionBackwardArguments& params, u32 head_kv, u32 part, u32 heads) {
    next.head_kv = head_kv;
    head_q_begin = head_kv * params.group + part * heads;
    head_q_end = head_q_begin + heads;
  }

  __device__ __forceinline__ void open_item(const AttentionBackwardArguments& params) {
    const u32 ticket = atomicAdd(params.queue, 1u);
    if (ticket >= params.items) {
      next.flags = kExit;
      return;
    }
    const Tile* item = find_item(params, ticket);
    const int4 words = __ldg(reinterpret_cast<const int4*>(item));
    const u32 blocks = __ldg(&item->blocks);
    if (kDeterministic) tile = __ldg(&item->number);
    next.key = words.x;
    next.key_end = words.y;
    next.run_begin = u32(words.z);
    run = next.run_end = u32(words.w);
    if (run == next.run_begin) {
      next.flags = kFirst | kLast | kEmpty | (kAlones ? item_flags : 0);
      return;
    }
    ++items;
    open_first_run(params, blocks * (head_q_end - head_q_begin));
    open_stretch(params);
    open_block(params);
    next.flags |= kFirst;
  }

  // Goes on from the step in `next`.
  __device__ __forceinline__ void advance(const AttentionBackwardArguments& params) {
    if (next.flags & kLast) {
      open_item(params);
      return;
    }
    const bool stretch_ends = --stretch_left == 0 || last_block();
    if (stretch_ends && !last_head()) {
      ++next.head_q;
      run = stretch_run;
      open_run(params);
      next.row = stretch_row;
      stretch_left = params.stretch;
    } else {
      if (next.row > rows_begin) {
        next.row -= kRows;
      } else {
        if (run == next.run_begin) run = next.run_end;
        open_run(params);
      }
      if (stretch_ends) open_stretch(params);
    }
    open_block(params);
  }
};

// The map that has the keys of a tile from `key` on, and where they are in it.
__device__ __forceinline__ const TensorMap* key_map(const TensorMap& own, const TensorMap& arriving, i32 own_rows, i32& key) {
  if (key < own_rows) return &own;
  key -= own_rows;
  return &arriving;
}

// Rows of keys that have come, as far as the thread has waited for them which loads.
struct Delivered {
  i32 rows;
  u32 parts;  // of those that others send

  __device__ __forceinline__ void begin(const AttentionBackwardArguments& params) {
    rows = params.arrivals.mailbox == nullptr ? 0x7fffffff : params.own_rows;
    parts = 0;
  }
  // Until the keys of a step's item have come, which has some.
  __device__ __forceinline__ void await(const AttentionBackwardArguments& params, const Step& step) {
    while (rows < step.key_end) {
      link_await_part(params.arrivals, parts);
      rows = params.arrivals.ends[parts++];
    }
  }
};

struct Storage {
  u8 k[kKeyBytes];
  u8 v[kKeyBytes];
  u8 q[kStages][kRowBytes];
  u8 dout[kStages][kRowBytes];
  u8 ds[2][kDsBytes];
  u8 dq[kDqBuffers][kPartBytes];
  float lse[kStages][kRows];
  float delta[kStages][kRows];
  Step steps[kSteps];
  AddedItem added[2];
  SummedSlab found[2];
  Walk walk;
  Delivered delivered;
  u64 full_k, full_v;
  u64 full_q[kStages], full_dout[kStages], empty[kStages];
  u64 full_ds[2], empty_ds[2];
  u64 full_dq[kDqBuffers], empty_dq[kDqBuffers];
  u64 full_added[2], empty_added[2];
  u64 full_found[2], empty_found[2];
};
// The launcher asks for this much dynamic shared memory.
constexpr u32 kSharedBytes = sizeof(Storage);
static_assert(kCtas == 2 || kSharedBytes <= 232448, "shared memory of a CTA");

// Aligned by declaration, so that every address in it is a constant: the key warpgroups have no register for a base.
extern __shared__ __align__(1024) u8 dynamic_shared[];
__device__ __forceinline__ Storage& storage() { return *reinterpret_cast<Storage*>(dynamic_shared); }

}  // namespace backward

}  // namespace counterpoint
