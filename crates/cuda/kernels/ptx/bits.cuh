// Bit fields (PTX ISA, "bmsk").
#pragma once

#include "types.cuh"

namespace counterpoint {

// `width` ones from bit `start` on; what lies beyond bit 31 is dropped.
__device__ __forceinline__ u32 bit_mask(u32 start, u32 width) {
  u32 mask;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(mask) : "r"(start), "r"(width));
  return mask;
}

}  // namespace counterpoint
