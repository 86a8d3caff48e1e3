// Two ranks send each other messages round after round, with random delays, by the very barriers that collectives use; every
// word that is not of its round is counted.
#pragma once

#include "link_barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

constexpr u32 kLitmusWords = 256;

struct alignas(128) LinkLitmusShared {
  u32 message[kLitmusWords];
  u64 full;
  u64 tensors[kLinkRanks * kLinkTensors];
};

__device__ __forceinline__ u32 litmus_mix(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Up to a microsecond, and mostly none.
__device__ __forceinline__ void litmus_delay(u32 seed) {
  const u32 drawn = litmus_mix(seed);
  if (drawn % 4 != 0) return;
  const u64 begin = clock64();
  while (clock64() - begin < (drawn >> 8) % 2048) {
  }
}

// One warp, rank `rank` of 2. `wrong`: words that were not of their round; `ended`: rounds that were seen.
template <bool kPush>
__device__ __forceinline__ void link_litmus(const LinkCall& call, u32 rank, u32 rounds, u64* wrong, u64* ended) {
  __shared__ LinkLitmusShared shared;
  const u32 lane = threadIdx.x;
  const u32 other = 1 - rank;
  volatile u32* input = reinterpret_cast<volatile u32*>(kPush ? call.own[0] : call.announced[0]);
  const u32* output = reinterpret_cast<const u32*>(kPush ? call.announced[0] : call.own[0]);
  if (lane == 0) {
    mbarrier_init(&shared.full, 1);
    fence_mbarrier_init();
  }
  u64 stale = 0;
  u32 round = 0;
  for (; round < rounds; ++round) {
    litmus_delay(round * 4 + rank * 2);
    for (u32 w = lane; w < kLitmusWords; w += 32) input[w] = litmus_mix(rank * kLitmusWords + w) ^ round;
    // Written by this very kernel, for another's TMA and for the own one.
    fence_system();
    fence_async_proxy_all();
    __syncwarp();
    litmus_delay(round * 4 + rank * 2 + 1 + lane * 0x10001);
    const u64 number = link_begin(call, shared.tensors);
    if (number == 0) break;
    __syncwarp();
    if (lane == 0) {
      const u64 remote = shared.tensors[other * kLinkTensors];
      mbarrier_arrive_expect(&shared.full, sizeof(shared.message));
      const u64 from = kPush ? call.own[0] : remote;
      bulk_load(shared.message, reinterpret_cast<const void*>(from), sizeof(shared.message), &shared.full);
      mbarrier_wait(&shared.full, round % 2);
      bulk_store(reinterpret_cast<void*>(kPush ? remote : call.own[0]), shared.message, sizeof(shared.message));
      tma_store_commit();
      tma_store_wait<0>();
    }
    __syncwarp();
    if (kPush) fence_system();
    link_end(call, number);
    __syncwarp();
    // Not volatile: an ordinary read, as of a kernel behind it, which may find an old line in a cache.
    for (u32 w = lane; w < kLitmusWords; w += 32) {
      stale += output[w] != (litmus_mix(other * kLitmusWords + w) ^ round);
    }
    __syncwarp();
  }
  if (stale != 0) atomicAdd(wrong, stale);
  if (lane == 0) *ended = round;
}

}  // namespace counterpoint
