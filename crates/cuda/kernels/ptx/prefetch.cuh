// Fetches of global memory into the level 2 cache, for nobody yet (PTX ISA, "prefetch").
#pragma once

#include "types.cuh"

namespace counterpoint {

// The 32 bytes at the address, or more.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

}  // namespace counterpoint
