// CTAs of a cluster: their number, a barrier, and each other's shared memory (PTX ISA, "mapa", "barrier.cluster").
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

// Which CTA of its cluster this is.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Which cluster of the grid this is, and of how many (PTX ISA, "%clusterid").
__device__ __forceinline__ u32 cluster_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ u32 cluster_count() {
  u32 count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// A barrier of all threads of the cluster; what was written before, to any of its shared memory, is seen after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\n"
               "barrier.cluster.wait.acquire;\n" ::: "memory");
}

// The address, in the CTA of that rank, of what lies at `address` in this one's shared memory.
__device__ __forceinline__ u32 peer_address(u32 address, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// The functions below take addresses that peer_address gave.

// Stores a word, and completes a barrier there by its 4 bytes.
__device__ __forceinline__ void peer_store(u32 address, u32 value, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
               "r"(value), "r"(barrier)
               : "memory");
}

// The same of 16 bytes, at a multiple of that.
__device__ __forceinline__ void peer_store(u32 address, float4 value, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

// Arrives at another CTA's barrier, to say that this one reads something no more. It orders no writes: a release to the
// cluster waits for all of this thread's writes to global memory.
__device__ __forceinline__ void peer_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same where `condition` holds.
__device__ __forceinline__ void peer_arrive_if(u32 barrier, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(u32(condition))
      : "memory");
}

// mbarrier_wait for a barrier at which other CTAs arrive.
__device__ __forceinline__ void mbarrier_wait_cluster(u64* barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Copies `bytes` (a multiple of 16) of this CTA's shared memory to another's, and completes a barrier there by them.
__device__ __forceinline__ void peer_copy(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// tma_load_3d to the same place in every CTA of `ctas` (a bit each), whose barriers there are each completed by the bytes.
__device__ __forceinline__ void tma_load_3d_multicast(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1,
                                                      i32 c2, u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(ctas)
      : "memory");
}

// The same of two axes.
__device__ __forceinline__ void tma_load_2d_multicast(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1,
                                                      u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(ctas)
      : "memory");
}

}  // namespace counterpoint
