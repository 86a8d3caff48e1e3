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

// Adds, and returns what was there; says nothing of other memory.
__device__ __forceinline__ u32 add_relaxed(u32* word, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

// Makes relaxed accesses after it release what this thread wrote before it, and those before it acquire what it reads after.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace counterpoint
