// Where things are in the shared memory of the two CTAs that share a tile (attention_backward_pair.cuh), and how their
// roles notify each other of what is there.
#pragma once

#include "attention/backward_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"

namespace counterpoint {

// What a kernel of pairs is compiled for.
template <u32 kHeadDimOf, u32 kHeadDimVOf, KeyGradients kGradientsOf, bool kSoftcapOf, DqOrder kOrderOf>
struct AttentionBackwardPairConfig
    : AttentionBackwardConfig<kHeadDimOf, kHeadDimVOf, kGradientsOf, kSoftcapOf, kOrderOf> {
  using One = AttentionBackwardConfig<kHeadDimOf, kHeadDimVOf, kGradientsOf, kSoftcapOf, kOrderOf>;
  static constexpr u32 kChunksV = One::kHeadDimV / 64;
  static constexpr u32 kDoutStages = One::kHeadDim == 256 ? 1 : 2;
  // Whether dK and dV of a block are computed under S and dP of the next one. With one buffer of dout the next block's is
  // fetched when this one's dV is done: who waits for that under a product which waits for the next rows stops both.
  static constexpr bool kProductsUnderNext = kDoutStages > 1;
  // dQ of a block: chunks of 64 columns over the keys of both CTAs, each CTA its own; where chunks are odd, the last is
  // computed by each over its own keys.
  static constexpr u32 kWholeParts = One::kChunks / 2;
  static constexpr u32 kParts = kWholeParts + One::kChunks % 2;
  static constexpr u32 kDqBuffers = One::kHeadDim == 256 ? 1 : 2;
  static_assert(One::kCtas == 2 && One::kHeadDim % 64 == 0 && One::kHeadDimV % 64 == 0 && One::kHeadDim <= 256 &&
                    One::kHeadDimV <= One::kHeadDim,
                "head sizes");
};

namespace backward_pair {

using namespace backward;

constexpr u32 kChunkBytes = 64 * 128;  // 64 keys or rows x 64 elements
constexpr u32 kAnnouncements = 4;      // steps that the first CTA may be ahead of the second's loading thread

// The first column of a part.
template <typename C>
__device__ __forceinline__ u32 part_chunk(u32 part, u32 rank) {
  return part < C::kWholeParts ? C::kWholeParts * rank + part : C::kChunks - 1;
}

template <typename C>
struct Storage {
  u8 k[C::kChunks * kChunkBytes];
  u8 v[C::kChunksV * kChunkBytes];
  u8 peer_k[C::kWholeParts * kChunkBytes];  // the other CTA's keys, the columns of which this one computes dQ
  u8 q[C::kStages][C::kChunks * kChunkBytes];
  u8 dout[C::kDoutStages][C::kChunksV * kChunkBytes];
  u8 ds[2][kChunkBytes];  // P until dS is there
  u8 peer_ds[2][kChunkBytes];
  u8 dq[C::kDqBuffers][kPartBytes];
  float lse[C::kStages][C::kRows];
  float delta[C::kDoutStages][C::kRows];
  Step steps[kSteps];
  TileScheduler<C> scheduler;  // of the first CTA
  Delivered delivered;
  u64 announced[kAnnouncements];
  u64 full_k, full_v;
  u64 full_q[C::kStages], empty_q[C::kStages];
  u64 full_dout[C::kDoutStages], empty_dout[C::kDoutStages];
  u64 full_p[2];
  u64 full_ds[2], empty_ds[2];
  u64 full_dq[C::kDqBuffers], empty_dq[C::kDqBuffers];

  // By one thread, before anybody waits.
  __device__ __forceinline__ void initialise() {
    constexpr u32 kWarps = 4;  // of a warpgroup
    for (u32 i = 0; i < kAnnouncements; ++i) mbarrier_init(&announced[i], 1);
    mbarrier_init(&full_k, 1);
    mbarrier_init(&full_v, 1);
    for (u32 i = 0; i < C::kStages; ++i) {
      mbarrier_init(&full_q[i], 1);
      mbarrier_init(&empty_q[i], 4 * kWarps);  // two warpgroups of both CTAs
    }
    for (u32 i = 0; i < C::kDoutStages; ++i) {
      mbarrier_init(&full_dout[i], 1);
      mbarrier_init(&empty_dout[i], 4 * kWarps);
    }
    for (u32 i = 0; i < 2; ++i) {
      mbarrier_init(&full_p[i], kWarps);
      mbarrier_init(&full_ds[i], kWarps);
      mbarrier_init(&empty_ds[i], 2 * kWarps);  // the warpgroup that computes dQ, in both CTAs
    }
    for (u32 i = 0; i < C::kDqBuffers; ++i) {
      mbarrier_init(&full_dq[i], kWarps);
      mbarrier_init(&empty_dq[i], 1);
    }
    fence_mbarrier_init();
    fence_async_proxy();
  }
};

// Buffers of dout, and the parity of the phase in which step `count` uses its buffer.
template <typename C>
__device__ __forceinline__ u32 dout_slot_of(u32 count) {
  return count % C::kDoutStages;
}
template <typename C>
__device__ __forceinline__ u32 dout_parity_of(u32 count) {
  return count / C::kDoutStages % 2;
}

// Signals to both CTAs that this warp is done with what a barrier of theirs guards.
__device__ __forceinline__ void release_to_both(u64* barrier) {
  if (elect_one()) {
    mbarrier_arrive(barrier);
    peer_arrive(peer_address(shared_address(barrier), cluster_rank() ^ 1));
  }
}

}  // namespace backward_pair

}  // namespace counterpoint
