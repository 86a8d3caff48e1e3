// A matrix product whose first operand's rows come from other ranks, each rank on a GPU of its own: an all-gather and a product,
// tile by tile.
//
// A warp of every CTA that has nothing to do with the product copies this rank's rows into the other ranks' memory, a block of
// rows after the other, to one rank at a time: in step s to the one s before it, so that every rank receives from one at a time
// too. Tiles begin with the rank's own rows and go on with those of the ranks after it, in the order in which they come; who
// loads a tile waits until the blocks that it needs have been stored by all CTAs of their owner.
//
// Ranks wait as link_barrier.cuh says: a rank's memory is written once it has announced the call. When its kernel ends all that
// it sent has been stored, and all that it was sent has been used.
#pragma once

#include "gemm/gemm.cuh"
#include "link_barrier.cuh"
#include "ptx/bulk.cuh"

namespace counterpoint {

// One call of one rank, in addition to its product, of whose sources the first is the copy of A that others write into, and the second
// this rank's rows of it. Shared with the host.
struct GemmGathering {
  LinkCall link;
  const u8* own;                           // this rank's rows of A
  u64 gathered[kGemmDestinations];         // where this rank's rows go in the memory of every rank
  const u64* arrivals;                     // [ranks, blocks]: CTAs of a rank that have stored their piece, over all calls
  u64 peer_arrivals[kGemmDestinations];    // this rank's place in those of every rank
  u64 own_bytes;
  u64 block_bytes;
  u32 block_rows;
  u32 blocks;    // of a rank's rows
  u32 own_rows;  // of every rank
  u32 rank;
  u32 ranks;
  u32 pieces;      // in which all rows leave at once, as one block, or 0
  u32 piece_bytes;
  u32 sends_to;    // ranks, a bit each: also this one where tiles have rows of several
  u32 one_by_one;     // whether rows go to one rank after the other, since tiles begin with those that come first
  u32 copy_rows;   // of each of two copies of A that follow each other and are written alternately, or 0 where there is one
  u64 copy_bytes;
};

// The kernel's parameter. Shared with the host.
struct GemmGatherArguments {
  GemmArguments gemm;
  GemmGathering gathering;
};

template <typename C>
struct GemmFromRanks {
  // What is on its way through the registers of the warp that copies is what keeps the links busy.
  static constexpr u32 kProducerRegisters = 56;
  static constexpr u32 kConsumerRegisters = 224;
  static constexpr u32 kLoaders = 1;
  static constexpr u32 kLoadingThreads = 1;
  static constexpr bool kAwaitsRows = true;
  static constexpr bool kSumsParts = true;
  using Held = GemmNothingHeld<C>;
  const GemmArguments& arguments;
  const GemmGathering& gathering;

  __device__ __forceinline__ u64 call() const { return gathering.link.state->calls + 1; }

  // Blocks of rows, those for one rank after those for another, go to groups of CTAs one by one: a fence for the whole system waits
  // for those of all multiprocessors (about 0.2 us each), and every CTA of a group makes one for each block.
  __device__ __forceinline__ static u32 groups() { return min(4u, gridDim.x); }
  // CTAs that copy the block with that number among all that a rank sends.
  __device__ __forceinline__ u32 copying(u32 number) const {
    if (gathering.pieces != 0) return gathering.pieces;
    return (gridDim.x - number % groups() + groups() - 1) / groups();
  }

  // One warp of every CTA.
  __device__ __forceinline__ void begin(GemmShared<C>& shared) const {
    const u32 lane = threadIdx.x % 32;
    const u64 number = call();
    if (gathering.pieces != 0) {
      send_pieces(shared, lane, number);
      if (lane == 0) mbarrier_arrive(&shared.own_sent);
      return;
    }
    if (lane == 0) mbarrier_arrive(&shared.own_sent);
    if (blockIdx.x == 0 && lane < gathering.ranks && lane != gathering.rank) {
      store_release_system(&gathering.link.slots[lane]->announced, number);
    }
    send_blocks(lane, number);
  }

