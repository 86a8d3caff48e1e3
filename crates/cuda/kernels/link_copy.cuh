// Ranges of rows between the memories of GPUs, by few multiprocessors: a group-cast.
//
// TMA moves pieces through shared memory, whichever side is remote, and one thread of each warp keeps it busy:
// what is on its way, not threads, is what fills a link.
#pragma once

#include "link_barrier.cuh"
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

// Entries of the list that a warp takes at a time.
constexpr u32 kLinkBatch = 4;

// Parts of the pieces whose arrival is signalled one after the other.
struct LinkParts {
  u32 count;
  u32 ends[kLinkParts];  // in the list of pieces
};

// Of each warp its own stages: what one warp waits for holds no other up.
template <u32 kWarps, u32 kStages, u32 kPieceBytes>
struct alignas(128) LinkCopyShared {
  u8 stages[kWarps][kStages][kPieceBytes];
  u64 full[kWarps][kStages];
  // Where each stage goes, and how much of it.
  u64 to[kWarps][kStages];
  u32 bytes[kWarps][kStages];
  u64 tensors[kLinkRanks * kLinkTensors];
};

// `kPush`: from this side to the other; else from there to here. `kAhead`: pieces that a warp loads ahead of what it stores; its
// other stages hold what is being stored. `phases`: LinkPhases.
//
// Long: one loop, in whose registers are what is loaded, stored and signalled.
template <bool kPush, u32 kWarps, u32 kStages, u32 kAhead, u32 kPieceBytes>
__device__ __forceinline__ void link_copy(const LinkCall& call, const LinkPiece* __restrict__ pieces, u32 count,
                                          u32 phases, const LinkParts& parts) {
  static_assert(kWarps == 1, "a block counts once for each part");
  // Stores that may go on when a part is signalled whose own stores are before them: waiting for all would empty the link.
  constexpr u32 kLater = 4;
  using Shared = LinkCopyShared<kWarps, kStages, kPieceBytes>;
  extern __shared__ __align__(128) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const u32 lane = threadIdx.x % 32;
  const u32 warp = uniform(threadIdx.x / 32);
  // A warp begins with two batches of the list and then takes the next one that nobody has: two multiprocessors that share a way to
  // the link get half of what others do, and a fixed part of the list would have all wait for them. What it takes it reads a batch
  // ahead: a piece would otherwise wait for its entry as long as for its bytes.
  const u32 own_warp = blockIdx.x * kWarps + warp;
  const u32 warps = gridDim.x * kWarps;
  const auto listed = [&](u64 batch) {
    LinkPiece piece = {};
    const u64 at = batch * kLinkBatch + lane;
    if (lane < kLinkBatch && at < count) piece = pieces[at];
    return piece;
  };
  u64 held_batch = own_warp;
  u64 next_batch = warps + own_warp;
  LinkPiece held = listed(held_batch);
  LinkPiece next = listed(next_batch);
  if (lane == 0) {
    for (u32 s = 0; s < kStages; ++s) mbarrier_init(&shared.full[warp][s], 1);
    fence_mbarrier_init();
  }
  const bool begins = (phases & kLinkBegins) != 0;
  u64 number = begins ? link_announce(call) : 0;
  const auto load = [&](u32 stage, u64 from, u32 bytes) {
    shared.bytes[warp][stage] = bytes;
    mbarrier_arrive_expect(&shared.full[warp][stage], bytes);
    bulk_load(shared.stages[warp][stage], reinterpret_cast<const void*>(from), bytes, &shared.full[warp][stage]);
  };
  // What is pushed first is loaded while the others are waited for.
  static_assert(!kPush || kAhead >= kLinkBatch, "nothing is stored before the second batch");
  u32 loaded = 0;
  if (kPush) {
#pragma unroll
    for (u32 e = 0; e < kLinkBatch; ++e) {
      const u64 own = __shfl_sync(0xffffffffu, held.own, e);
      const u32 bytes = __shfl_sync(0xffffffffu, held.bytes, e);
      const u32 tensor = __shfl_sync(0xffffffffu, u32(held.tensor), e);
      if (bytes == 0) continue;
      if (lane == 0) load(e, call.own[tensor] + own, bytes);
      ++loaded;
    }
  }
  if (begins) {
    number = link_await(call, number, shared.tensors) ? number : 0;
  } else {
    number = link_resume(call, shared.tensors);
  }
  if (number == 0) {
    // Nobody else gets this shared memory before what was loaded is there.
    for (u32 s = 0; s < loaded; ++s) mbarrier_wait(&shared.full[warp][s], 0);
    return;
  }
  __syncwarp();
  if (kPush && lane < loaded) {
    shared.to[warp][lane] = shared.tensors[held.rank * kLinkTensors + held.tensor] + held.remote;
  }
  __syncwarp();
  const auto store = [&](u32 m) {
    const u32 stage = m % kStages;
    mbarrier_wait(&shared.full[warp][stage], m / kStages % 2);
    bulk_store(reinterpret_cast<void*>(shared.to[warp][stage]), shared.stages[warp][stage], shared.bytes[warp][stage]);
    tma_store_commit();
  };
  // A short list has no third batch, and whoever asked for one would wait for the answer.
  const bool is_long = count > 2 * warps * kLinkBatch;
  u32 n = 0;  // pieces so far
  // Pieces are taken in the list's order, so with one behind a part's end this warp has had all of its pieces of that part.
  constexpr u32 kUnknown = ~0u;
  u32 part = 0;            // the next to be signalled
  u32 before = kUnknown;   // pieces of this warp that come before its end, at most
  bool more = true;
  for (u32 batch = 0; more; ++batch) {
    u64 taken = 0;
    if (batch != 0 && is_long && lane == 0) taken = add_relaxed(&call.state->taken, u64(1));
#pragma unroll
    for (u32 e = 0; e < kLinkBatch; ++e) {
      if (batch != 0 && is_long && e == kLinkBatch / 2) {
        next_batch = 2 * warps + __shfl_sync(0xffffffffu, taken, 0);
        next = listed(next_batch);
      }
      LinkPiece piece;
      piece.own = __shfl_sync(0xffffffffu, held.own, e);
      piece.remote = __shfl_sync(0xffffffffu, held.remote, e);
      piece.bytes = __shfl_sync(0xffffffffu, held.bytes, e);
      const u32 place = __shfl_sync(0xffffffffu, u32(held.rank) << 16 | held.tensor, e);
      if (piece.bytes == 0) {
        more = false;
        continue;
      }
      if (lane == 0) {
        // Its stage was stored from kStages pieces ago; younger stores may go on.
        if (n >= kStages) tma_store_wait_read<kStages - kAhead - 1>();
        if (!kPush || batch != 0) {
          const u32 tensor = place & 0xffffu;
          const u64 own = call.own[tensor] + piece.own;
          const u64 remote = shared.tensors[(place >> 16) * kLinkTensors + tensor] + piece.remote;
          const u32 stage = n % kStages;
          shared.to[warp][stage] = kPush ? remote : own;
          load(stage, kPush ? own : remote, piece.bytes);
        }
        const u64 at = held_batch * kLinkBatch + e;
        if (before == kUnknown && part < parts.count && at >= parts.ends[part]) before = n;
        if (n >= kAhead) {
          store(n - kAhead);
          while (before != kUnknown && n - kAhead + 1 >= before + kLater) {
            tma_store_wait<kLater>();
            link_deliver(call, part++);
            before = part < parts.count && at >= parts.ends[part] ? n : kUnknown;
          }
        }
      }
      ++n;
    }
    held = next;
    held_batch = next_batch;
    if (batch != 0 && !is_long) more = false;
  }
  if (lane == 0) {
    for (u32 m = n > kAhead ? n - kAhead : 0; m < n; ++m) store(m);
    tma_store_wait<0>();
    for (; part < parts.count; ++part) link_deliver(call, part);
  }
  __syncwarp();
  if (kPush) fence_system();
  if ((phases & kLinkEnds) != 0) link_end(call, number);
}

}  // namespace counterpoint
