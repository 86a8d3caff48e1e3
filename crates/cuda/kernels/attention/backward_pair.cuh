// Where things are in the shared memory of the two CTAs that share a tile (attention_backward_pair.cuh), and how their
// roles tell each other what is there.
#pragma once

#include "attention/backward_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"

namespace counterpoint {

// Of v, dout and dv, as HEAD_DIM of the others.
#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif

namespace backward_pair {

using namespace backward;

constexpr u32 kHeadDimV = HEAD_DIM_V;
constexpr u32 kChunksV = kHeadDimV / 64;
static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kHeadDim <= 256 && kHeadDimV <= kHeadDim, "head sizes");

constexpr u32 kThreads = 512;
constexpr u32 kKeyRegisters = 208;
constexpr u32 kQueryRegisters = 64;
constexpr u32 kLoadRegisters = 32;

constexpr u32 kChunkBytes = 64 * 128;  // 64 keys or rows x 64 elements
constexpr u32 kDoutStages = kHeadDim == 256 ? 1 : 2;
constexpr u32 kAnnouncements = 4;  // steps that the first CTA may be ahead of the second's loading thread

// dQ of a block: chunks of 64 columns over the keys of both CTAs, each CTA its own; where chunks are odd, the last is
// computed by each over its own keys.
constexpr u32 kWholeParts = kChunks / 2;
constexpr u32 kParts = kWholeParts + kChunks % 2;
constexpr u32 kDqBuffers = kHeadDim == 256 ? 1 : 2;

// The first column of a part.
__device__ __forceinline__ u32 part_chunk(u32 part, u32 rank) {
  return part < kWholeParts ? kWholeParts * rank + part : kChunks - 1;
}

struct Storage {
  u8 k[kChunks * kChunkBytes];
  u8 v[kChunksV * kChunkBytes];
  u8 peer_k[kWholeParts * kChunkBytes];  // the other CTA's keys, the columns of which this one computes dQ
  u8 q[kStages][kChunks * kChunkBytes];
  u8 dout[kDoutStages][kChunksV * kChunkBytes];
  u8 ds[2][kChunkBytes];  // P until dS is there
  u8 peer_ds[2][kChunkBytes];
  u8 dq[kDqBuffers][kPartBytes];
  float lse[kStages][kRows];
  float delta[kDoutStages][kRows];
  Step steps[kSteps];
  Walk walk;  // of the first CTA
  Delivered delivered;
  u64 announced[kAnnouncements];
  u64 full_k, full_v;
  u64 full_q[kStages], empty_q[kStages];
  u64 full_dout[kDoutStages], empty_dout[kDoutStages];
  u64 full_p[2];
  u64 full_ds[2], empty_ds[2];
  u64 full_dq[kDqBuffers], empty_dq[kDqBuffers];
};
constexpr u32 kSharedBytes = sizeof(Storage);
static_assert(kSharedBytes <= 232448, "shared memory of a CTA");

__device__ __forceinline__ Storage& storage() { return *reinterpret_cast<Storage*>(dynamic_shared); }

__device__ __forceinline__ void initialise_barriers(Storage& shared) {
  constexpr u32 kWarps = 4;  // of a warpgroup
  for (u32 i = 0; i < kAnnouncements; ++i) mbarrier_init(&shared.announced[i], 1);
  mbarrier_init(&shared.full_k, 1);
  mbarrier_init(&shared.full_v, 1);
  for (u32 i = 0; i < kStages; ++i) {
    mbarrier_init(&shared.full_q[i], 1);
    mbarrier_init(&shared.empty_q[i], 4 * kWarps);  // two warpgroups of both CTAs
  }
  for (u32 i = 0; i < kDoutStages; ++i) {
    mbarrier_init(&shared.full_dout[i], 1);
    mbarrier_init(&shared.empty_dout[i], 4 * kWarps);
  }
  for (u32 i = 0; i < 2; ++i) {
    mbarrier_init(&shared.full_p[i], kWarps);
    mbarrier_init(&shared.full_ds[i], kWarps);
    mbarrier_init(&shared.empty_ds[i], 2 * kWarps);  // the warpgroup that computes dQ, in both CTAs
  }
  for (u32 i = 0; i < kDqBuffers; ++i) {
    mbarrier_init(&shared.full_dq[i], kWarps);
    mbarrier_init(&shared.empty_dq[i], 1);
  }
  fence_mbarrier_init();
  fence_async_proxy();
}

// Buffers of dout, and the parity of the round in which step `count` uses its buffer; likewise parts of dq.
__device__ __forceinline__ u32 dout_slot_of(u32 count) { return count % kDoutStages; }
__device__ __forceinline__ u32 dout_parity_of(u32 count) { return count / kDoutStages % 2; }
__device__ __forceinline__ u32 dq_slot_of(u32 count, u32 part) { return (count * kParts + part) % kDqBuffers; }
__device__ __forceinline__ u32 dq_parity_of(u32 count, u32 part) { return (count * kParts + part) / kDqBuffers % 2; }

// Tells both CTAs that this warp is done with what a barrier of theirs guards.
__device__ __forceinline__ void release_to_both(u64* barrier) {
  if (elect_one()) {
    mbarrier_arrive(barrier);
    peer_arrive(peer_address(shared_address(barrier), cluster_rank() ^ 1));
  }
}

// The flags of an announcement. They decide the way of all lanes.
__device__ __forceinline__ u32 step_flags(const Storage& shared, u32 count) {
  return uniform_load(&shared.steps[count % kSteps].flags);
}

}  // namespace backward_pair

}  // namespace counterpoint
