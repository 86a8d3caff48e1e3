// Barriers in shared memory that count arrivals and bytes (PTX ISA, "mbarrier").
#pragma once

#include "types.cuh"

namespace counterpoint {

// A shared-memory address as PTX wants it.
__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// The same object in shared memory. The compiler keeps its address in a register and does not work it out again for every use, which
// takes a thread that only issues copies longer than these.
template <typename T>
__device__ __forceinline__ T& keep_address(T& shared) {
  u32 address = shared_address(&shared);
  asm volatile("" : "+r"(address));
  return *static_cast<T*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA and to other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more from TMA.
__device__ __forceinline__ void mbarrier_arrive_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives where `condition` holds: the address is then worked out for the whole warp, not in a branch of one lane.
__device__ __forceinline__ void mbarrier_arrive_if(u32 address, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(address),
      "r"(u32(condition))
      : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(u32 address, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(address), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier, u32 parity) {
  return mbarrier_try_wait(shared_address(barrier), parity);
}

// Whether the phase of this parity has completed. Does not wait, as mbarrier_try_wait may for a while.
__device__ __forceinline__ bool mbarrier_test_wait(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits until the phase of this parity has completed. A fresh barrier has completed the phase of parity 1.
__device__ __forceinline__ void mbarrier_wait(u32 address, u32 parity) {
  while (!mbarrier_try_wait(address, parity)) {
  }
}
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

}  // namespace counterpoint
