// Accesses to memory that is known to be global (PTX ISA, "ld", "st", "prefetch"): through a pointer that was a number they are generic.
#pragma once

#include "types.cuh"

namespace counterpoint {

// 16 bytes at a multiple of 16.
__device__ __forceinline__ uint4 load_global_16(const void* from) {
  uint4 words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}
__device__ __forceinline__ void store_global_16(void* to, const u32 (&words)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Fetches the 32 bytes at the address, or more, into the level 2 cache, for nobody yet.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

}  // namespace counterpoint
