// What the forward kernel is specialised for, what it is given, what its warps share, and the warp that feeds them.
#pragma once

#include "attention/tile_schedule.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

// A row of 64 elements, as the copy engine swizzles it.
constexpr u32 kRowBytes = 128;

// What a launch may be a part of.
enum class Span : u32 {
  kWhole,   // nothing: items start from nothing and end in out and lse
  kStaged,  // stages, or split tiles: the arguments say where items begin and end
};

// What becomes of a product q k^T before it is a score.
enum class Scores : u32 {
  kScaled,       // nothing here: the scale, which must be positive, is a part of the exponent
  kTransformed,  // softcap * tanh(scale * product / softcap); without a softcap scale * product, of whatever sign
};

// What a kernel is compiled for. kPack query heads of one key head share a tile: row r of a tile is token start + r /
// kPack, query head head * kPack + r % kPack.
template <u32 kHeadDimOf, u32 kHeadDimVOf, u32 kTileRowsOf, u32 kBlockOf, u32 kPackOf, u32 kQuerySlotsOf, Span kSpanOf,
          Scores kScoresOf>
struct AttentionForwardConfig {
  static constexpr u32 kHeadDim = kHeadDimOf;
  static constexpr u32 kHeadDimV = kHeadDimVOf;
  static constexpr u32 kTileRows = kTileRowsOf;
  static constexpr u32 kBlock = kBlockOf;
  static constexpr u32 kPack = kPackOf;
  static constexpr Span kSpan = kSpanOf;
  static constexpr Scores kScores = kScoresOf;
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

// The kernel's parameter. Rows are tokens; pointers that a specialisation does not use may be null. Shared with the
// host.
struct AttentionForwardArguments {
  TensorMap q_map;  // [rows_q, heads_q, head_dim], box [kTileRows / kPack, kPack, 64]
  TensorMap k_map;  // [rows_k, heads_kv, head_dim], box [kBlock, 1, 64]
  TensorMap v_map;  // [rows_k, heads_kv, head_dim_v], box [kBlock, 1, 64]
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
  float* partial_out;      // [slots, kTileRows / kPack, heads_q, head_dim_v]
  float* partial_lse;      // [slots, kTileRows / kPack, heads_q]
  u32* queue;  // two words, zero between launches: items handed out beyond the first of each CTA; CTAs that are done
  u32 tile_count;
  u32 heads;            // heads_q / kPack
  u32 heads_per_group;  // heads that are worked on together
  u32 heads_per_key;    // heads that read one key head: heads / heads_kv
  u32 heads_q;
  u32 head_dim_v;
  u32 sink_rows;
  i32 rows_k;
  float scale_log2;     // scale * log2(e)
  float softcap_scale;  // 2 * scale * log2(e) / softcap
  float softcap_log2;   // softcap * log2(e), 0 for none
  u32 reserved;
};

// A tile of one head, as consumers see it.
struct AttentionForwardItem {
  i32 start;
  i32 end;
  u32 head;
  i32 partial;
};

constexpr u32 kStepFirst = 1;    // of its item
constexpr u32 kStepLast = 2;     // of its item
constexpr u32 kStepBounded = 4;  // not all pairs are unmasked
constexpr u32 kStepNone = 8;     // no step: the work is done

// A block of keys.
struct AttentionForwardStep {
  i32 start;
  u32 bound_begin;
  u32 bound_end;
  u32 flags;
};

// Items that are known at a time. At most: one whose results are being written, one whose scores are in work, one whose
// first keys were waited for, one whose first keys are on their way, and one for whose keys the producer wants room.
constexpr u32 kItems = 8;

template <typename C>
struct alignas(1024) AttentionForwardShared {
  u8 queries[C::kQuerySlots][C::kKeyChunks * C::kTileRows * kRowBytes];
  u8 keys[C::kStages][C::kKeyChunks * C::kBlock * kRowBytes];
  u8 values[C::kStages][C::kValueChunks * C::kBlock * kRowBytes];
  AttentionForwardStep steps[C::kStages];
  AttentionForwardItem items[kItems];  // item number n is in n % kItems
  u64 query_full[C::kQuerySlots];
  u64 query_empty[C::kQuerySlots];
  u64 key_full[C::kStages];
  u64 key_empty[C::kStages];
  u64 value_full[C::kStages];
  u64 value_empty[C::kStages];
};

// The one thread that hands out work and starts copies.
template <typename C>
struct AttentionForwardProducer {
  const AttentionForwardArguments& arguments;
  AttentionForwardShared<C>& shared;
  u32 items = 0;
  u32 steps = 0;
  i32 value_start = 0;
  i32 value_head = 0;

  __device__ __forceinline__ u32 item_count() const { return arguments.tile_count * arguments.heads; }

  // Heads go by groups; within a group heaviest tiles first, all heads of the group for one tile after another.
  __device__ __forceinline__ void locate(u32 index, u32& tile, u32& head) const {
    const u32 per_group = arguments.tile_count * arguments.heads_per_group;
    const u32 group = index / per_group;
    const u32 first = group * arguments.heads_per_group;
    const u32 width = min(arguments.heads_per_group, arguments.heads - first);
    const u32 within = index - group * per_group;
    tile = within / width;
    head = first + within % width;
  }

