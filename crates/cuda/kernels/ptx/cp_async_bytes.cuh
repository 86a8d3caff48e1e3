// Copies from global to shared memory of 16 bytes, or of the first of them with zeros behind (PTX ISA, "cp.async", its src-size).
#pragma once

#include "types.cuh"

namespace counterpoint {

// 16 bytes to the shared address. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_all(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same, of which only the first `bytes` are read and the rest are zeros.
__device__ __forceinline__ void cp_async_some(u32 shared, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

}  // namespace counterpoint
