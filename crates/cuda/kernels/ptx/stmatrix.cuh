// Stores of 8 x 8 matrices of 16-bit elements to shared memory (PTX ISA, "stmatrix").
#pragma once

#include "ptx/mbarrier.cuh"

namespace counterpoint {

// Four matrices: lane l gives the address of row l % 8 of matrix l / 8; value[m] holds row lane / 4, columns
// 2 * (lane % 4) + {0, 1} of matrix m.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace counterpoint
