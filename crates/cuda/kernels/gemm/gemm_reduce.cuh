// A matrix product whose rows are summed over ranks where they belong, each rank on a GPU of its own: a reduce-scatter, or an
// all-reduce, of a product, tile by tile.
//
// Every rank computes all of its product, the tiles of other ranks' rows first. A finished part of such a tile, rounded to
// elements, is stored straight into its owner's memory, in the order in which its threads hold it, and stamped with the call's
// number; the part for which there is no room on the way follows while the next tile is multiplied. When a rank comes to its own
// tiles it waits for the others' parts of each, adds them in f32 in the order of ranks, its own rounded like theirs, and rounds once:
// the bits are those of a product followed by a reduction. The sums go to the rank's own rows, and in an all-reduce to every other
// rank's copy of them: those of a CTA's last tile directly, earlier ones while the next tiles are multiplied (gemm_spread.cuh).
//
// The others' parts of a tile come through the pipeline of stages behind its operands: who loads fetches them while the tile is still
// multiplied, for a warpgroup that waits for memory keeps the matrix unit waiting.
//
// Where a rank has fewer rows than a tile, tiles have slices of several owners: they are sent, and then those of this rank are
// added up. All ranks then take tiles in the same order, so each tile's parts have been sent before anyone waits behind it.
//
// Ranks wait as link_barrier.cuh says: a rank writes into another's memory once that one has announced the call. Nobody reads
// what another rank has, so only who spreads sums must wait at the end until all that come to it have come.
#pragma once

#include "gemm/gemm.cuh"
#include "gemm/gemm_spread.cuh"
#include "link_barrier.cuh"
#include "ptx/bulk.cuh"

namespace counterpoint {

// One call of one rank, in addition to its product, whose destinations are the ranks: `d_maps` are this rank's rows of the sums in the
// memory of each rank that gets them. Shared with the host.
struct GemmReduction {
  LinkCall link;
  const u8* parts;                      // what others send of this rank's tiles: [ranks, part_bytes]
  const u64* stamps;                    // and the call in which each part came: [ranks, parts of a rank]
  u64 peer_parts[kGemmDestinations];    // this rank's place in those of every rank
  u64 peer_stamps[kGemmDestinations];
  u64 sums[kGemmDestinations];          // this rank's rows of the sums in the memory of every rank that gets them
  u64 part_bytes;
  u32 stamps_of_rank;
  u32 own_rows;  // of each rank: a multiple of 64, or 32 or 16
  u32 rank;
  u32 ranks;
  u32 spreads;  // whether all ranks get the sums
};

// The kernel's parameter. Shared with the host.
struct GemmReduceArguments {
  GemmArguments gemm;
  GemmReduction reduction;
};

template <typename C>
struct GemmToRanks {
  static constexpr u32 kProducerRegisters = 56;
  static constexpr u32 kConsumerRegisters = 224;
  static constexpr u32 kLoaders = 1;
  // The others of the warp look out for parts.
  static constexpr u32 kLoadingThreads = 32;
  static constexpr bool kAwaitsRows = false;
  static constexpr bool kSumsParts = false;
  using Held = GemmHeld<C>;
  const GemmArguments& arguments;
  const GemmReduction& reduction;

  static constexpr u32 kChunks = C::kTileN / C::kChunkColumns;
  static constexpr u32 kChunkBytes = 64 * C::kChunkColumns * sizeof(Element);
  static constexpr u32 kRowBytes = kChunkBytes / 64;
  static constexpr u32 kPacks = C::kChunkColumns / 16;  // of 8 elements, of each thread

  // A chunk of both warpgroups from one rank is a piece; a stage has some where A's block would be and some where B's.
  static constexpr u32 kPieceBytes = kGemmConsumers * kChunkBytes;
  static constexpr u32 kPiecesInA = C::kBytesA / kPieceBytes;
  static constexpr u32 kPiecesOfStage = kPiecesInA + C::kBytesB / kPieceBytes;
  static_assert(kPiecesInA > 0, "a piece fits a stage");

  __device__ __forceinline__ u64 call() const { return reduction.link.state->calls + 1; }

