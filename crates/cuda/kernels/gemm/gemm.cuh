// D (+)= A B (+ bias) on Hopper: persistent CTAs in clusters, operands by the copy engine, products by warpgroups.
//
// Warps: one loads (gemm_work.cuh), two store (gemm_store.cuh), and two warpgroups multiply, each 64 rows of a tile. The
// warpgroups meet nowhere but at the blocks of operands that both read.
//
// The products of an element are added in the order of k whatever the tile's shape, the order of tiles and the end of a result
// are; only splitting k changes bits, and parts are added in their order.
#pragma once

#include "gemm/gemm_store.cuh"

namespace counterpoint {

// What becomes of tiles that need no other rank: they are stored where the maps say.
template <typename C>
struct GemmToMemory {
  // Of a thread that loads or stores, and of one that multiplies.
  static constexpr u32 kProducerRegisters = 40;
  static constexpr u32 kConsumerRegisters = 232;
  static constexpr u32 kLoadingThreads = 1;
  static constexpr bool kAwaitsRows = false;
  static constexpr bool kSumsParts = true;  // takes products whose k is in parts
  using Held = GemmNothingHeld<C>;
  const GemmArguments& arguments;

  __device__ __forceinline__ void begin(GemmShared<C>&) const {}
  __device__ __forceinline__ void store(GemmShared<C>& shared, u32 group) const {
    gemm_store<C>(arguments, shared, group);
  }
  template <typename Consumer>
  __device__ __forceinline__ void tile(Consumer& consumer, GemmStaging<C>& staging, Held&, const GemmRowTile& of, u32 column,
                                       const GemmWalk& walk) const {
    const auto& acc = consumer.acc;
    if (arguments.wide) {
      staging.template tile<true>(acc, of, column, walk.unit.group);
    } else {
      staging.template tile<false>(acc, of, column, walk.unit.group);
    }
  }
  template <typename Consumer>
  __device__ __forceinline__ void no_tile(Consumer&, const GemmRowTile&) const {}
  __device__ __forceinline__ void end() const {}
};

// One consumer warpgroup.
template <typename C, typename Ends>
struct GemmConsumer {
  const GemmArguments& arguments;
  GemmShared<C>& shared;
  const Ends& ends;
  const u32 group = uniform(threadIdx.x / 128) - 1;
  const u32 thread = threadIdx.x % 128;
  const u32 warp = thread / 32;
  const u32 lane = thread % 32;
  const u32 pair = cluster_rank() / 2 * 2;  // its first CTA
  GemmRing<C> ring;
  float acc[C::kTileN / 2];

  // This warp has read a stage: the loads of both CTAs of the pair wait for that.
  __device__ __forceinline__ void release(u32 of) {
    if (lane < 2) peer_arrive(peer_address(shared_address(&shared.empty[of]), pair + lane));
  }

  template <bool kFirst>
  __device__ __forceinline__ void multiply_block() {
    const u32 stage = C::kHands > 1 ? uniform(ring.stage) : ring.stage;
    mbarrier_wait(&shared.full[stage], ring.round & 1);
    const u64 a = wgmma_descriptor(shared.a[stage] + group * 64 * kGemmRowBytes);
    const u64 b = wgmma_descriptor(shared.b[stage], C::kMajorB == Major::kMN ? kGemmBlockK * kGemmRowBytes : 16);
    constexpr u32 kStepA = C::kMajorA == Major::kK ? 32 : 16 * kGemmRowBytes;
    constexpr u32 kStepB = C::kMajorB == Major::kK ? 32 : 16 * kGemmRowBytes;
    wgmma_fence();
#pragma unroll
    for (u32 kk = 0; kk < kGemmBlockK / 16; ++kk) {
      if (kFirst && kk == 0) {
        Wgmma<C::kTileN>::template ss_first<C::kMajorA, C::kMajorB>(acc, a, b);
      } else {
        Wgmma<C::kTileN>::template ss<C::kMajorA, C::kMajorB>(acc, wgmma_advance(a, kk * kStepA),
                                                              wgmma_advance(b, kk * kStepB), 1);
      }
    }
    wgmma_commit();
  }

