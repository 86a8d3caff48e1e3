// Ranges of rows between the memories of GPUs, by few multiprocessors: a group-cast.
//
// The copy engine moves pieces through shared memory, whichever side is remote, and one thread of each warp keeps it busy:
// what is on its way, not threads, is what fills a link.
#pragma once

#include "link_meeting.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

// Bytes that lie together on both sides.
struct LinkPiece {
  u64 own;     // bytes into the tensor on this side
  u64 remote;  // bytes into the other rank's
  u32 bytes;
  u16 rank;
  u16 tensor;
};
static_assert(sizeof(LinkPiece) == 24, "layout shared with the host");

// Of each warp its own stages: what one warp waits for holds no other up.
template <u32 kWarps, u32 kStages, u32 kPieceBytes>
struct alignas(128) LinkCopyShared {
  u8 stages[kWarps][kStages][kPieceBytes];
  u64 full[kWarps][kStages];
  // Where each stage goes, and how much of it.
  u64 to[kWarps][kStages];
  u32 bytes[kWarps][kStages];
  u64 tensors[kLinkRanks * kLinkTensors];
  u64 number;
};

// `kPush`: from this side to the other; else from there to here. `kAhead`: pieces that a warp loads ahead of what it stores; its
// other stages hold what is being stored. `phases`: LinkPhases.
template <bool kPush, u32 kWarps, u32 kStages, u32 kAhead, u32 kPieceBytes>
__device__ __forceinline__ void link_copy(const LinkCall& call, const LinkPiece* __restrict__ pieces, u32 count,
                                          u32 phases) {
  using Shared = LinkCopyShared<kWarps, kStages, kPieceBytes>;
  extern __shared__ __align__(128) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const u32 lane = threadIdx.x % 32;
  const u32 warp = uniform(threadIdx.x / 32);
  const u32 first_piece = blockIdx.x + warp * gridDim.x;
  const u32 step = gridDim.x * kWarps;
  const u32 mine = count > first_piece ? (count - first_piece + step - 1) / step : 0;
  // The list is read 32 pieces at a time and as many ahead: a piece would otherwise wait for its entry as long as for its bytes.
  const auto listed = [&](u32 first) {
    LinkPiece piece = {};
    if (first + lane < mine) piece = pieces[first_piece + u64(first + lane) * step];
    return piece;
  };
  LinkPiece held = {};
  LinkPiece next = listed(0);
  if (lane == 0) {
    for (u32 s = 0; s < kStages; ++s) mbarrier_init(&shared.full[warp][s], 1);
    fence_mbarrier_init();
  }
  if (warp == 0) {
    const u64 begun = (phases & kLinkBegins) != 0 ? link_begin(call, shared.tensors) : link_resume(call, shared.tensors);
    if (lane == 0) shared.number = begun;
  }
  __syncthreads();
  const u64 number = shared.number;
  if (number == 0) return;
  // What the others wrote before they announced is read by this warp's copy engine too.
  fence_async_proxy_all();
  for (u32 n = 0; n < mine + kAhead; ++n) {
    if (n % 32 == 0) {
      held = next;
      next = listed(n + 32);
    }
    if (n < mine) {
      LinkPiece piece;
      piece.own = __shfl_sync(0xffffffffu, held.own, n % 32);
      piece.remote = __shfl_sync(0xffffffffu, held.remote, n % 32);
      piece.bytes = __shfl_sync(0xffffffffu, held.bytes, n % 32);
      const u32 place = __shfl_sync(0xffffffffu, u32(held.rank) << 16 | held.tensor, n % 32);
      if (lane == 0) {
        // Its stage was stored from kStages pieces ago; younger stores may go on.
        if (n >= kStages) tma_store_wait_read<kStages - kAhead - 1>();
        const u32 tensor = place & 0xffffu;
        const u64 own = call.own[tensor] + piece.own;
        const u64 remote = shared.tensors[(place >> 16) * kLinkTensors + tensor] + piece.remote;
        const u32 stage = n % kStages;
        shared.to[warp][stage] = kPush ? remote : own;
        shared.bytes[warp][stage] = piece.bytes;
        mbarrier_arrive_expect(&shared.full[warp][stage], piece.bytes);
        bulk_load(shared.stages[warp][stage], reinterpret_cast<const void*>(kPush ? own : remote), piece.bytes,
                  &shared.full[warp][stage]);
      }
    }
    if (lane == 0 && n >= kAhead && n - kAhead < mine) {
      const u32 m = n - kAhead;
      const u32 stage = m % kStages;
      mbarrier_wait(&shared.full[warp][stage], m / kStages % 2);
      bulk_store(reinterpret_cast<void*>(shared.to[warp][stage]), shared.stages[warp][stage], shared.bytes[warp][stage]);
      tma_store_commit();
    }
  }
  if (lane == 0) tma_store_wait<0>();
  fence_async_proxy_all();
  __syncthreads();
  if (warp == 0 && (phases & kLinkEnds) != 0) link_end(call, number);
}

}  // namespace counterpoint
