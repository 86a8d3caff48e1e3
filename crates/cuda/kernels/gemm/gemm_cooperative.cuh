// Both warpgroups compute every tile, 64 of its rows each. They synchronise nowhere but at the blocks of operands that both read, and so one
// stores while the other multiplies, for as long as there are stages. k may be in parts.
#pragma once

#include "gemm/gemm_multiply.cuh"

namespace counterpoint {

template <typename C, typename Ends>
struct GemmCooperative : GemmMultiplier<C> {
  using Base = GemmMultiplier<C>;
  using Base::acc, Base::group, Base::lane, Base::ring, Base::shared, Base::thread, Base::warp, Base::release;
  const GemmArguments& arguments;
  const Ends& ends;

  __device__ __forceinline__ GemmCooperative(const GemmArguments& of, GemmShared<C>& with, const Ends& at)
      : Base{with}, arguments(of), ends(at) {}

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
      if (piece.owner != parts.part) parts.send(shared, first, piece, thread, acc[0] + c * kFloats);
    }
    for (u32 e = parts.stages(); e > 0; --e) {
      mbarrier_wait_cluster(&shared.full[ring.stage], ring.round & 1);
      ring.next();
    }
    piece = parts.first_piece(group);
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c, piece.next()) {
      if (piece.owner == parts.part) parts.sum(shared, first, piece, thread, acc[0] + c * kFloats);
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
      __stcg(to + i * 128, make_float4(acc[0][4 * i], acc[0][4 * i + 1], acc[0][4 * i + 2], acc[0][4 * i + 3]));
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
    constexpr u32 kAtOnce = C::kTileN % 32 == 0 ? 4 : 2;
#pragma unroll
    for (u32 i = 0; i < C::kTileN / 8; i += kAtOnce) {
      float4 fours[kAtOnce];
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) fours[j] = __ldcg(from + (i + j) * 128);
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) GemmParts<C>::add_four(acc[0] + 4 * (i + j), fours[j]);
    }
  }

  // A tile's blocks of k, of which this warpgroup has no rows: the other one has the matrix unit to itself.
  __device__ __forceinline__ void pass_blocks(u32 count) {
#pragma unroll 1
    for (; count > 0; --count) {
      mbarrier_wait(&shared.full[ring.stage], ring.round & 1);
      release(ring.stage);
      ring.next();
    }
  }

  // Tiles of several problems, each with all of its k.
  __device__ __forceinline__ void run_problems() {
    GemmStaging<C> staging{arguments, shared, group, warp, lane, (1u << GemmParts<C>::kChunks) - 1};
    typename Ends::Held held;
    for (GemmWalk walk{arguments}; walk.more(); walk.advance()) {
      const GemmTile tile = walk.look_up<true>();
      if (tile.rows <= this->first_row()) {
        pass_blocks(tile.blocks);
        continue;
      }
      this->template multiply<0>(tile.blocks, [](u32) {}, [] {});
      if (tile.column < arguments.n) ends.tile(*this, staging, held, tile, walk);
    }
    staging.finish();
  }

  __device__ __forceinline__ void run() {
    if constexpr (C::kGrouped) return run_problems();
    GemmWalk walk{arguments};
    const GemmParts<C> parts{arguments.splits, walk.part, walk.rank};
    GemmStaging<C> staging{arguments, shared, group, warp, lane, parts.owned(group)};
    typename Ends::Held held;
    for (u32 number = 0; walk.more(); walk.advance(), ++number) {
      const GemmTile tile = walk.look_up();
      const u32 blocks = (walk.k_end() - walk.k_begin()) / arguments.turns;
      for (u32 turn = 1;; ++turn) {
        this->template multiply<Ends::Held::kCount>(blocks, [&](u32 chunk) { held.stage(staging, chunk); }, [] {});
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
      if constexpr (Ends::kSumsParts) {
        if (arguments.splits > 1) sum_parts(parts, staging.owned, number);
      }
      // A unit at the edge may have a tile without an element.
      if (tile.rows == 0 || tile.column >= arguments.n) {
        ends.no_tile(*this, tile);
        continue;
      }
      if (arguments.bias != nullptr) this->add_bias(arguments, tile.column);
      ends.tile(*this, staging, held, tile, walk);
    }
#pragma unroll
    for (u32 chunk = 0; chunk != Ends::Held::kCount; ++chunk) held.stage(staging, chunk);
    staging.finish();
  }
};

}  // namespace counterpoint
