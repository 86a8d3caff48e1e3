// Sums of an all-reduce on their way from this rank's memory to the others', while their owner goes on with the next tiles.
//
// A chunk that TMA stores to every rank keeps its room in shared memory until the links have taken all copies, and on
// four GPUs that is longer than a tile is multiplied. So who stores puts it in this rank's memory only and notifies a warp that has
// nothing else to do.
#pragma once

#include "gemm/gemm_work.cuh"
#include "ptx/flag.cuh"

namespace counterpoint {

// This rank's rows of the sums.
struct GemmSums {
  const u64* at;  // in the memory of every rank
  u32 own;
  u32 others;   // ranks that get them, a bit each
  u32 stride;   // elements from one row to the next
  u32 columns;
};

// The warp together: the oldest chunk that is in this rank's memory only.
template <typename C>
__device__ __forceinline__ void gemm_spread_chunk(const GemmSpread& spread, const GemmSums& sums) {
  constexpr u32 kAhead = 4, kPacksOfRow = C::kChunkColumns / 8, kRowsAtOnce = 32 / kPacksOfRow;
  const u32 lane = threadIdx.x % 32, at = spread.spread % kSpreadChunks;
  const u32 row = u32(spread.rows[at]) + lane / kPacksOfRow;
  const u32 column = u32(spread.columns[at]) + lane % kPacksOfRow * 8;
  if (column >= sums.columns) return;
  const u64 step = u64(kRowsAtOnce) * sums.stride * sizeof(Element);
  u64 offset = (u64(row) * sums.stride + column) * sizeof(Element);
#pragma unroll 1
  for (u32 line = 0; line < 64 / kRowsAtOnce; line += kAhead) {
    uint4 words[kAhead];
    // TMA wrote them: not by way of the nearest cache.
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i) words[i] = __ldcg(reinterpret_cast<const uint4*>(sums.at[sums.own] + offset + i * step));
    for (u32 ranks = sums.others; ranks != 0; ranks &= ranks - 1) {
      const u64 to = sums.at[__ffs(i32(ranks)) - 1] + offset;
#pragma unroll
      for (u32 i = 0; i < kAhead; ++i) *reinterpret_cast<uint4*>(to + i * step) = words[i];
    }
    offset += kAhead * step;
  }
}

// One warp, until both threads that store have said that there is nothing more.
template <typename C>
__device__ __forceinline__ void gemm_spread_sums(GemmShared<C>& shared, const GemmSums& sums) {
  const bool leads = threadIdx.x % 32 == 0;
  bool wrote = false;
  for (bool more = true; more;) {
    more = false;
    bool idle = true;
#pragma unroll
    for (u32 group = 0; group < kGemmConsumers; ++group) {
      GemmSpread& spread = shared.spreads[group];
      u32 stored = 0;
      if (leads) stored = load_acquire_shared(&spread.stored);
      stored = uniform(stored);
      __syncwarp();
      more |= (stored & kSpreadEnd) == 0;
      if ((stored & ~kSpreadEnd) == spread.spread) continue;
      gemm_spread_chunk<C>(spread, sums);
      __syncwarp();
      if (leads) store_release_shared(&spread.spread, spread.spread + 1);
      __syncwarp();
      idle = false;
      more = wrote = true;
    }
    if (idle && more) pause_nanoseconds<200>();
  }
  // By every lane, and before this CTA is counted as through: the last one's release must cover what this one wrote.
  if (wrote) fence_system();
}

}  // namespace counterpoint
