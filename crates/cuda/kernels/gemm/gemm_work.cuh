// What the matrix product is specialised for, what it is given, what its warps share, and the thread that feeds them.
//
// A pair of CTAs computes two neighbouring tiles of the result, one above the other or side by side. The operand that both read is
// loaded once: each CTA loads a half of it, and TMA writes that half into both. A cluster is such a pair, or, where k is
// in parts, a pair for each of them (gemm_parts.cuh).
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "wait_limit.cuh"

namespace counterpoint {

constexpr u32 kGemmTileM = 128;
// A block of k: a row of it is 128 bytes, as TMA swizzles it.
constexpr u32 kGemmBlockK = 64;
constexpr u32 kGemmRowBytes = 128;
constexpr u32 kGemmThreads = 384;
constexpr u32 kGemmConsumers = 2;
// 64 rows of at most 128 bytes of the result, on their way to memory.
constexpr u32 kGemmChunkBytes = 64 * kGemmRowBytes;
// Tensors that A's rows are put together from, and ranges of rows that D consists of.
constexpr u32 kGemmSources = 16;
constexpr u32 kGemmDestinations = 8;

// How the two warpgroups that multiply share a CTA's tiles: 64 rows of each, or one tile after the other.
enum class Warpgroups : u32 { kCooperative, kPingpong };

// What a kernel is compiled for: how wide tiles are, how many blocks of k are on their way, how operands lie in memory, how warpgroups
// share tiles, whether parts of k are handed over (stream-K), and whether tiles are of several problems (gemm_grouped.cuh). With parts that are handed
// over in it the compiler no longer sees that a warp's stage is uniform, and products without such parts would take a tenth longer.
template <u32 kTileNOf, u32 kStagesOf, Major kMajorAOf, Major kMajorBOf, Warpgroups kWarpgroupsOf, u32 kHandedPartsOf,
          bool kGroupedOf = false>
struct GemmConfig {
  static constexpr u32 kTileN = kTileNOf;
  static constexpr u32 kStages = kStagesOf;
  static constexpr Major kMajorA = kMajorAOf;
  static constexpr Major kMajorB = kMajorBOf;
  static constexpr Warpgroups kWarpgroups = kWarpgroupsOf;
  static constexpr u32 kHandedParts = kHandedPartsOf;  // `handed_parts` of its arguments
  static constexpr bool kGrouped = kGroupedOf;
  static constexpr u32 kHalves = kWarpgroups == Warpgroups::kPingpong ? 2 : 1;  // of a tile's rows, that a warpgroup computes
  static_assert(kHalves == 1 || kHandedParts == 1, "parts of k are for warpgroups that compute each tile together");
  static constexpr u32 kBytesA = kGemmTileM * kGemmRowBytes;
  // Along n, whole chunks of 64 columns are loaded.
  static constexpr u32 kBytesB = (kMajorB == Major::kK ? kTileN : (kTileN + 63) / 64 * 64) * kGemmRowBytes;
  // Columns of a chunk of elements: they must divide a tile.
  static constexpr u32 kChunkColumns = kTileN % 64 == 0 ? 64 : kTileN % 32 == 0 ? 32 : 16;
  static constexpr u32 kWideColumns = kChunkColumns < 32 ? kChunkColumns : 32;  // of a chunk of f32
  static_assert(kTileN % kChunkColumns == 0 && kTileN <= 256, "whole chunks, one instruction");
};

// A tile: where its rows come from and where they go. It may reach past its rows, into what lies behind them in A; it is not stored past
// them. Two of them, one for each CTA of a pair, are a unit. Shared with the host.
struct alignas(32) GemmTile {
  u32 source_row;       // of A's tensor; where A lies along m, its column
  u32 destination_row;
  u16 source;           // where A lies along k
  u16 destination;
  u32 rows;             // 0 for a tile that is there to make a unit whole
  u32 column;           // of B and D
  u32 group;            // whose counter hears when it is stored
  u32 first;            // of a problem among several: its first row of B, or, where A lies along k's rows, its first block of k
  u32 blocks;           // and its blocks of k, at least one
};

// A block of k where A, which lies along m, is in pieces, and B too where tiles are of several problems: then A's and B's places
// alternate in the list. Shared with the host.
struct GemmKSource {
  u32 source;
  u32 row;
};

// The kernel's parameter. Shared with the host.
struct GemmArguments {
  TensorMap a_maps[kGemmSources];  // rows of [m, k], or of [k, m] where it lies along m; boxes as `load_operand` wants them
  TensorMap b_map;                 // [n, k], or [k, n]
  TensorMap d_maps[kGemmDestinations];  // [its rows, n_whole] each, box [64, 64 or 128 bytes]
  u64 d[kGemmDestinations];             // [its rows, d_stride]: the same memory
  u64 counters[kGemmDestinations];      // of groups, u32 each, where the destination's owner has them; 0 for none
  const GemmTile* tiles;                // of units in the order in which they are begun
  const GemmKSource* k_sources;         // of every block of k, or null where A is one tensor from its first row on
  const Element* bias;                  // [n], or null
  // [CTAs, 2 warpgroups, kTileN / 8, 128 threads], where there are serial parts; of the CTAs of every unit where parts are handed over.
  float4* partial_sums;
  u32* parts_stored;                    // then of each of these CTAs: how many of its warps have handed over theirs
  WaitLimit wait;                       // for them
  u32 unit_count;
  u32 splits;        // parts of k, each of which a pair of CTAs computes
  u32 serial_parts;  // or parts of k that a pair computes one after the other: 1 or 2
  u32 handed_parts;  // or 2 parts of k, the first of which a pair hands over to the next pair: 1 or 2
  u32 k_blocks;      // a multiple of them
  u32 n;
  u32 n_whole;   // columns up to the last multiple of 16 bytes: TMA stores no less than that
  u32 d_stride;  // elements from one row of D to the next
  u32 pairs_columns;  // whether a unit's tiles lie side by side
  u32 wide;           // whether the result is f32
  u32 adds;           // whether it is added to what is there
  u32 counters_of_peers;
};

// A chunk of a result in shared memory, for the thread that stores it.
struct GemmChunk {
  i32 column;
  i32 row;    // of the destination
  u32 group;
  u16 destination;
  u8 rows;    // that are stored
  u8 flags;
};
constexpr u8 kChunkLast = 1;  // of this warpgroup's part of a tile
constexpr u8 kChunkNone = 2;  // there is no more work
constexpr u8 kChunkPart = 4;  // of another rank's tile: `row` is its place among its owner's (gemm_reduce.cuh)
constexpr u8 kChunkLater = 8;  // of a sum that other ranks get from a warp that has time for it

// Chunks of sums that one thread has stored in this rank's memory, for the warp that stores them in the others' (gemm_reduce.cuh).
constexpr u32 kSpreadChunks = 8;
struct GemmSpread {
  i32 columns[kSpreadChunks];
  i32 rows[kSpreadChunks];
  u32 stored;  // so many, over all; kSpreadEnd with it: there is nothing more to store
  u32 spread;
};
constexpr u32 kSpreadEnd = 0x80000000u;

template <typename C>
struct alignas(1024) GemmShared {
  u8 a[C::kStages][C::kBytesA];
  u8 b[C::kStages][C::kBytesB];
  u8 staging[kGemmConsumers][2][kGemmChunkBytes];
  GemmChunk chunks[kGemmConsumers][2];
  u64 full[C::kStages];
  u64 empty[C::kStages];
  u64 chunk_full[kGemmConsumers][2];
  u64 chunk_empty[kGemmConsumers][2];
  u64 order[kGemmConsumers];  // that warpgroup may multiply (gemm_pingpong.cuh)
  u64 room;  // the other parts' CTAs have room for what this one sends them (gemm_parts.cuh)
  GemmSpread spreads[kGemmConsumers];
  u64 own_loaded;  // a piece of this rank's rows is in `staging`, on its way to others (gemm_gather.cuh)
  u64 own_sent;    // `staging` is free for results
};

// The units of this CTA: every warp has the same list. Where parts of k are handed over, a unit is two items of it, one after the
// other: whoever waits, waits for an earlier one, so it does not matter how many clusters run at once.
struct GemmScheduler {
  const GemmArguments& arguments;
  u32 rank = cluster_rank() % 2;  // of the pair
  u32 part = cluster_rank() / 2;  // of k
  u32 index = cluster_index();

