// What the kernels of attention backward are compiled for, what they are given, and what their roles pass on to each other.
#pragma once

#include "attention/tile_schedule.cuh"
#include "link_barrier.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

// In which order key tiles add to a row of dq.
enum class DqOrder : u32 {
  kAny,
  kFixed,  // of tiles, so that two runs give the same bits
};

// Of a row of dk and dv.
enum class KeyGradients : u32 {
  kResults,      // elements
  kPartialSums,  // f32, of which others have some too
  kSums,         // elements, each the sum of what items of several query heads have (backward_sums.cuh)
};

// Classes of tiles that the host lists.
constexpr u32 kItemClasses = 16;

// What every kernel is given. Row strides of the tensors are in the tensor maps. Shared with the host, as all that follow.
struct AttentionBackwardArguments {
  TensorMap q, dout;                  // elements [rows_q, heads_q, head_dim], box 64 x 1 x kRows / kCtas, swizzle 128
  TensorMap k, v;                     // elements [rows_k, heads_kv, head_dim], box 64 x 1 x kOwnKeys, swizzle 128
  TensorMap arriving_k, arriving_v;   // likewise, of the rows from own_rows on
  TensorMap dq;                       // f32 [rows_q, heads_q, head_dim], box 32 x 1 x 64, swizzle 128
  TensorMap statistics;               // f32 [8, heads_q, rows_q], box kRows x 1 x 1: lse and delta (attention_backward_rows.cuh)
  LinkArrivals arrivals;
  void* dk;                           // [rows_k, heads_kv, head_dim], f32 or elements
  void* dv;                           // [rows_k, heads_kv, head_dim_v], likewise
  const u64* owner_rows;              // of each key from owner_rows_from on, where its rows of dk and dv go: addresses on any GPU
  const Tile* tiles;
  const TileRun* runs;
  const TileBound* bounds;
  u32* queue;                         // two words, zero before the first launch; each launch leaves them zero
  WaitLimit wait;                     // for who adds to dq before, the other half of a tile, or a slab that is summed
  u32 items;                          // of the queue
  u32 heads_kv;
  u32 group;                          // query heads of a key head
  u32 head_dim;
  u32 head_dim_v;
  u32 blocks_per_head;                // before the next head, see TileScheduler
  i32 own_rows;                       // rows of k and v; no tile has rows on both sides
  i32 owner_rows_from;                // keys from here on belong to other ranks
  float scale;
  float scale_log2;                   // scale * log2(e); with a softcap: 2 * log2(e) * scale / softcap
  float cap_log2;                     // softcap * log2(e)
};

// Where the order of additions to dq is fixed (backward_dq_order.cuh).
struct BackwardDqOrder {
  const DqOrderSpan* spans;  // who adds when
  const u32* begins;      // into spans, for each block of kRows rows
  u32* added;             // [counters of spans, heads_q], zero before each launch: how many have added
  u32 ordered_from;       // places in the order before this one need not be waited for
  u32 num_tiles;
  u32 heads_at_a_time;    // key heads, see OrderedItems
};

// Where it is not: tiles of similar work (ClassItems).
struct BackwardClasses {
  u32* cursors;           // rows, see Neighbours
  u32 ends[kItemClasses];  // tiles up to which each class goes
};

// Where the kernel rounds dq itself (backward_rounding.cuh).
struct BackwardRounding {
  float* dq;            // what the tensor map of dq describes
  void* rounded_dq;     // elements [rows_q, heads_q, head_dim]; or null: dq is not whole yet
  const u32* coverage;  // rows of each slab of dq that all tiles add
  u32* summed_rows;     // [slabs, heads_q], zero before each launch: rows added
  u32* summed;          // [slabs * heads_q], likewise: 1 + index of the slabs that are summed, in that order
  u32* progress;        // two words, likewise: how many of `summed` somebody rounds, and how many there are
  u32 slabs;            // that will be summed, of all heads
  u32 overlapped;       // so many of them, the first, are rounded under other work
  u32 rows_q;
  u32 zeroes_sums;      // 1: who rounds dq sets its sums to zero
};

// Where some tiles' gradients are results, since nobody else has any of their keys, and others' are partial sums.
struct BackwardAlone {
  const u32* tiles;  // of each, 1: its dk and dv go rounded to the next two; or null
  void* dk;          // elements, rows as dk has them
  void* dv;
};

