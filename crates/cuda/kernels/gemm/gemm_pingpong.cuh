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

  // The ring behind a tile of the other warpgroup.
  __device__ __forceinline__ void skip_tile() {
    const u32 stage = ring.stage + arguments.k_blocks;
    ring.stage = stage % C::kStages;
    ring.round += stage / C::kStages;
  }

  __device__ __forceinline__ void run() {
    GemmWalk walk{arguments};
    GemmStaging<C> staging{arguments, shared, group, warp, lane, (1u << (C::kTileN / C::kChunkColumns)) - 1};
    typename Ends::Held held;
    if (group == 1) {
      walk.advance();
      skip_tile();
    }
    for (u32 number = 0; walk.more(); ++number) {
      const GemmTile tile = walk.look_up();
      // Whoever looked at a stage a round too early would take the last round's completion for its own.
      mbarrier_wait(&shared.turns[group], (number & 1) ^ (group ^ 1));
      this->template multiply<0>(arguments.k_blocks, [](u32) {}, [&] {
        if (lane == 0) mbarrier_arrive(&shared.turns[group ^ 1]);
      });
      // A unit at the edge may have a tile without an element.
      if (tile.rows != 0 && tile.column < arguments.n) {
        if (arguments.bias != nullptr) this->add_bias(arguments, tile.column);
        ends.tile(*this, staging, held, tile, walk);
      }
      walk.advance();
      walk.advance();
      skip_tile();
    }
    staging.finish();
  }
};

}  // namespace counterpoint