  // Of rows of the product: whether some of those from `row` on are this rank's.
  __device__ __forceinline__ bool keeps(u32 row, u32 rows) const {
    const u32 first = reduction.rank * reduction.own_rows;
    return row < first + reduction.own_rows && row + rows > first;
  }
  // Whether some of a warpgroup's are others'.
  __device__ __forceinline__ bool sends(u32 row) const {
    const u32 first = reduction.rank * reduction.own_rows;
    const u32 end = min(row + 64, reduction.ranks * reduction.own_rows);
    return row < first || end > first + reduction.own_rows;
  }
  // Calls `each` with the owner of every slice of a warpgroup's rows that others have, its first row and how many.
  template <typename Each>
  __device__ __forceinline__ void for_slices(u32 row, Each each) const {
    const u32 slice = min(64u, reduction.own_rows);
    u32 owner = row / reduction.own_rows;
    for (u32 at = 0; at < 64 && owner < reduction.ranks; at += slice, ++owner) {
      if (owner != reduction.rank) each(owner, at, slice);
    }
  }
  // A unit's group is its number among its owner's.
  __device__ __forceinline__ u32 first_part(const GemmTile& of, const GemmScheduler& scheduler) const {
    return (of.group * 2 + scheduler.rank) * kGemmConsumers;
  }

  // One warp of every CTA: that of the first lets the others know that this rank's parts may be written; then all store in other
  // ranks' memory what sums have been stored in this one's.
  __device__ __forceinline__ void begin(GemmShared<C>& shared) const {
    const u32 lane = threadIdx.x % 32;
    if (blockIdx.x == 0 && lane < reduction.ranks && lane != reduction.rank) {
      store_release_system(&reduction.link.slots[lane]->announced, call());
    }
    if (reduction.spreads == 0) return;
    gemm_spread_sums<C>(shared, GemmSums{reduction.sums, reduction.rank, all_writable(), arguments.d_stride, arguments.n});
  }

  // The warp that loads, behind a tile's operands: what the others sent of this rank's rows, chunk after chunk from rank after rank.
  __device__ __forceinline__ void load_parts(GemmShared<C>& shared, GemmPipelineState<C>& pipeline, const GemmTile& of,
                                             const GemmScheduler& scheduler) const {
    if (!keeps(of.source_row, kGemmTileM)) return;
    // A tile without an element takes its stages all the same: the other CTA counts them.
    const bool empty = of.rows == 0 || of.column >= arguments.n;
    const u32 part = first_part(of, scheduler);
    if (!empty) await_parts(of.source_row, part);
    if (elect_one()) fetch_parts(shared, pipeline, part, empty);
  }

  __device__ __forceinline__ void fetch_parts(GemmShared<C>& shared, GemmPipelineState<C>& pipeline, u32 part, bool empty) const {
    // What other ranks' TMA wrote is read by this one's.
    fence_async_proxy_all();
    u32 chunk = 0, peer = reduction.rank == 0;
    u32 left = kChunks * (reduction.ranks - 1);
    while (left > 0) {
      const u32 stage = pipeline.stage, count = min(kPiecesOfStage, left);
      mbarrier_wait(&shared.empty[stage], (pipeline.phase & 1) ^ 1);
      mbarrier_arrive_expect(&shared.full[stage], empty ? 0 : count * kPieceBytes);
#pragma unroll 1
      for (u32 i = 0; i < count && !empty; ++i) {
        const u8* from = reduction.parts + peer * reduction.part_bytes + u64(part * kChunks + chunk) * kChunkBytes;
#pragma unroll
        for (u32 g = 0; g < kGemmConsumers; ++g) {
          bulk_load(piece(shared, stage, i) + g * kChunkBytes, from + g * kChunks * kChunkBytes, kChunkBytes,
                    &shared.full[stage]);
        }
        if (++peer == reduction.rank) ++peer;
        if (peer >= reduction.ranks) {
          peer = reduction.rank == 0;
          ++chunk;
        }
      }
      left -= count;
      pipeline.next();
    }
  }

  __device__ __forceinline__ u8* piece(GemmShared<C>& shared, u32 stage, u32 index) const {
    return index < kPiecesInA ? shared.a[stage] + index * kPieceBytes : shared.b[stage] + (index - kPiecesInA) * kPieceBytes;
  }

  // All lanes together: until the parts of both warpgroups, if they have rows of this rank, have come from everyone.
  __device__ __forceinline__ void await_parts(u32 row, u32 part) const {
    const u64 number = call();
    for (u32 at = threadIdx.x; at < kGemmConsumers * reduction.ranks; at += 32) {
      const u32 peer = at / kGemmConsumers, group = at % kGemmConsumers;
      if (peer == reduction.rank || !keeps(row + 64 * group, 64)) continue;
      // What comes wrong when the wait gives up, nobody looks at.
      link_wait(reduction.link, reduction.stamps + peer * reduction.stamps_of_rank + part + group, number, peer, kLinkSend);
    }
    __syncwarp();
  }