// Where items may be halves (backward_half_heads.cuh).
struct BackwardHalfHeads {
  u32* words;   // [tiles of halved classes, heads_kv, 8], zero before each launch, which leaves them so
  u32 classes;  // items of the first so many are halves
};

// Where items are some of the query heads of a tile and a key head, and their dk and dv are added up (backward_sums.cuh).
struct BackwardSums {
  TensorMap dk_map, dv_map;  // of dk and dv, box 32 x 1 x 64, swizzle 128
  float* dk;                 // [rows_k, heads_kv, head_dim], zero before the first launch; each launch leaves them so
  float* dv;                 // [rows_k, heads_kv, head_dim_v], likewise
  u32* words;                // [tiles, heads_kv, 2], likewise
  u32 parts;                 // items of a tile and a key head
};

// In place of what a configuration has not.
struct BackwardNothing {};

template <bool kHas, typename Has, typename Otherwise>
struct ChooseType {
  using Type = Has;
};
template <typename Has, typename Otherwise>
struct ChooseType<false, Has, Otherwise> {
  using Type = Otherwise;
};

// What a kernel is compiled for.
template <u32 kHeadDimOf, u32 kHeadDimVOf, KeyGradients kGradientsOf, bool kSoftcapOf, DqOrder kOrderOf>
struct AttentionBackwardConfig {
  static constexpr u32 kHeadDim = kHeadDimOf;  // of the tile; the tensors' may be smaller, the rest reads as zeros
  static constexpr u32 kHeadDimV = kHeadDimVOf;
  static constexpr bool kPartialSums = kGradientsOf == KeyGradients::kPartialSums;
  static constexpr bool kSums = kGradientsOf == KeyGradients::kSums;
  static constexpr bool kSoftcap = kSoftcapOf;
  static constexpr bool kFixedOrder = kOrderOf == DqOrder::kFixed;
  // Of the elements of dk and dv.
  using Gradient = typename ChooseType<kPartialSums, float, Element>::Type;

  static constexpr u32 kCtas = kHeadDim > 128 ? 2 : 1;  // of a tile; a cluster of two in attention_backward_pair.cuh
  static constexpr bool kRounds = kCtas == 1;           // whether the kernel rounds dq itself
  static constexpr bool kAlone = kPartialSums && !kFixedOrder;
  static constexpr bool kHalfHeads = kAlone && kHeadDim == 128;  // shorter heads have no register for them
  using Order = typename ChooseType<kFixedOrder, BackwardDqOrder, BackwardClasses>::Type;
  using Rounding = typename ChooseType<kRounds, BackwardRounding, BackwardNothing>::Type;
  using Alone = typename ChooseType<kAlone, BackwardAlone, BackwardNothing>::Type;
  using HalfHeads = typename ChooseType<kHalfHeads, BackwardHalfHeads, BackwardNothing>::Type;
  using Sums = typename ChooseType<kSums, BackwardSums, BackwardNothing>::Type;

  static constexpr u32 kKeys = 128;                               // keys of a tile
  static constexpr u32 kOwnKeys = kKeys / kCtas;                  // of them, a CTA's
  static constexpr u32 kRows = kHeadDim <= 64 && !kSoftcap ? 128 : 64;  // query rows of a block
  static constexpr u32 kStages = 2;                               // of q and dout
  static constexpr u32 kChunks = (kHeadDim + 63) / 64;  // operands lie in shared memory as columns of 64 elements (128 bytes)
  static constexpr u32 kAdders = kFixedOrder ? 2 : 1;        // threads that add to dq, block by block alternately
  static constexpr u32 kThreads = 512;
  static constexpr u32 kKeyRegisters = 208;
  static constexpr u32 kQueryRegisters = 64;
  static constexpr u32 kLoadRegisters = 32;

  static constexpr u32 kKeyBytes = kChunks * kKeys * 128;
  static constexpr u32 kRowBytes = kChunks * kRows * 128;
  static constexpr u32 kStatisticBytes = kRows * 4;
  static constexpr u32 kDsBytes = kKeys * kRows * 2;
  static constexpr u32 kParts = kChunks * kRows / 64;  // dq leaves in parts of 64 rows x 64 columns
  // So that the additions of a block have the time of a block, unless dk and dv need room, too.
  static constexpr u32 kDqBuffers = kSums ? kParts : 2 * kParts;
  static constexpr u32 kGradientBuffers = kSums ? 2 : 0;  // through which dk and dv leave, as parts of dq do
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kCtas == 2, "head sizes that the accumulators of two warpgroups hold");
};

