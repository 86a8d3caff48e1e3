// Words in global memory by which CTAs tell each other what is done (PTX ISA, "ld", "red", memory consistency).
#pragma once

#include "types.cuh"

namespace counterpoint {

// What is read after it was written before the value seen was added or stored with release.
__device__ __forceinline__ u32 load_acquire(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// What some thread has written there, now or a while ago; says nothing of other memory.
__device__ __forceinline__ u32 load_relaxed(const u32* word) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(u32* word, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Adds; who acquires the sum sees what this thread wrote before.
__device__ __forceinline__ void add_release(u32* word, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// The same among all GPUs of the system.
__device__ __forceinline__ void add_release_system(u32* word, u32 value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Adds, and gives the value before. Sees what others wrote before theirs, and lets them see what this thread wrote.
__device__ __forceinline__ u32 add_acquire_release(u32* word, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

}  // namespace counterpoint
