// Copies of bytes that lie together by TMA (PTX ISA, "cp.async.bulk"), to and from this GPU's memory or a
// peer's. Addresses and lengths are multiples of 16.
#pragma once

#include "ptx/mbarrier.cuh"

namespace counterpoint {

// Global to shared; completes `barrier` by `bytes`.
__device__ __forceinline__ void bulk_load(void* shared, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Shared to global, in the group that `tma_store_commit` closes.
__device__ __forceinline__ void bulk_store(void* to, const void* shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

}  // namespace counterpoint
