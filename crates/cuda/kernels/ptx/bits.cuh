// Bit fields.
#pragma once

#include "types.cuh"

namespace counterpoint {

// A word whose bits first .. first + count are one; what lies beyond bit 31 is cut off.
__device__ __forceinline__ u32 bit_range(u32 first, u32 count) {
  u32 bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
  return bits;
}

}  // namespace counterpoint