  // acc = the product over `count` blocks, at least one. `stop` is called kStops times meanwhile.
  template <u32 kStops, typename Stop>
  __device__ __forceinline__ void multiply(u32 count, Stop stop) {
    multiply_block<true>();
    u32 before = ring.stage;
    ring.next();
    u32 i = 1;
#pragma unroll
    for (u32 s = 0; s <= kStops; ++s) {
      const u32 end = s == kStops ? count : count * (s + 1) / (kStops + 1);
#pragma unroll 1
      for (; i < end; ++i) {
        multiply_block<false>();
        wgmma_wait<1>();
        release(before);
        before = ring.stage;
        ring.next();
      }
      if (s != kStops) stop(s);
    }
    wgmma_wait<0>();
    pin(acc);
    release(before);
  }

  // Exchanges pieces of a tile with the CTAs that computed its other parts; those that this one stores become sums. `number`
  // counts tiles.
  __device__ __forceinline__ void sum_parts(const GemmParts<C>& parts, u32 owned, u32 number) {
    constexpr u32 kChunks = GemmParts<C>::kChunks, kFloats = GemmParts<C>::kFloats;
    GemmRing<C> first = ring;
    // Who sends nothing must not wait: nobody would wait for it before there is room again.
    if (owned != (1u << kChunks) - 1) mbarrier_wait_cluster(&shared.room, number & 1);
    auto piece = parts.first_piece(group);
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c, piece.next()) {
      if (piece.owner != parts.part) parts.send(shared, first, piece, thread, acc + c * kFloats);
    }
    for (u32 e = parts.stages(); e > 0; --e) {
      mbarrier_wait_cluster(&shared.full[ring.stage], ring.round & 1);
      ring.next();
    }
    piece = parts.first_piece(group);
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c, piece.next()) {
      if (piece.owner == parts.part) parts.sum(shared, first, piece, thread, acc + c * kFloats);
    }
    // It has been read by all lanes before two of them say so, and the copy engine writes there next.
    fence_async_proxy();
    __syncwarp();
    for (u32 e = parts.stages(); e > 0; --e) {
      release(first.stage);
      first.next();
    }
  }

  // Where the sums of the first of two parts are kept: this CTA's, or those of this one of a unit's.
  __device__ __forceinline__ float4* kept(const GemmWalk& walk) const {
    const u32 cta = C::kHands > 1 ? walk.keeper() : blockIdx.x;
    return arguments.kept + u64(cta * kGemmConsumers + group) * (C::kTileN / 8) * 128 + thread;
  }
  __device__ __forceinline__ void keep(const GemmWalk& walk) const {
    float4* to = kept(walk);
#pragma unroll
    for (u32 i = 0; i < C::kTileN / 8; ++i) {
      __stcg(to + i * 128, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
  }
  // What this warp has kept, to the CTA that computes the other part.
  __device__ __forceinline__ void hand_over(const GemmWalk& walk) const {
    __syncwarp();
    if (lane == 0) add_release(arguments.handed + walk.keeper(), 1);
  }
  // What another CTA hands over takes its turn in the ring, behind the operands: the thread that loads waits for it (gemm_parts.cuh).
  __device__ __forceinline__ void await_handed() {
    mbarrier_wait(&shared.full[ring.stage], ring.round & 1);
    release(ring.stage);
    ring.next();
  }
  __device__ __forceinline__ void add_kept(const GemmWalk& walk) {
    const float4* from = kept(walk);
    // Not all loads at once: there are no registers for them.
    constexpr u32 kAtOnce = C::kTileN / 8 < 8 ? C::kTileN / 8 : 4;
    static_assert(C::kTileN / 8 % kAtOnce == 0, "whole batches");
#pragma unroll
    for (u32 i = 0; i < C::kTileN / 8; i += kAtOnce) {
      float4 fours[kAtOnce];
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) fours[j] = __ldcg(from + (i + j) * 128);
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) GemmParts<C>::add_four(acc + 4 * (i + j), fours[j]);
    }
  }

  __device__ __forceinline__ void add_bias(u32 first_column) {
    const u32 column = first_column + 2 * (lane % 4);
#pragma unroll
    for (u32 j = 0; j < C::kTileN / 8; ++j) {
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        const u32 of = column + 8 * j + e;
        const float bias = of < arguments.n ? to_float(__ldg(arguments.bias + of)) : 0.0f;
        acc[4 * j + e] += bias;
        acc[4 * j + 2 + e] += bias;
      }
    }
  }

  __device__ __forceinline__ void run() {
    GemmWalk walk{arguments};
    const GemmParts<C> parts{arguments.splits, walk.part, walk.rank};
    GemmStaging<C> staging{arguments, shared, group, warp, lane, parts.owned(group)};
    typename Ends::Held held;
    for (u32 number = 0; walk.more(); walk.advance(), ++number) {
      walk.look_up();
      const GemmRowTile tile = walk.row_tile();
      const u32 blocks = (walk.k_end() - walk.k_begin()) / arguments.turns;
      for (u32 turn = 1;; ++turn) {
        multiply<Ends::Held::kCount>(blocks, [&](u32 chunk) { held.stage(staging, chunk); });
        const bool hands_over = C::kHands > 1 && walk.hands_over();
        if (turn == arguments.turns && !hands_over) break;
        keep(walk);
        if (hands_over) break;
      }
      if (C::kHands > 1 && walk.hands_over()) {
        hand_over(walk);
        continue;
      }
      if (C::kHands > 1) await_handed();
      if (C::kHands > 1 || arguments.turns > 1) add_kept(walk);
      const u32 column = walk.template column<C::kTileN>();
      if constexpr (Ends::kSumsParts) {
        if (arguments.splits > 1) sum_parts(parts, staging.owned, number);
      }
      // A unit at the edge may have a tile without an element.
      if (tile.rows == 0 || column >= arguments.n) {
        ends.no_tile(*this, tile);
        continue;
      }
      if (arguments.bias != nullptr) add_bias(column);
      ends.tile(*this, staging, held, tile, column, walk);
    }
#pragma unroll
    for (u32 chunk = 0; chunk != Ends::Held::kCount; ++chunk) held.stage(staging, chunk);
    staging.finish();
  }
};

