// Flags in global memory by which CTAs, of one GPU or of several, notify each other of what is done (PTX ISA, "ld", "red", memory
// consistency).
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

__device__ __forceinline__ u64 add_relaxed(u64* word, u64 value) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
  return before;
}

// Adds; who acquires the sum sees what this thread wrote before.
__device__ __forceinline__ void add_release(u32* word, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// The same among all GPUs of the system.
__device__ __forceinline__ void add_release_system(u32* word, u32 value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release_system(u64* word, u64 value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// The same; says nothing of other memory.
__device__ __forceinline__ void add_relaxed_system(u64* word, u64 value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Makes relaxed accesses after it release what this thread wrote before it, and those before it acquire what it reads after.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds; what this thread wrote before is seen by who adds after, and what they wrote by this thread. Gives the value before.
__device__ __forceinline__ u32 add_acquire_release(u32* word, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

// The same among all GPUs and the host: words in a peer's memory or in pinned memory.
__device__ __forceinline__ u64 load_acquire_system(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ u64 load_relaxed_system(const u64* word) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_system(u64* word, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed_system(u64* word, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// What this thread wrote or has seen written comes before what it releases, for all GPUs.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Flags in shared memory, among the threads of a CTA.
__device__ __forceinline__ u32 load_acquire_shared(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(u32(__cvta_generic_to_shared(word))) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_shared(u32* word, u32 value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(u32(__cvta_generic_to_shared(word))), "r"(value) : "memory");
}

// Leaves the multiprocessor to other warps for about so long.
template <u32 kNanoseconds>
__device__ __forceinline__ void pause_nanoseconds() {
  asm volatile("nanosleep.u32 %0;" ::"n"(kNanoseconds));
}

// Nanoseconds since some time in the past, the same clock for all of a GPU.
__device__ __forceinline__ u64 global_nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace counterpoint
