// Additions to global memory that return nothing (PTX ISA, "red").
#pragma once

#include "types.cuh"

namespace counterpoint {

// Adds four floats to neighbours; `address` is a multiple of 16. In no order that can be relied on.
__device__ __forceinline__ void reduce_add(float* address, float4 values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
#else
  asm volatile(
      "red.relaxed.gpu.global.add.f32 [%0], %1;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 4], %2;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 8], %3;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 12], %4;\n" ::"l"(address),
      "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
      : "memory");
#endif
}

}  // namespace counterpoint