// `ends` is what becomes of tiles: who stores them, and what is done before the first and after the last.
template <typename C, typename Ends>
__device__ __forceinline__ void gemm(const GemmArguments& arguments, const Ends& ends) {
  extern __shared__ u8 dynamic[];
  let_dependents_start();
  // Swizzled rows must begin at multiples of 1024 bytes. Both CTAs have the same skew.
  const u32 skew = (1024 - shared_address(dynamic) % 1024) % 1024;
  auto& shared = *reinterpret_cast<GemmShared<C>*>(dynamic + skew);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < C::kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], 2 * 4 * kGemmConsumers);
    }
    for (u32 g = 0; g < kGemmConsumers; ++g) {
      shared.spreads[g].stored = shared.spreads[g].spread = 0;
      for (u32 i = 0; i < 2; ++i) {
        mbarrier_init(&shared.chunk_full[g][i], 4);
        mbarrier_init(&shared.chunk_empty[g][i], 1);
      }
    }
    mbarrier_init(&shared.room, max(arguments.splits, 2u) - 1);
    mbarrier_init(&shared.own_loaded, 1);
    mbarrier_init(&shared.own_sent, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  wait_for_previous();
  if (uniform(threadIdx.x / 128) == 0) {
    registers_decrease<Ends::kProducerRegisters>();
    if (threadIdx.x < Ends::kLoadingThreads) gemm_load<C>(arguments, shared, ends);
    if (threadIdx.x == 32) ends.store(shared, 0);
    if (threadIdx.x == 64) ends.store(shared, 1);
    if (uniform(threadIdx.x / 32) == 3) ends.begin(shared);
  } else {
    registers_increase<Ends::kConsumerRegisters>();
    GemmConsumer<C, Ends> consumer{arguments, shared, ends};
    consumer.run();
  }
  // A CTA's barriers outlive the other's last arrival at them.
  cluster_sync();
  if (threadIdx.x == 0) ends.end();
}

}  // namespace counterpoint
