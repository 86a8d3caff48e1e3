// What the forward kernel is specialised for, what it is given, and what its warps share.
#pragma once

#include "attention/tile_schedule.cuh"
#include "link_barrier.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

// A row of 64 elements, as TMA swizzles it.
constexpr u32 kRowBytes = 128;

// Barriers that name their users: 0 is __syncthreads.
constexpr u32 kOrderBarrier = 1;

// What a launch may be a part of.
enum class Span : u32 {
  kWhole,   // nothing: items start from nothing and end in out and lse, or as a part of a split tile
  kStaged,  // stages: the arguments say where items begin and end
};

// What becomes of a product q k^T before it is a score.
enum class Scores : u32 {
  kScaled,       // nothing here: the scale, which must be positive, is a part of the exponent
  kTransformed,  // softcap * tanh(scale * product / softcap); without a softcap scale * product, of whatever sign
};

// How consumers go through their steps.
enum class Loop : u32 {
  kUniform,   // one body for all steps
  kInterior,  // steps that are not bounded and neither begin nor end an item have a body of their own, for long rows
};

// What a kernel is compiled for. kPack query heads of one key head share a tile: row r of a tile is token start + r /
// kPack, query head head * kPack + r % kPack.
template <u32 kHeadDimOf, u32 kHeadDimVOf, u32 kTileRowsOf, u32 kBlockOf, u32 kPackOf, u32 kQuerySlotsOf, Loop kLoopOf,
          Span kSpanOf, Scores kScoresOf, bool kMaxLogitsOf, u32 kCtasOf>
struct AttentionForwardConfig {
  static constexpr u32 kHeadDim = kHeadDimOf;
  static constexpr u32 kHeadDimV = kHeadDimVOf;
  static constexpr u32 kTileRows = kTileRowsOf;
  static constexpr u32 kBlock = kBlockOf;
  static constexpr u32 kPack = kPackOf;
  static constexpr Loop kLoop = kLoopOf;
  static constexpr Span kSpan = kSpanOf;
  static constexpr Scores kScores = kScoresOf;
  // Whether the largest scores are wanted.
  static constexpr bool kMaxLogits = kMaxLogitsOf;
  // CTAs of a cluster, which share a tile: kTileRows rows each. Each loads its part of every block of keys and values, by multicast for all, so
  // that L2 is read once.
  static constexpr u32 kCtas = kCtasOf;
  // Tokens of a CTA, and of the tile.
  static constexpr u32 kTokens = kTileRows / kPack;
  static constexpr u32 kTileTokens = kCtas * kTokens;
  static constexpr u32 kLoadRows = kBlock / kCtas;
  static_assert(kCtas == 1 || kLoop == Loop::kInterior, "the other consumer releases blocks to its own CTA alone");
  static_assert(kLoadRows * kCtas == kBlock && kLoadRows % 8 == 0, "parts are whole rows of the swizzle's pattern");
  static constexpr u32 kConsumers = kTileRows / 64;
  static constexpr u32 kThreads = 128 * (kConsumers + 1);
  static constexpr u32 kStages = 2;
  // With two the next item's query rows arrive early; with one, blocks may be larger.
  static constexpr u32 kQuerySlots = kQuerySlotsOf;
  static constexpr u32 kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr u32 kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr u32 kKeyChunks = (kHeadDim + 63) / 64;
  static constexpr u32 kValueChunks = (kHeadDimV + 63) / 64;
  static_assert(64 % kPack == 0, "a warpgroup's rows are whole tokens");
};

// Tiles that are handed out in one order, for all heads: some of them for one group of heads after another, then the others for
// all together.
struct ForwardTiles {
  u32 first;
  u32 count;
  u32 grouped;
  u32 heads_per_group;
};

