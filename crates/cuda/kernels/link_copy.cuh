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
  u64 tensors[kLinkRanks * kLinkTensors];
};

// One warp a block. `kPush`: from this side to the other; else from there to here.
template <bool kPush>
__device__ __forceinline__ void link_copy(const LinkCall& call, const LinkPiece* __restrict__ pieces, u32 count) {
  constexpr u32 kAhead = kPush ? kLinkPushAhead : kLinkPullAhead;
  extern __shared__ __align__(128) u8 shared_bytes[];
  LinkCopyShared& shared = *reinterpret_cast<LinkCopyShared*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < kLinkStages; ++s) mbarrier_init(&shared.full[s], 1);
    fence_mbarrier_init();
  }
  const u64 number = link_begin(call, shared.tensors);
  if (number == 0) return;
  __syncwarp();
  if (threadIdx.x == 0) {
    const u32 mine = count > blockIdx.x ? (count - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    const auto piece_of = [&](u32 n) { return pieces[blockIdx.x + n * gridDim.x]; };
    const auto own_of = [&](const LinkPiece& piece) { return call.own[piece.tensor] + piece.own; };
    const auto remote_of = [&](const LinkPiece& piece) {
      return shared.tensors[piece.rank * kLinkTensors + piece.tensor] + piece.remote;
    };
    for (u32 n = 0; n < mine + kAhead; ++n) {
      if (n < mine) {
        // Its stage was stored from kLinkStages pieces ago; younger stores may go on.
        if (n >= kLinkStages) tma_store_wait_read<kLinkStages - kAhead - 1>();
        const LinkPiece piece = piece_of(n);
        const u32 stage = n % kLinkStages;
        mbarrier_arrive_expect(&shared.full[stage], piece.bytes);
        const u64 from = kPush ? own_of(piece) : remote_of(piece);
        bulk_load(shared.stages[stage], reinterpret_cast<const void*>(from), piece.bytes, &shared.full[stage]);
      }
      if (n >= kAhead && n - kAhead < mine) {
        const u32 m = n - kAhead;
        const LinkPiece piece = piece_of(m);
        const u32 stage = m % kLinkStages;
        mbarrier_wait(&shared.full[stage], m / kLinkStages % 2);
        const u64 to = kPush ? remote_of(piece) : own_of(piece);
        bulk_store(reinterpret_cast<void*>(to), shared.stages[stage], piece.bytes);
        tma_store_commit();
      }
    }
    tma_store_wait<0>();
  }
  __syncwarp();
  link_end(call, number);
}

}  // namespace counterpoint