  __device__ __forceinline__ u32 items() const { return arguments.unit_count * arguments.handed_parts; }
  __device__ __forceinline__ bool more() const { return index < items(); }
  __device__ __forceinline__ bool more_after() const { return index + cluster_count() < items(); }
  __device__ __forceinline__ void advance() { index += cluster_count(); }
  __device__ __forceinline__ u32 unit_index() const { return index >> (arguments.handed_parts - 1); }
  // Whether another pair adds what this one sums, the next part of k, and stores the tiles.
  __device__ __forceinline__ bool has_next_part() const { return half() + 1 != arguments.handed_parts; }
  // Among the CTAs of all units, this one of its unit's: by it tiles lie, and partial sums that are handed over.
  __device__ __forceinline__ u32 workspace_index() const { return 2 * unit_index() + rank; }
  __device__ __forceinline__ u32 half() const { return index & (arguments.handed_parts - 1); }
  // This CTA's tile. The load stays where it is called, before whoever uses it waits for anything else.
  template <bool kGrouped = false>
  __device__ __forceinline__ GemmTile look_up() const {
    const GemmTile* from = arguments.tiles + workspace_index();
    u32 rows[4], place[2];
    if constexpr (kGrouped) {
      u32 problem[2];
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(rows[0]), "=r"(rows[1]), "=r"(rows[2]), "=r"(rows[3]) : "l"(from));
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(place[0]), "=r"(place[1]), "=r"(problem[0]), "=r"(problem[1])
                   : "l"(&from->column));
      return GemmTile{rows[0], rows[1],  u16(rows[2] & 0xffffu), u16(rows[2] >> 16), rows[3],
                      place[0], place[1], problem[0],             problem[1]};
    }
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(rows[0]), "=r"(rows[1]), "=r"(rows[2]), "=r"(rows[3]) : "l"(from));
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(place[0]), "=r"(place[1]) : "l"(&from->column));
    return GemmTile{rows[0], rows[1], u16(rows[2] & 0xffffu), u16(rows[2] >> 16), rows[3], place[0], place[1], 0, 0};
  }
  __device__ __forceinline__ u32 k_begin() const {
    return arguments.k_blocks / (arguments.splits * arguments.handed_parts) * (part + half());
  }
  __device__ __forceinline__ u32 k_end() const {
    return arguments.k_blocks / (arguments.splits * arguments.handed_parts) * (part + half() + 1);
  }
};

