// D (+)= A B (+ bias) on Hopper: persistent CTAs in clusters, operands by TMA, products by warpgroups.
//
// Warps: one or two load (gemm_work.cuh), two store (gemm_store.cuh), and two warpgroups multiply, together (gemm_cooperative.cuh) or alternately
// (gemm_pingpong.cuh).
//
// The products of an element are added in the order of k whatever the tile's shape, the order of tiles and the end of a result
// are; only splitting k changes bits, and parts are added in their order.
#pragma once

#include "gemm/gemm_cooperative.cuh"
#include "gemm/gemm_pingpong.cuh"

namespace counterpoint {

// What becomes of tiles that need no other rank: they are stored where the maps say.
template <typename C>
struct GemmToMemory {
  // Of a thread that loads or stores, and of one that multiplies.
  static constexpr u32 kProducerRegisters = 40;
  static constexpr u32 kConsumerRegisters = 232;
  static constexpr u32 kLoaders = 2;  // one for each operand: no warp has anything else to begin with
  static constexpr u32 kLoadingThreads = 1;
  static constexpr bool kAwaitsRows = false;
  static constexpr bool kSumsParts = true;  // takes products whose k is in parts
  using Held = GemmNothingHeld<C>;
  const GemmArguments& arguments;

  __device__ __forceinline__ void store(GemmShared<C>& shared, u32 group) const {
    gemm_store<C>(arguments, shared, group);
  }
  template <typename Consumer>
  __device__ __forceinline__ void tile(Consumer& consumer, GemmStaging<C>& staging, Held&, const GemmTile& of,
                                       const GemmScheduler&) const {
    if (arguments.wide) {
      consumer.template stage_tile<true>(staging, of);
    } else {
      consumer.template stage_tile<false>(staging, of);
    }
  }
  template <typename Consumer>
  __device__ __forceinline__ void no_tile(Consumer&, const GemmTile&) const {}
  __device__ __forceinline__ void end() const {}
};

// `epilogue` is what becomes of tiles: who stores them, and what is done before the first and after the last.
template <typename C, typename Epilogue>
__device__ __forceinline__ void gemm(const GemmArguments& arguments, const Epilogue& epilogue) {
  extern __shared__ u8 dynamic[];
  let_dependents_start();
  // What the first load needs is on its way while CTAs wait for each other. No kernel before this one has written it.
  const GemmScheduler scheduler{arguments};
  GemmTile first = {};
  if (uniform(threadIdx.x / 128) == 0) {
    if (scheduler.more()) first = scheduler.look_up<C::kGrouped>();
    tma_prefetch_map(&arguments.a_maps[0]);
    tma_prefetch_map(&arguments.b_map);
  }
  // Swizzled rows must begin at multiples of 1024 bytes. Both CTAs have the same skew.
  const u32 skew = (1024 - shared_address(dynamic) % 1024) % 1024;
  auto& shared = *reinterpret_cast<GemmShared<C>*>(dynamic + skew);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < C::kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], 2 * 4 * kGemmConsumers / C::kHalves);
    }
    for (u32 g = 0; g < kGemmConsumers; ++g) {
      shared.spreads[g].stored = shared.spreads[g].spread = 0;
      for (u32 i = 0; i < 2; ++i) {
        mbarrier_init(&shared.chunk_full[g][i], 4);
        mbarrier_init(&shared.chunk_empty[g][i], 1);
      }
      mbarrier_init(&shared.order[g], 4);
    }
    mbarrier_init(&shared.room, max(arguments.splits, 2u) - 1);
    mbarrier_init(&shared.own_loaded, 1);
    mbarrier_init(&shared.own_sent, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  wait_for_previous();
  if (uniform(threadIdx.x / 128) == 0) {
    registers_decrease<Epilogue::kProducerRegisters>();
    const u32 warp = uniform(threadIdx.x / 32);
    // Issuing copies takes longer than narrow tiles' products. The compiler knows that an elected thread is alone, and has it issue them
    // without a loop over threads.
    if constexpr (C::kGrouped) {
      if (warp == 0 && elect_one()) epilogue.template load<kLoadsA>(shared, scheduler, first);
      if (warp == 3 && elect_one()) epilogue.template load<kLoadsB>(shared, scheduler, first);
    } else if constexpr (Epilogue::kLoaders == 2) {
      if (warp == 0 && elect_one()) gemm_load<C, kLoadsA>(arguments, shared, epilogue, scheduler, first);
      if (warp == 3 && elect_one()) gemm_load<C, kLoadsB>(arguments, shared, epilogue, scheduler, first);
    } else {
      if (warp == 0 && (Epilogue::kLoadingThreads > 1 || elect_one())) {
        gemm_load<C, kLoadsA | kLoadsB>(arguments, shared, epilogue, scheduler, first);
      }
      if (warp == 3) epilogue.begin(shared);
    }
    if (threadIdx.x == 32) epilogue.store(shared, 0);
    if (threadIdx.x == 64) epilogue.store(shared, 1);
  } else {
    registers_increase<Epilogue::kConsumerRegisters>();
    if constexpr (C::kWarpgroups == Warpgroups::kPingpong) {
      GemmPingpong<C, Epilogue>{arguments, shared, epilogue}.run();
    } else {
      GemmCooperative<C, Epilogue>{arguments, shared, epilogue}.run();
    }
  }
  // A CTA's barriers outlive the other's last arrival at them.
  cluster_sync();
  if (threadIdx.x == 0) epilogue.end();
}

}  // namespace counterpoint
