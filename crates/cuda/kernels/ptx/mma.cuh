// Matrix products of one warp and the loads that feed them (PTX ISA, "mma.sync.m16n8k16" and "ldmatrix"; sm_80 and newer).
//
// Fragments, lane by lane (row = lane / 4, pair = 2 * (lane % 4)):
//  - A [16 x 16]: a[0] is (row, pair..), a[1] the row 8 further down, a[2] and a[3] the same 8 columns further right.
//  - B [16 x 8]: b0 is (rows pair.., column row), b1 the rows 8 further down.
//  - D [16 x 8]: d[0], d[1] are (row, pair..), d[2], d[3] the row 8 further down.
// So the accumulators of two neighbouring D, packed, are the operand A of a next product.
#pragma once

#include "types.cuh"

namespace counterpoint {

// D += A * B in f32.
__device__ __forceinline__ void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0,
                                             u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT_NAME "." ELEMENT_NAME
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 elements from shared memory: lane l gives the address of row l % 8 of matrix l / 8 and gets the
// pair (row l / 4, columns 2 * (l % 4)..) of each.
__device__ __forceinline__ void ldmatrix_x4(u32 (&values)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&values)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address)
               : "memory");
}

}  // namespace counterpoint
