// CTAs of one cluster, which see each other's shared memory (PTX ISA, "mapa", "barrier.cluster").
#pragma once

#include "ptx/mbarrier.cuh"

namespace counterpoint {

// Arrives at the barrier that CTA `rank` of the cluster has where this CTA has `barrier`. For reads that are complete: what this
// thread wrote is not told to the other CTA, which would take a fence of the whole GPU (`.release.cluster`).
__device__ __forceinline__ void mbarrier_arrive_at(u64* barrier, u32 rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Waits until all threads of all CTAs have come here or exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;\n" ::
          : "memory");
}

}  // namespace counterpoint
