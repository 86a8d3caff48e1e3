// A matrix product whose rows are summed over ranks where they belong, each rank on a GPU of its own: a reduce-scatter, or an
// all-reduce, of a product, tile by tile.
//
// Every rank computes all of its product, the tiles of other ranks' rows first. A finished part of such a tile, rounded to
// elements, is stored straight into its owner's memory, in the order in which its threads hold it, and stamped with the call's
// number. When a rank comes to its own tiles it waits for the others' parts of each, adds them in f32 in the order of ranks, its
// own rounded like theirs, and rounds once: the bits are those of a product followed by a reduction. The sums go to the rank's
// own rows, and in an all-reduce to every other rank's copy of them.
//
// Ranks meet as link_meeting.cuh says: a rank writes into another's memory once that one has announced the call. Nobody reads
// what another rank has, so only who spreads sums must wait at the end until all that come to it have come.
#pragma once

#include "gemm/gemm.cuh"
#include "link_meeting.cuh"
#include "ptx/bulk.cuh"

namespace counterpoint {

// One call of one rank, beside its product, whose destinations are the ranks: `d_maps` are this rank's rows of the sums in the
// memory of each rank that gets them. Shared with the host.
struct GemmReduction {
  LinkCall link;
  const u8* parts;                      // what others send of this rank's tiles: [ranks, part_bytes]
  const u64* stamps;                    // and the call in which each part came: [ranks, parts of a rank]
  u64 peer_parts[kGemmDestinations];    // this rank's place in those of every rank
  u64 peer_stamps[kGemmDestinations];
  u64 part_bytes;
  u32 stamps_of_rank;
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
  static constexpr u32 kProducerRegisters = 40;
  static constexpr u32 kConsumerRegisters = 232;
  const GemmArguments& arguments;
  const GemmReduction& reduction;

  static constexpr u32 kChunks = C::kTileN / C::kChunkColumns;
  static constexpr u32 kChunkBytes = 64 * C::kChunkColumns * sizeof(Element);
  static constexpr u32 kPacks = C::kChunkColumns / 16;  // of 8 elements, of each thread

  __device__ __forceinline__ u64 call() const { return reduction.link.state->calls + 1; }

  // One warp of every CTA: that of the first lets the others know that this rank's parts may be written; then all tell owners of
  // the parts that have been stored.
  __device__ __forceinline__ void begin(GemmShared<C>& shared) const {
    const u32 peer = threadIdx.x % 32;
    if (blockIdx.x == 0 && peer < reduction.ranks && peer != reduction.rank) {
      store_release_system(&reduction.link.slots[peer]->announced, call());
    }
    if (peer == 0) tell_owners(shared);
  }

  // A fence for the whole system takes its turn among those of all multiprocessors (about 0.2 us each), so who stores does not wait
  // for one: this thread makes one for all that was stored since its last.
  __device__ __forceinline__ void tell_owners(GemmShared<C>& shared) const {
    const u64 number = call();
    for (bool more = true; more;) {
      more = false;
      bool fenced = false;
      u32 stored[kGemmConsumers];
#pragma unroll
      for (u32 g = 0; g < kGemmConsumers; ++g) {
        stored[g] = load_acquire_shared(&shared.heralds[g].stored);
        more |= (stored[g] & kHeraldEnd) == 0;
        fenced |= (stored[g] & ~kHeraldEnd) != shared.heralds[g].told;
      }
      if (!fenced) {
        pause_nanoseconds<200>();
        continue;
      }
      fence_system();
#pragma unroll
      for (u32 g = 0; g < kGemmConsumers; ++g) {
        GemmHerald& herald = shared.heralds[g];
        u32 told = herald.told;
        for (; told != (stored[g] & ~kHeraldEnd); ++told) {
          const u32 entry = herald.parts[told % kHeraldParts];
          const u32 part = entry & ((1u << kHeraldOwner) - 1);
          store_relaxed_system(reinterpret_cast<u64*>(reduction.peer_stamps[entry >> kHeraldOwner]) + part, number);
        }
        store_release_shared(&herald.told, told);
      }
    }
  }
  __device__ __forceinline__ void await_rows(const GemmRowTile&) const {}

  // Whether a rank's memory may be written, asked once of each: `known` has a bit for those that may.
  __device__ __forceinline__ bool may_write(u32 peer, u64 number, u32& known) const {
    if (known >> peer & 1) return true;
    const bool began = link_wait(reduction.link, &reduction.link.mailbox[peer].announced, number, peer, kLinkBegin);
    if (began) known |= 1u << peer;
    return began;
  }