  // Keys of a step, values of the one before, and the query rows of a new item: consumers want them in this order.
  __device__ __forceinline__ void load_step(const AttentionForwardStep& step, i32 key_head) {
    const u32 stage = steps % C::kStages;
    mbarrier_wait(&shared.key_empty[stage], ((steps / C::kStages) & 1) ^ 1);
    shared.steps[stage] = step;
    mbarrier_arrive_expect(&shared.key_full[stage], C::kKeyChunks * C::kBlock * kRowBytes);
#pragma unroll
    for (u32 chunk = 0; chunk < C::kKeyChunks; ++chunk) {
      tma_load_3d(shared.keys[stage] + chunk * C::kBlock * kRowBytes, &arguments.k_map, &shared.key_full[stage],
                  i32(64 * chunk), key_head, step.start);
    }
    load_value();
    if (step.flags & kStepFirst) load_query();
    value_start = step.start;
    value_head = key_head;
    ++steps;
  }

  __device__ __forceinline__ void load_query() {
    const AttentionForwardItem& item = shared.items[items % kItems];
    const u32 slot = items % C::kQuerySlots;
    mbarrier_wait(&shared.query_empty[slot], ((items / C::kQuerySlots) & 1) ^ 1);
    mbarrier_arrive_expect(&shared.query_full[slot], C::kKeyChunks * C::kTileRows * kRowBytes);
#pragma unroll
    for (u32 chunk = 0; chunk < C::kKeyChunks; ++chunk) {
      tma_load_3d(shared.queries[slot] + chunk * C::kTileRows * kRowBytes, &arguments.q_map, &shared.query_full[slot],
                  i32(64 * chunk), i32(item.head * C::kPack), item.start);
    }
    ++items;
  }

  // Values of the step before.
  __device__ __forceinline__ void load_value() {
    if (steps == 0) return;
    const u32 number = steps - 1;
    const u32 stage = number % C::kStages;
    mbarrier_wait(&shared.value_empty[stage], ((number / C::kStages) & 1) ^ 1);
    mbarrier_arrive_expect(&shared.value_full[stage], C::kValueChunks * C::kBlock * kRowBytes);
#pragma unroll
    for (u32 chunk = 0; chunk < C::kValueChunks; ++chunk) {
      tma_load_3d(shared.values[stage] + chunk * C::kBlock * kRowBytes, &arguments.v_map, &shared.value_full[stage],
                  i32(64 * chunk), value_head, value_start);
    }
  }

  __device__ __forceinline__ void walk(const Tile& tile, u32 head) {
    // Consumers look at it when they have waited for its first keys.
    shared.items[items % kItems] = AttentionForwardItem{tile.start, tile.end, head, tile.partial};
    const i32 key_head = i32(head / arguments.heads_per_key);
    u32 first = kStepFirst;
    if (tile.run_begin == tile.run_end) {
      // Nothing to see: one step whose keys lie beyond the tensor, where the copy engine reads zeros.
      load_step(AttentionForwardStep{arguments.rows_k, 0, 0, kStepFirst | kStepLast | kStepBounded}, key_head);
      return;
    }
    TileRun next = arguments.runs[tile.run_begin];
    for (u32 r = tile.run_begin; r < tile.run_end; ++r) {
      const TileRun run = next;
      const bool last = r + 1 == tile.run_end;
      if (!last) next = arguments.runs[r + 1];
      const u32 bounded = run.bound_begin != run.bound_end ? kStepBounded : 0;
#pragma unroll 1
      for (i32 start = run.start; start < run.end; start += i32(C::kBlock)) {
        const u32 flags = first | bounded | (last && start + i32(C::kBlock) >= run.end ? kStepLast : 0);
        load_step(AttentionForwardStep{start, run.bound_begin, run.bound_end, flags}, key_head);
        first = 0;
      }
    }
  }

  __device__ __forceinline__ void finish() {
    const u32 stage = steps % C::kStages;
    mbarrier_wait(&shared.key_empty[stage], ((steps / C::kStages) & 1) ^ 1);
    shared.steps[stage] = AttentionForwardStep{0, 0, 0, kStepNone};
    mbarrier_arrive(&shared.key_full[stage]);
    load_value();
  }

  __device__ __forceinline__ void run() {
    tma_prefetch_map(&arguments.q_map);
    tma_prefetch_map(&arguments.k_map);
    tma_prefetch_map(&arguments.v_map);
    u32 index = blockIdx.x;
    while (index < item_count()) {
      // The next item is asked for while this one's copies wait for room.
      const u32 next = gridDim.x + atomicAdd(&arguments.queue[0], 1u);
      u32 tile, head;
      locate(index, tile, head);
      walk(arguments.tiles[tile], head);
      index = next;
    }
    finish();
    // The last CTA leaves the queue as it was found.
    if (atomicInc(&arguments.queue[1], gridDim.x - 1) == gridDim.x - 1) arguments.queue[0] = 0;
  }
};

template <typename C>
__device__ __forceinline__ void produce(const AttentionForwardArguments& arguments, AttentionForwardShared<C>& shared) {
  AttentionForwardProducer<C> producer{arguments, shared};
  producer.run();
}

}  // namespace counterpoint