  // Ranks whose memory may be written, a bit each: all others, unless a wait has given up.
  __device__ __forceinline__ u32 all_writable() const {
    const u64 number = call();
    u32 known = 0;
    for (u32 peer = 0; peer < reduction.ranks; ++peer) {
      if (peer == reduction.rank) continue;
      if (link_wait(reduction.link, &reduction.link.mailbox[peer].announced, number, peer, kLinkBegin)) known |= 1u << peer;
    }
    return known;
  }

  __device__ __forceinline__ bool spreads_now(const GemmChunk& chunk) const {
    return reduction.spreads != 0 && (chunk.flags & kChunkLater) == 0;
  }

  // The one thread that stores what warpgroup `group` computes.
  __device__ __forceinline__ void store(GemmShared<C>& shared, u32 group) const {
    const u64 number = call();
    const u32 own = reduction.rank;
    GemmSpread& spread = shared.spreads[group];
    // Asked before there is anything to store.
    const u32 known = all_writable();
    u32 later = 0;
    for (u32 count = 0;; ++count) {
      const u32 buffer = count % 2;
      mbarrier_wait(&shared.chunk_full[group][buffer], (count / 2) & 1);
      const GemmChunk chunk = shared.chunks[group][buffer];
      if (chunk.flags & kChunkNone) break;
      const u8* from = shared.staging[group][buffer];
      if (chunk.flags & kChunkPart) {
        for_slices(chunk.row, [&](u32 owner, u32 at, u32 rows) {
          if ((known >> owner & 1) == 0) return;
          u8* to = reinterpret_cast<u8*>(reduction.peer_parts[owner]) + u64(u32(chunk.column)) * kChunkBytes;
          bulk_store(to + at * kRowBytes, from + at * kRowBytes, rows * kRowBytes);
        });
      } else if (u32(chunk.column) < arguments.n) {
        // This rank's slice, of which the maps' boxes are, begins that far below the chunk's first row.
        const i32 skipped = max(0, -chunk.row);
        const i32 row = chunk.row + skipped;
        from += skipped * kRowBytes;
        tma_store_2d(&arguments.d_maps[own], from, chunk.column, row);
        for (u32 peer = 0; spreads_now(chunk) && peer < reduction.ranks; ++peer) {
          if ((known >> peer & 1) != 0) tma_store_2d(&arguments.d_maps[peer], from, chunk.column, row);
        }
      }
      tma_store_commit();
      tma_store_wait_read<0>();
      mbarrier_arrive(&shared.chunk_empty[group][buffer]);
      if ((chunk.flags & kChunkLater) && u32(chunk.column) < arguments.n) {
        // Complete, not only read, before others read it.
        tma_store_wait<0>();
        fence_async_proxy_all();
        while (later - load_acquire_shared(&spread.spread) == kSpreadChunks) {
        }
        spread.columns[later % kSpreadChunks] = chunk.column;
        spread.rows[later % kSpreadChunks] = chunk.row;
        store_release_shared(&spread.stored, ++later);
      }
      if ((chunk.flags & kChunkPart) && (chunk.flags & kChunkLast)) {
        // All of this thread's stores are complete, not only read, before their owners hear of them.
        tma_store_wait<0>();
        fence_async_proxy_all();
        fence_system();
        for_slices(chunk.row, [&](u32 owner, u32, u32) {
          if ((known >> owner & 1) == 0) return;
          store_relaxed_system(reinterpret_cast<u64*>(reduction.peer_stamps[owner]) + chunk.group, number);
        });
      }
    }
    // Complete before this CTA is counted as through: who counts last notifies the others for all.
    tma_store_wait<0>();
    fence_async_proxy_all();
    store_release_shared(&spread.stored, later | kSpreadEnd);
  }