// Which stage of operands comes next, for who fills stages and who empties them.
template <typename C>
struct GemmPipelineState {
  u32 stage = 0;
  u32 phase = 0;  // of their barriers: how often all were used
  __device__ __forceinline__ void next() {
    if (++stage == C::kStages) {
      stage = 0;
      ++phase;
    }
  }
};

// The part of an operand's block that this CTA loads: all of it, or its half of what both read. Along k a box has all rows or
// half of them; along m or n a box has 64 of them, and the CTAs alternate. Of what both read, only so many halves are there.
template <u32 kRows, Major kMajor>
__device__ __forceinline__ void load_operand(u8* to, const TensorMap* map, u64* full, i32 k, u32 row, bool both,
                                             const GemmScheduler& scheduler, u32 halves = 2) {
  const u32 rank = scheduler.rank;
  if (both && rank >= halves) return;
  const u16 both_ctas = u16(3u << (2 * scheduler.part));
  if constexpr (kMajor == Major::kK) {
    const u32 half = rank * (kRows / 2);
    if (both) {
      tma_load_2d_multicast(to + half * kGemmRowBytes, map, full, k, i32(row + half), both_ctas);
    } else {
      tma_load_2d(to, map, full, k, i32(row));
    }
  } else {
#pragma unroll
    for (u32 chunk = 0; chunk < (kRows + 63) / 64; ++chunk) {
      u8* there = to + chunk * kGemmBlockK * kGemmRowBytes;
      if (!both) {
        tma_load_2d(there, map, full, i32(row + 64 * chunk), k);
      } else if (chunk % 2 == rank) {
        tma_load_2d_multicast(there, map, full, i32(row + 64 * chunk), k, both_ctas);
      }
    }
  }
}

// The same part of B's block, from memory to the second level cache.
template <u32 kRows, Major kMajor>
__device__ __forceinline__ void prefetch_operand(const TensorMap* map, i32 k, u32 row, bool both, u32 rank) {
  if constexpr (kMajor == Major::kK) {
    tma_prefetch_2d(map, k, i32(both ? row + rank * (kRows / 2) : row));
  } else {
#pragma unroll
    for (u32 chunk = 0; chunk < (kRows + 63) / 64; ++chunk) {
      if (!both || chunk % 2 == rank) tma_prefetch_2d(map, i32(row + 64 * chunk), k);
    }
  }
}