  // The one thread that stores what warpgroup `group` computes.
  __device__ __forceinline__ void store(GemmShared<C>& shared, u32 group) const {
    const u64 number = call();
    const u32 own = reduction.rank;
    GemmHerald& herald = shared.heralds[group];
    u32 known = 0, stored = 0;
    for (u32 count = 0;; ++count) {
      const u32 buffer = count % 2;
      mbarrier_wait(&shared.chunk_full[group][buffer], (count / 2) & 1);
      const GemmChunk chunk = shared.chunks[group][buffer];
      if (chunk.flags & kChunkNone) break;
      const u8* from = shared.staging[group][buffer];
      bool sent = false;
      const u32 owner = chunk.destination;
      if (chunk.flags & kChunkPart) {
        sent = may_write(owner, number, known);
        if (sent) {
          bulk_store(reinterpret_cast<u8*>(reduction.peer_parts[owner]) + u64(u32(chunk.row)) * kChunkBytes, from,
                     kChunkBytes);
        }
      } else if (u32(chunk.column) < arguments.n) {
        tma_store_2d(&arguments.d_maps[own], from, chunk.column, chunk.row);
        for (u32 peer = 0; reduction.spreads != 0 && peer < reduction.ranks; ++peer) {
          if (peer != own && may_write(peer, number, known)) {
            tma_store_2d(&arguments.d_maps[peer], from, chunk.column, chunk.row);
          }
        }
      }
      tma_store_commit();
      tma_store_wait_read<0>();
      mbarrier_arrive(&shared.chunk_empty[group][buffer]);
      if (sent && (chunk.flags & kChunkLast)) {
        // All of this thread's stores are complete, not only read, before the owner hears of them.
        tma_store_wait<0>();
        fence_async_proxy_all();
        while (stored - load_acquire_shared(&herald.told) == kHeraldParts) {
        }
        herald.parts[stored % kHeraldParts] = owner << kHeraldOwner | chunk.group;
        store_release_shared(&herald.stored, ++stored);
      }
    }
    // Complete before this CTA is counted as through: who counts last tells the others for all.
    tma_store_wait<0>();
    fence_async_proxy_all();
    store_release_shared(&herald.stored, stored | kHeraldEnd);
  }

  __device__ __forceinline__ void tile(GemmStaging<C>& staging, float (&acc)[C::kTileN / 2],
                                       const GemmRowTile& of, u32 column, const GemmWalk& walk) const {
    // A unit's group is its number among its owner's.
    const u32 part = (walk.unit.group * 2 + walk.rank) * kGemmConsumers + staging.group;
    if (of.destination != reduction.rank) return send(staging, acc, of.destination, part);
    add_parts(staging, acc, part);
    staging.template tile<false>(acc, of, column, 0);
  }

  __device__ __forceinline__ void send(GemmStaging<C>& staging, const float (&acc)[C::kTileN / 2], u16 owner,
                                       u32 part) const {
    const u32 thread = 32 * staging.warp + staging.lane;
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      const u8 flags = c + 1 == kChunks ? kChunkPart | kChunkLast : kChunkPart;
      const GemmChunk chunk{0, i32(part * kChunks + c), part, owner, 64, flags};
      staging.stage(chunk, [&](u8* to) {
#pragma unroll
        for (u32 p = 0; p < kPacks; ++p) {
          const float* from = acc + (c * kPacks + p) * 8;
          *reinterpret_cast<uint4*>(to + (p * 128 + thread) * 16) =
              make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7]));
        }
      });
    }
  }

  // acc = the sum over ranks, their parts rounded to elements, in the order of ranks.
  __device__ __forceinline__ void add_parts(GemmStaging<C>& staging, float (&acc)[C::kTileN / 2], u32 part) const {
    if (staging.warp == 0 && staging.lane == 0) {
      const u64 number = call();
      for (u32 peer = 0; peer < reduction.ranks; ++peer) {
        if (peer == reduction.rank) continue;
        // What comes wrong when the wait gives up, nobody looks at.
        link_wait(reduction.link, reduction.stamps + peer * reduction.stamps_of_rank + part, number, peer, kLinkSend);
      }
    }
    barrier_sync(kGemmGroupBarrier + staging.group, 128);
    const uint4* parts = reinterpret_cast<const uint4*>(reduction.parts + u64(part) * kChunks * kChunkBytes);
    parts += 32 * staging.warp + staging.lane;
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      float sums[kPacks * 8] = {};
      float* own = acc + c * kPacks * 8;
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
          const uint4* from = parts + peer * (reduction.part_bytes / 16) + c * kPacks * 128;
#pragma unroll
          for (u32 p = 0; p < kPacks; ++p) words[p] = __ldcg(from + p * 128);
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
      for (u32 peer = 0; peer < reduction.ranks; ++peer) {
        if (peer != reduction.rank) store_release_system(&link.slots[peer]->passed, number);
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