  // Few rows: TMA brings a piece of them into shared memory, where no result is yet, and from there to every rank, a
  // lane to each. Nobody waits for the others to begin: calls write two copies alternately, and a rank that has had the rows of the
  // last call from another, as each kernel waits for, knows that other to be through with the call before it.
  __device__ __forceinline__ void send_pieces(GemmShared<C>& shared, u32 lane, u64 number) const {
    const u32 ranks = gathering.ranks;
    const u32 stride = max(1u, gridDim.x / gathering.pieces), sending = (gridDim.x + stride - 1) / stride;
    if (blockIdx.x % stride != 0) return;
    u8* staging = shared.staging[0][0];
    // In step s to the one s before it; to itself last.
    const u32 peer = (gathering.rank + ranks - 1 - lane % ranks) % ranks;
    const bool sends = lane < ranks && (gathering.sends_to >> peer & 1) != 0;
    u32 loaded = 0;
    for (u32 piece = blockIdx.x / stride; piece < gathering.pieces; piece += sending) {
      const u64 first = u64(piece) * gathering.piece_bytes;
      const u32 bytes = u32(min(u64(gathering.piece_bytes), gathering.own_bytes - first));
      if (lane == 0) {
        mbarrier_arrive_expect(&shared.own_loaded, bytes);
        bulk_load(staging, gathering.own + first, bytes, &shared.own_loaded);
      }
      mbarrier_wait(&shared.own_loaded, loaded++ & 1);
      const u32 own_step = !sends ? ranks : gathering.one_by_one != 0 ? lane : 0;
#pragma unroll 1
      for (u32 step = 0; step < ranks; ++step) {
        if (step == own_step) {
          const u64 to = gathering.gathered[peer] + (number & 1) * gathering.copy_bytes + first;
          bulk_store(reinterpret_cast<u8*>(to), staging, bytes);
          tma_store_commit();
          // Complete, not only read, before its receiver hears of it; and signalled before the next one's piece is on its way, for
          // which the fence would wait.
          tma_store_wait<0>();
          fence_async_proxy_all();
          add_release_system(reinterpret_cast<u64*>(gathering.peer_arrivals[peer]), u64(1));
        }
        __syncwarp();
      }
    }
  }

  // One warp of every CTA.
  __device__ __forceinline__ void send_blocks(u32 lane, u64 number) const {
    const LinkCall& link = gathering.link;
    u32 began = 0;  // ranks whose memory may be written, a bit each
#pragma unroll 1
    for (u32 at = blockIdx.x % groups(); at < (gathering.ranks - 1) * gathering.blocks; at += groups()) {
      const u32 block = at % gathering.blocks;
      const u32 peer = (gathering.rank + gathering.ranks - 1 - at / gathering.blocks) % gathering.ranks;
      if ((began >> peer & 1) == 0) {
        u32 came = 0;
        if (lane == 0) came = link_wait(link, &link.mailbox[peer].announced, number, peer, kLinkBegin);
        __syncwarp();
        if (uniform(came) == 0) return;
        began |= 1u << peer;
      }
      const u64 begin = block * gathering.block_bytes;
      const u64 end = min(begin + gathering.block_bytes, gathering.own_bytes);
      copy_piece(gathering.gathered[peer], begin, end, blockIdx.x / groups(), copying(at), lane);
      // By every lane, and before the count.
      fence_system();
      __syncwarp();
      if (lane == 0) add_release_system(reinterpret_cast<u64*>(gathering.peer_arrivals[peer]) + block, u64(1));
    }
  }