// Halves of a tile's rows of A that have any: nobody looks at what is multiplied with the others.
__device__ __forceinline__ u32 halves_of_a(const GemmArguments& arguments, const GemmTile& tile) {
  return arguments.pairs_columns != 0 && tile.rows <= kGemmTileM / 2 ? 1 : 2;
}

// B's part of a CTA's first tile while rows of A are still on their way: as many blocks as there are stages, and some more as far
// as the second level cache. How many of the stages have it.
template <typename C>
__device__ __forceinline__ u32 gemm_load_ahead(const GemmArguments& arguments, GemmShared<C>& shared, const GemmScheduler& scheduler,
                                               u32 column, u32 halves) {
  // Of every CTA: half of the cache over all of them.
  constexpr u32 kCached = 192 * 1024 / C::kBytesB;
  const u32 begin = scheduler.k_begin(), count = scheduler.k_end() - begin;
  const u32 ahead = min(count, C::kStages), cached = min(count, ahead + kCached);
  const bool both = arguments.pairs_columns == 0;
#pragma unroll 1
  for (u32 i = 0; i < cached; ++i) {
    const i32 k = i32((begin + i) * kGemmBlockK);
    if (i < ahead) {
      mbarrier_arrive_expect(&shared.full[i], C::kBytesA / 2 * halves + C::kBytesB);
      load_operand<C::kTileN, C::kMajorB>(shared.b[i], &arguments.b_map, &shared.full[i], k, column, both, scheduler);
    } else {
      prefetch_operand<C::kTileN, C::kMajorB>(&arguments.b_map, k, column, both, scheduler.rank);
    }
  }
  return ahead;
}

// What a thread that loads is for, a bit each.
constexpr u32 kLoadsA = 1;
constexpr u32 kLoadsB = 2;

// A tile's operands, those of kLoads, block by block of k; B's first `ahead` blocks are on their way. Who loads A speaks for both.
template <typename C, u32 kLoads>
__device__ __forceinline__ void gemm_load_operands(const GemmArguments& arguments, GemmShared<C>& shared, GemmPipelineState<C>& pipeline,
                                                   const GemmScheduler& scheduler, const GemmTile& tile, u32 ahead) {
  const u32 end = scheduler.k_end(), ahead_end = scheduler.k_begin() + ahead;
  const u32 halves = halves_of_a(arguments, tile);
  // Where A lies along k, the next block's place is looked up while this one's stage is waited for.
  uint2 source = make_uint2(tile.source, 0);
  const auto look_up = [&](u32 k_block) {
    if constexpr (C::kMajorA == Major::kMN) {
      if (arguments.k_sources != nullptr && k_block < end) {
        source = __ldg(reinterpret_cast<const uint2*>(arguments.k_sources) + k_block);
        return;
      }
    }
    source.y = k_block * kGemmBlockK;
  };
  look_up(scheduler.k_begin());
#pragma unroll 1
  for (u32 k_block = scheduler.k_begin(); k_block < end; ++k_block) {
    const u32 stage = pipeline.stage;
    if (k_block >= ahead_end) {
      // Both CTAs' consumers are done with this stage: the halves that come are written into both.
      mbarrier_wait(&shared.empty[stage], (pipeline.phase & 1) ^ 1);
      if (kLoads & kLoadsA) mbarrier_arrive_expect(&shared.full[stage], C::kBytesA / 2 * halves + C::kBytesB);
    }
    const i32 k = i32(k_block * kGemmBlockK);
    if (kLoads & kLoadsA) {
      load_operand<kGemmTileM, C::kMajorA>(shared.a[stage], &arguments.a_maps[source.x], &shared.full[stage], i32(source.y),
                                           tile.source_row, arguments.pairs_columns != 0, scheduler, halves);
      look_up(k_block + 1);
    }
    if ((kLoads & kLoadsB) && k_block >= ahead_end) {
      load_operand<C::kTileN, C::kMajorB>(shared.b[stage], &arguments.b_map, &shared.full[stage], k, tile.column,
                                          arguments.pairs_columns == 0, scheduler);
    }
    pipeline.next();
  }
}

}  // namespace counterpoint