// What a kernel is given: what every one is, and what its configuration adds. They lie behind each other in the one parameter,
// in this order; the launcher leaves out what is nothing.
template <typename C>
struct BackwardParams {
  const AttentionBackwardArguments& all;
  const typename C::Rounding& rounding;
  const typename C::Order& order;
  const typename C::Alone& alone;
  const typename C::HalfHeads& half_heads;
  const typename C::Sums& sums;
};

namespace backward {

// A block of query rows, as the query warpgroup announces it to the key warpgroups.
struct Step {
  i32 row, row_end;            // its rows, in the tensor of queries; those from row_end on belong to others
  u32 bound_begin, bound_end;  // equal: nothing of it is masked, but for keys beyond the tile's end
  i32 key, key_end;            // the tile
  u32 head_kv;
  u32 flags;
  u32 head_q;
  u32 order, counter;      // how many add to these rows before, where that is fixed, and what counts them; or of what it is a part
  u32 run_begin, run_end;  // of the item
};
constexpr u32 kFirst = 1, kLast = 2, kEmpty = 4, kExit = 8, kBounded = 16;
constexpr u32 kShort = 64;  // the block has fewer rows than others
constexpr u32 kOdd = 32;   // the item is the second, fourth ... of those that are not empty
constexpr u32 kAlone = 256;  // nobody else has gradients of the tile's keys
constexpr u32 kHalf = 128;  // the item is half of the query heads of a tile and a key head (backward_half_heads.cuh)
constexpr u32 kSteps = 8;  // announcements in flight; more than stages, because the query warpgroup reads them late

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

constexpr u32 kPartBytes = 64 * 64 * 4;  // of a part of dq

// The low word of wgmma_descriptor; the high word is the same for all operands. Words are half the registers.
template <typename C>
__device__ __forceinline__ u32 operand(u32 address, u32 chunk_bytes = 16) {
  if (C::kCtas > 1) address &= 0x3ffffu;  // in a cluster, higher bits say whose shared memory it is
  return (address >> 4) | ((chunk_bytes >> 4) << 16);
}
__device__ __forceinline__ u64 descriptor(u32 operand, u32 bytes) {
  return (u64(0x40000040u) << 32) | (operand + (bytes >> 4));
}

// Which of two buffers step `count` uses, and the parity of the phase in which it does.
__device__ __forceinline__ u32 slot_of(u32 count) { return count % 2; }
__device__ __forceinline__ u32 parity_of(u32 count) { return count / 2 % 2; }

// The buffer of a part of dq, and the parity of its phase. Buffers are a power of two.
template <typename C>
__device__ __forceinline__ u32 dq_slot_of(u32 count, u32 part) {
  return (count * C::kParts + part) % C::kDqBuffers;
}
template <typename C>
__device__ __forceinline__ u32 dq_parity_of(u32 count, u32 part) {
  return (count * C::kParts + part) / C::kDqBuffers % 2;
}

// The parity of the phase of K's and V's buffers in which a step's item uses them.
__device__ __forceinline__ u32 item_parity_of(u32 flags) { return flags & kOdd ? 1 : 0; }

// The flags of an announcement. They decide the way of all lanes.
template <typename Shared>
__device__ __forceinline__ u32 step_flags(const Shared& shared, u32 count) {
  return uniform_load(&shared.steps[count % kSteps].flags);
}

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

// The last CTA to finish leaves the queue, and what has been delivered, as it found it. One thread of each.
__device__ __forceinline__ void leave_queue(const AttentionBackwardArguments& params) {
  if (atomicAdd(params.queue + 1, 1u) != gridDim.x - 1) return;
  params.queue[0] = 0;
  params.queue[1] = 0;
  if (params.arrivals.mailbox != nullptr) link_take_back(params.arrivals);
}

// Aligned by declaration, so that every address in it is a constant: the key warpgroups have no register for a base.
extern __shared__ __align__(1024) u8 dynamic_shared[];

}  // namespace backward

}  // namespace counterpoint