  template <typename Consumer>
  __device__ __forceinline__ void tile(Consumer& consumer, GemmStaging<C>& staging, Held& held, const GemmTile& of,
                                       const GemmScheduler& scheduler) const {
    const u32 row = of.source_row + 64 * staging.group;
    const bool kept = keeps(row, 64);
    if (sends(row)) {
      const u32 part = first_part(of, scheduler) + staging.group;
      // Nobody waits for others' parts of a tile before its own of it are on their way: of tiles with rows of several ranks both
      // warpgroups wait.
      const bool now = reduction.own_rows < kGemmTileM;
      held.take(staging, GemmChunk{i32(part * kChunks), i32(row), part, 0, 64, kChunkPart}, consumer.acc[0], now);
    }
    if (!kept) return no_tile(consumer, of);
    add_parts(consumer);
    const i32 own_row = i32(row - reduction.rank * reduction.own_rows);
    // Sums of several ranks' copies would keep shared memory from the next tile's.
    const bool later = reduction.spreads != 0 && reduction.own_rows >= kGemmTileM && scheduler.more_after();
    held.take(staging, GemmChunk{i32(of.column), own_row, 0, 0, 64, later ? kChunkLater : u8(0)}, consumer.acc[0], false);
  }

  // The others' parts of a tile take their stages, whoever adds them.
  template <typename Consumer>
  __device__ __forceinline__ void no_tile(Consumer& consumer, const GemmTile& of) const {
    if (!keeps(of.source_row, kGemmTileM)) return;
    for (u32 at = 0; at < kChunks * (reduction.ranks - 1); at += kPiecesOfStage) {
      const u32 stage = consumer.pipeline.stage;
      mbarrier_wait(&consumer.shared.full[stage], consumer.pipeline.phase & 1);
      consumer.release(stage);
      consumer.pipeline.next();
    }
  }

  // The accumulators become the sum over ranks, their parts rounded to elements, in the order of ranks.
  template <typename Consumer>
  __device__ __forceinline__ void add_parts(Consumer& consumer) const {
    GemmShared<C>& shared = consumer.shared;
    u32 index = 0, left = kChunks * (reduction.ranks - 1);
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      float sums[kPacks * 8] = {};
      float* own = consumer.acc[0] + c * kPacks * 8;
#pragma unroll 1
      for (u32 peer = 0; peer < reduction.ranks; ++peer) {
        uint4 words[kPacks];
        if (peer == reduction.rank) {
#pragma unroll
          for (u32 p = 0; p < kPacks; ++p) {
            const float* from = own + 8 * p;
            words[p] = make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7]));
          }
        } else {
          const u32 stage = consumer.pipeline.stage;
          if (index == 0) mbarrier_wait(&shared.full[stage], consumer.pipeline.phase & 1);
          const u8* from = piece(shared, stage, index) + consumer.group * kChunkBytes;
#pragma unroll
          for (u32 p = 0; p < kPacks; ++p) {
            words[p] = *reinterpret_cast<const uint4*>(from + Held::place(consumer.warp, p, consumer.lane));
          }
        }
#pragma unroll
        for (u32 p = 0; p < kPacks; ++p) {
          const u32 four[4] = {words[p].x, words[p].y, words[p].z, words[p].w};
#pragma unroll
          for (u32 e = 0; e < 4; ++e) {
            sums[8 * p + 2 * e] += low_float(four[e]);
            sums[8 * p + 2 * e + 1] += high_float(four[e]);
          }
        }
        if (peer == reduction.rank) continue;
        --left;
        if (++index == kPiecesOfStage || left == 0) {
          // It has been read by all lanes before two of them say so.
          __syncwarp();
          consumer.release(consumer.pipeline.stage);
          consumer.pipeline.next();
          index = 0;
        }
      }
#pragma unroll
      for (u32 e = 0; e < kPacks * 8; ++e) own[e] = sums[e];
    }
  }

  // One thread of every CTA, when all of its cluster are through.
  __device__ __forceinline__ void end() const {
    const LinkCall& link = reduction.link;
    const u64 number = call();
    if (add_acquire_release(&link.state->arrived, 1) + 1 != gridDim.x) return;
    bool passed = true;
    if (reduction.spreads != 0) {
      // One fence for what is signalled to all.
      fence_system();
      for (u32 peer = 0; peer < reduction.ranks; ++peer) {
        if (peer != reduction.rank) store_relaxed_system(&link.slots[peer]->passed, number);
      }
      for (u32 peer = 0; peer < reduction.ranks; ++peer) {
        if (peer != reduction.rank) passed &= link_wait(link, &link.mailbox[peer].passed, number, peer, kLinkPass);
      }
    }
    link.state->arrived = 0;
    if (passed) link.state->calls = number;
  }
};

template <typename C>
__device__ __forceinline__ void gemm_reduce(const GemmReduceArguments& arguments) {
  gemm<C>(arguments.gemm, GemmToRanks<C>{arguments.gemm, arguments.reduction});
}

}  // namespace counterpoint
