// The count of words that are not the same in two tensors: what a test compares results by without moving them.
#pragma once

#include "types.cuh"

namespace counterpoint {

__device__ __forceinline__ void bit_check(const u32* a, const u32* b, u64 words, u64* unlike) {
  u64 found = 0;
  const u64 threads = u64(gridDim.x) * blockDim.x;
  for (u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x; at < words; at += threads) found += a[at] != b[at];
  if (found != 0) atomicAdd(unlike, found);
}

}  // namespace counterpoint
