// Named barriers among warps, register budgets and fences.
#pragma once

#include "types.cuh"

namespace counterpoint {

// Waits until `threads` threads have arrived at barrier `id` (0 is __syncthreads).
__device__ __forceinline__ void barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Takes or gives back registers; all warps of a warpgroup must call it, in one branch of a role.
template <u32 kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders ordinary writes to shared memory before what wgmma or TMA reads there.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for all memory, in both directions: between TMA's accesses and ordinary ones.
__device__ __forceinline__ void fence_async_proxy_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for global memory alone, which waits for no store of this thread.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Promises the compiler that `value` is the same in all threads of the warp: products may only be started in branches that it
// knows to be uniform.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

// A word in shared memory, read by one lane for its warp: the lane that then says by a barrier that it is read.
__device__ __forceinline__ u32 uniform_load(const u32* word) {
  u32 value = 0;
  if (threadIdx.x % 32 == 0) value = *static_cast<const volatile u32*>(word);
  return uniform(value);
}
__device__ __forceinline__ i32 uniform_load(const i32* word) {
  return i32(uniform_load(reinterpret_cast<const u32*>(word)));
}

// Lets kernels that were launched to overlap with this one start as soon as there is room for them (PTX ISA,
// "griddepcontrol"). Before Hopper none are launched so.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel that was launched to overlap with the one before: waits until that one has finished and what it wrote can be
// seen. In others it does nothing.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// One thread of a converged warp.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace counterpoint
