// Additions to global memory that return nothing (PTX ISA, "red").
#pragma once

#include "types.cuh"

namespace counterpoint {

// Adds two floats to two neighbours; `address` is a multiple of 8. In no order that can be relied on.
__device__ __forceinline__ void reduce_add(float* address, float first, float second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(first), "f"(second) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(first) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address + 1), "f"(second) : "memory");
#endif
}

}  // namespace counterpoint
