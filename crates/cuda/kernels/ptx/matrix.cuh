// Moves of 8 x 8 matrices of elements between the registers of a warp and shared memory (PTX ISA, "stmatrix").
#pragma once

#include "ptx/mbarrier.cuh"

namespace counterpoint {

// Stores four matrices: lane l gives the address of row l % 8 of matrix l / 8; register i holds, as an accumulator does, the
// pair at row lane / 4, columns 2 * (lane % 4) + {0, 1} of matrix i.
__device__ __forceinline__ void store_matrix_x4(u32 row_address, const u32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

}  // namespace counterpoint