// The kernel's parameter. Rows are tokens; pointers that a specialisation does not use may be null. Shared with the
// host.
struct AttentionForwardArguments {
  TensorMap q_map;  // [rows_q, heads_q, head_dim], box [64 / kPack, kPack, 64]
  TensorMap k_map;  // [rows_k, heads_kv, head_dim], box [kLoadRows, 1, 64]
  TensorMap v_map;  // [rows_k, heads_kv, head_dim_v], box [kLoadRows, 1, 64]
  TensorMap arriving_k_map;  // likewise, of the rows from own_rows on
  TensorMap arriving_v_map;
  const Tile* tiles;
  const TileRun* runs;
  const TileBound* bounds;
  Element* out;            // [rows_q, heads_q, head_dim_v]
  float* lse;              // [rows_q, heads_q]
  const float* sink;       // [sink_rows, heads_q]
  const float* begin_acc;  // [rows_q, heads_q, head_dim_v]: a state, whose acc is not divided by its sum; null to start
  const float* begin_max;  // [rows_q, heads_q], in the unit of the products; of powers of two when transformed
  const float* begin_sum;  // [rows_q, heads_q]
  float* end_acc;          // likewise, and may be the same; null where out and lse are wanted
  float* end_max;
  float* end_sum;
  float* partial_out;      // [slots, kTileTokens, heads_q, head_dim_v]
  float* partial_lse;      // [slots, kTileTokens, heads_q]
  float* max_logits;       // [heads_q]
  u32* queue;  // three words, zero between launches: items of ready tiles handed out beyond the first of each CTA; CTAs that are
               // done; items of waiting tiles handed out
  LinkArrivals arrivals;
  ForwardTiles ready;    // those that need no rows from own_rows on
  ForwardTiles waiting;  // the others
  u32 heads;            // heads_q / kPack
  u32 heads_per_key;    // heads that read one key head: heads / heads_kv
  u32 heads_q;
  u32 head_dim_v;
  u32 sink_rows;
  i32 rows_k;
  i32 own_rows;  // rows of k_map and v_map; no block has rows on both sides
  float scale_log2;     // scale * log2(e)
  float softcap_scale;  // 2 * scale * log2(e) / softcap
  float softcap_log2;   // softcap * log2(e), 0 for none
};

// A CTA's rows of a tile, of one head.
struct AttentionForwardItem {
  i32 start;  // in a cluster it may be behind the end
  i32 end;
  u32 head;
  i32 partial;
  u32 key_head;
};

constexpr u32 kStepFirst = 1;    // of its item
constexpr u32 kStepLast = 2;     // of its item
constexpr u32 kStepBounded = 4;  // not all pairs are unmasked
constexpr u32 kStepNone = 8;     // no step: the work is done

// A block of keys.
struct alignas(16) AttentionForwardStep {
  i32 start;
  u32 bound_begin;
  u32 bound_end;
  u32 flags;
};

// Steps that are known at a time: those that consumers and TMA work on, and two more, so that nobody waits
// for the schedule.
constexpr u32 kPlanned = 4;

// Items that are known at a time. At most: one whose results are being written, one whose scores are complete, those of
// the planned steps, and the one that wants room for its first.
constexpr u32 kItems = 8;
static_assert(kItems >= kPlanned + 3, "items are overwritten only when nobody looks at them");

template <typename C>
struct alignas(1024) AttentionForwardShared {
  u8 queries[C::kQuerySlots][C::kKeyChunks * C::kTileRows * kRowBytes];
  u8 keys[C::kStages][C::kKeyChunks * C::kBlock * kRowBytes];
  u8 values[C::kStages][C::kValueChunks * C::kBlock * kRowBytes];
  AttentionForwardStep steps[kPlanned];  // step number n is in n % kPlanned
  TileBound bounds[kPlanned];            // the first bound of each, if it has any
  AttentionForwardItem items[kItems];    // item number n is in n % kItems
  u64 step_full[kPlanned];
  u64 step_empty[kPlanned];
  // Of each warpgroup's rows: whoever is done with its own need not wait for the others to get the next.
  u64 query_full[C::kQuerySlots][C::kConsumers];
  u64 query_empty[C::kQuerySlots][C::kConsumers];
  u64 key_full[C::kStages];
  u64 key_empty[C::kStages];
  u64 value_full[C::kStages];
  u64 value_empty[C::kStages];
  // Which item the CTAs of a cluster have next: the first CTA takes it from the queue and writes it to the others.
  u32 tickets[2];
  u64 ticket_full[2];
  u64 ticket_empty[2];

  // By one thread, before anybody waits.
  __device__ __forceinline__ void initialise() {
    for (u32 i = 0; i < kPlanned; ++i) {
      mbarrier_init(&step_full[i], 1);
      mbarrier_init(&step_empty[i], 1);
    }
    // Consumers arrive once a warp.
    for (u32 i = 0; i < C::kQuerySlots; ++i) {
      for (u32 group = 0; group < C::kConsumers; ++group) {
        mbarrier_init(&query_full[i][group], 1);
        mbarrier_init(&query_empty[i][group], 4);
      }
    }
    for (u32 i = 0; i < C::kStages; ++i) {
      mbarrier_init(&key_full[i], 1);
      mbarrier_init(&key_empty[i], 4 * C::kConsumers * C::kCtas);
      mbarrier_init(&value_full[i], 1);
      mbarrier_init(&value_empty[i], 4 * C::kConsumers * C::kCtas);
    }
    for (u32 i = 0; C::kCtas > 1 && i < 2; ++i) {
      mbarrier_init(&ticket_full[i], 1);
      mbarrier_init(&ticket_empty[i], C::kCtas - 1);
    }
    fence_mbarrier_init();
  }
};

}  // namespace counterpoint