  // One of `pieces` of what lies between `begin` and `end`.
  __device__ __forceinline__ void copy_piece(u64 target, u64 begin, u64 end, u32 piece, u32 pieces, u32 lane) const {
    constexpr u32 kAhead = 6;
    constexpr u32 kLine = 32 * 16;  // what the warp copies at once
    const u32 bytes = u32(end - begin), lines = (bytes + kLine - 1) / kLine;
    // Of a few megabytes, so that 32 bits hold the products.
    const u32 first = lines * piece / pieces, last = lines * (piece + 1) / pieces;
    u32 at = first * kLine + lane * 16;
    const u8* from = gathering.own + begin + at;
    u8* to = reinterpret_cast<u8*>(target) + begin + at;
    u32 left = last - first;
#pragma unroll 1
    for (; left > kAhead; left -= kAhead) {
      uint4 words[kAhead];
#pragma unroll
      for (u32 i = 0; i < kAhead; ++i) words[i] = __ldcs(reinterpret_cast<const uint4*>(from + i * kLine));
#pragma unroll
      for (u32 i = 0; i < kAhead; ++i) *reinterpret_cast<uint4*>(to + i * kLine) = words[i];
      from += kAhead * kLine;
      to += kAhead * kLine;
      at += kAhead * kLine;
    }
    // The last line of a block may be short.
#pragma unroll 1
    for (; left > 0; --left) {
      if (at < bytes) *reinterpret_cast<uint4*>(to) = __ldcs(reinterpret_cast<const uint4*>(from));
      from += kLine;
      to += kLine;
      at += kLine;
    }
  }

  // The thread that loads, before a tile: its rows have come, of all ranks that they are of.
  __device__ __forceinline__ void await_rows(const GemmTile& of) const {
    if (of.source != 0) return;
    const u32 own_rows = gathering.own_rows, end = of.source_row + of.rows;
    for (u32 row = of.source_row; row < end;) {
      const u32 owner = row / own_rows, first = owner * own_rows;
      const u32 last = (min(end, first + own_rows) - 1 - first) / gathering.block_rows;
      // What its owner sends before, to others.
      const u32 before = (owner + gathering.ranks - gathering.rank - 1) % gathering.ranks * gathering.blocks;
      for (u32 block = (row - first) / gathering.block_rows; block <= last; ++block) {
        // What comes wrong when the wait gives up, nobody looks at.
        link_wait(gathering.link, gathering.arrivals + owner * gathering.blocks + block, call() * copying(before + block),
                  owner, kLinkSend);
      }
      row = first + own_rows;
    }
    // What ordinary stores of another GPU wrote is read by TMA.
    fence_async_proxy_all();
  }

  // Rows before the copy that this call's are in.
  __device__ __forceinline__ u32 copy_row(const GemmTile& of) const {
    return of.source == 0 && (call() & 1) != 0 ? gathering.copy_rows : 0;
  }

  __device__ __forceinline__ void store(GemmShared<C>& shared, u32 group) const {
    gemm_store<C>(arguments, shared, group);
  }
  template <typename Consumer>
  __device__ __forceinline__ void tile(Consumer& consumer, GemmStaging<C>& staging, Held&, const GemmTile& of,
                                       const GemmScheduler&) const {
    mbarrier_wait(&staging.shared.own_sent, 0);
    consumer.template stage_tile<false>(staging, of);
  }
  template <typename Consumer>
  __device__ __forceinline__ void no_tile(Consumer&, const GemmTile&) const {}

  // One thread of every CTA, when all of its cluster are through.
  __device__ __forceinline__ void end() const {
    const LinkCall& link = gathering.link;
    const u64 number = call();
    if (add_acquire_release(&link.state->arrived, 1) + 1 != gridDim.x) return;
    link.state->arrived = 0;
    link.state->calls = number;
  }
};

template <typename C>
__device__ __forceinline__ void gemm_gather(const GemmGatherArguments& arguments) {
  gemm<C>(arguments.gemm, GemmFromRanks<C>{arguments.gemm, arguments.gathering});
}

}  // namespace counterpoint
