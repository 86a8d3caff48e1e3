// Copies from global to shared memory that run concurrently with the thread that starts them (PTX ISA, "cp.async"; sm_80 and newer).
#pragma once

#include "types.cuh"

namespace counterpoint {

// 16 bytes to the shared address; zeros instead, and nothing read, where `valid` is false. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// 4 bytes likewise, through L1.
__device__ __forceinline__ void cp_async_4(u32 shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0) : "memory");
}

// Closes the group of this thread's copies so far.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` groups of this thread are incomplete.
template <u32 kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace counterpoint
