// The warpgroups take tiles in turn, all 128 rows of each: while one stores its tile the other multiplies the next, however long
// storing takes. (CUTLASS calls that its ping-pong schedule.) A tile's sums must fit the registers of one warpgroup.
#pragma once

#include "gemm/gemm_multiply.cuh"

namespace counterpoint {

template <typename C, typename Ends>
struct GemmPingpong : GemmMultiplier<C> {
  static_assert(Ends::Held::kCount == 0, "nothing is left of a tile: its warpgroup has time to store it");
  using Base = GemmMultiplier<C>;
  using Base::group, Base::lane, Base::ring, Base::shared, Base::warp;
  const GemmArguments& arguments;
  const Ends& ends;

  __device__ __forceinline__ GemmPingpong(const GemmArguments& of, GemmShared<C>& with, const Ends& at)
      : Base{with}, arguments(of), ends(at) {}

  // The ring behind the tile of the other warpgroup that `walk` is at.
  __device__ __forceinline__ void skip_tile(const GemmWalk& walk) {
    u32 blocks = arguments.k_blocks;
    if constexpr (C::kGrouped) blocks = walk.more() ? walk.look_up<true>().blocks : 0;
    const u32 stage = ring.stage + blocks;
    ring.stage = stage % C::kStages;
    ring.round += stage / C::kStages;
  }

  __device__ __forceinline__ void run() {
    GemmWalk walk{arguments};
    GemmStaging<C> staging{arguments, shared, group, warp, lane, (1u << (C::kTileN / C::kChunkColumns)) - 1};
    typename Ends::Held held;
    if (group == 1) {
      skip_tile(walk);
      walk.advance();
    }
    for (u32 number = 0; walk.more(); ++number) {
      const GemmTile tile = walk.look_up<C::kGrouped>();
      // Whoever looked at a stage a round too early would take the last round's completion for its own.
      mbarrier_wait(&shared.turns[group], (number & 1) ^ (group ^ 1));
      this->template multiply<0>(C::kGrouped ? tile.blocks : arguments.k_blocks, [](u32) {}, [&] {
        if (lane == 0) mbarrier_arrive(&shared.turns[group ^ 1]);
      });
      // A unit at the edge may have a tile without an element.
      if (tile.rows != 0 && tile.column < arguments.n) {
        if (arguments.bias != nullptr) this->add_bias(arguments, tile.column);
        ends.tile(*this, staging, held, tile, walk);
      }
      walk.advance();
      skip_tile(walk);
      walk.advance();
    }
    staging.finish();
  }
};

}  // namespace counterpoint
