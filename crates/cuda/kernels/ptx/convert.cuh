// Conversions between the element types, whatever the element type of the kernel (PTX ISA, "cvt").
#pragma once

#include "types.cuh"

namespace counterpoint {

// Round to nearest even.
__device__ __forceinline__ u16 bf16_of(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ u16 f16_of(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float float_of_bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }

__device__ __forceinline__ float float_of_f16(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace counterpoint
