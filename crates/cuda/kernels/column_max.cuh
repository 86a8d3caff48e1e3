// The largest element of each column of a few rows.
#pragma once

#include "types.cuh"

namespace counterpoint {

// A thread takes a column. `src` is [rows, stride], of which the first `columns` columns count.
__device__ __forceinline__ void column_max(const float* src, float* dst, u32 rows, u32 stride, u32 columns) {
  const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float largest = minus_infinity();
  for (u32 row = 0; row < rows; ++row) largest = fmaxf(largest, src[u64(row) * stride + column]);
  dst[column] = largest;
}

}  // namespace counterpoint
