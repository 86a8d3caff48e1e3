// Ranges of rows between the memories of GPUs, by few multiprocessors: a group-cast.
//
// The copy engine moves pieces through shared memory, whichever side is remote, and one thread of a block keeps it busy:
// what is on its way, not threads, is what fills a link.
#pragma once

#include "link_meeting.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

constexpr u32 kLinkPieceBytes = 16384;
constexpr u32 kLinkStages = 12;
// Pieces that are loaded ahead of what is stored; the other stages hold what is being stored.
constexpr u32 kLinkPullAhead = 9;
constexpr u32 kLinkPushAhead = 4;

// Bytes that lie together on both sides.
struct LinkPiece {
  u64 own;     // bytes into the tensor on this side
  u64 remote;  // bytes into the other rank's
  u32 bytes;
  u16 rank;
  u16 tensor;
};
static_assert(sizeof(LinkPiece) == 24, "layout shared with the host");

struct alignas(128) LinkCopyShared {
  u8 stages[kLinkStages][kLinkPieceBytes];
  u64 full[kLinkStages];
  // Where each stage goes, and how much of it.
  u64 to[kLinkStages];
  u32 bytes[kLinkStages];
  u64 tensors[kLinkRanks * kLinkTensors];
};

// One warp a block. `kPush`: from this side to the other; else from there to here.
template <bool kPush>
__device__ __forceinline__ void link_copy(const LinkCall& call, const LinkPiece* __restrict__ pieces, u32 count) {
  constexpr u32 kAhead = kPush ? kLinkPushAhead : kLinkPullAhead;
  extern __shared__ __align__(128) u8 shared_bytes[];
  LinkCopyShared& shared = *reinterpret_cast<LinkCopyShared*>(shared_bytes);
  const u32 lane = threadIdx.x;
  const u32 mine = count > blockIdx.x ? (count - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  // The list is read 32 pieces at a time and as many ahead: a piece would otherwise wait for its entry as long as for its bytes.
  const auto listed = [&](u32 first) {
    LinkPiece piece = {};
    if (first + lane < mine) piece = pieces[blockIdx.x + u64(first + lane) * gridDim.x];
    return piece;
  };
  LinkPiece held = {};
  LinkPiece next = listed(0);
  if (lane == 0) {
    for (u32 s = 0; s < kLinkStages; ++s) mbarrier_init(&shared.full[s], 1);
    fence_mbarrier_init();
  }
  const u64 number = link_begin(call, shared.tensors);
  if (number == 0) return;
  __syncwarp();
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
        // Its stage was stored from kLinkStages pieces ago; younger stores may go on.
        if (n >= kLinkStages) tma_store_wait_read<kLinkStages - kAhead - 1>();
        const u32 tensor = place & 0xffffu;
        const u64 own = call.own[tensor] + piece.own;
        const u64 remote = shared.tensors[(place >> 16) * kLinkTensors + tensor] + piece.remote;
        const u32 stage = n % kLinkStages;
        shared.to[stage] = kPush ? remote : own;
        shared.bytes[stage] = piece.bytes;
        mbarrier_arrive_expect(&shared.full[stage], piece.bytes);
        bulk_load(shared.stages[stage], reinterpret_cast<const void*>(kPush ? own : remote), piece.bytes,
                  &shared.full[stage]);
      }
    }
    if (lane == 0 && n >= kAhead && n - kAhead < mine) {
      const u32 m = n - kAhead;
      const u32 stage = m % kLinkStages;
      mbarrier_wait(&shared.full[stage], m / kLinkStages % 2);
      bulk_store(reinterpret_cast<void*>(shared.to[stage]), shared.stages[stage], shared.bytes[stage]);
      tma_store_commit();
    }
  }
  if (lane == 0) tma_store_wait<0>();
  __syncwarp();
  link_end(call, number);
}

}  // namespace counterpoint
