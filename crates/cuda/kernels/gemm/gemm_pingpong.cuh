// The warpgroups alternate tiles, all 128 rows of each: while one stores its tile the other multiplies the next, however long
// storing takes. (CUTLASS calls that its ping-pong schedule.) A tile's sums must fit the registers of one warpgroup.
#pragma once

#include "gemm/gemm_multiply.cuh"

namespace counterpoint {

template <typename C, typename Epilogue>
struct GemmPingpong : GemmMultiplier<C> {
  static_assert(Epilogue::Held::kCount == 0, "nothing is left of a tile: its warpgroup has time to store it");
  using Base = GemmMultiplier<C>;
  using Base::group, Base::lane, Base::pipeline, Base::shared, Base::warp;
  const GemmArguments& arguments;
  const Epilogue& epilogue;

  __device__ __forceinline__ GemmPingpong(const GemmArguments& of, GemmShared<C>& with, const Epilogue& at)
      : Base{with}, arguments(of), epilogue(at) {}

  // The pipeline behind the tile of the other warpgroup that `scheduler` is at.
  __device__ __forceinline__ void skip_tile(const GemmScheduler& scheduler) {
    u32 blocks = arguments.k_blocks;
    if constexpr (C::kGrouped) blocks = scheduler.more() ? scheduler.look_up<true>().blocks : 0;
    const u32 stage = pipeline.stage + blocks;
    pipeline.stage = stage % C::kStages;
    pipeline.phase += stage / C::kStages;
  }

  __device__ __forceinline__ void run() {
    GemmScheduler scheduler{arguments};
    GemmStaging<C> staging{arguments, shared, group, warp, lane, (1u << (C::kTileN / C::kChunkColumns)) - 1};
    typename Epilogue::Held held;
    if (group == 1) {
      skip_tile(scheduler);
      scheduler.advance();
    }
    for (u32 number = 0; scheduler.more(); ++number) {
      const GemmTile tile = scheduler.look_up<C::kGrouped>();
      // Whoever looked at a stage a phase too early would take the last phase's completion for its own.
      mbarrier_wait(&shared.order[group], (number & 1) ^ (group ^ 1));
      this->template multiply<0>(C::kGrouped ? tile.blocks : arguments.k_blocks, [](u32) {}, [&] {
        if (lane == 0) mbarrier_arrive(&shared.order[group ^ 1]);
      });
      // A unit at the edge may have a tile without an element.
      if (tile.rows != 0 && tile.column < arguments.n) {
        if (arguments.bias != nullptr) this->add_bias(arguments, tile.column);
        epilogue.tile(*this, staging, held, tile, scheduler);
      }
      scheduler.advance();
      skip_tile(scheduler);
      scheduler.advance();
    }
    staging.finish();
  }
};

}  // namespace counterpoint
