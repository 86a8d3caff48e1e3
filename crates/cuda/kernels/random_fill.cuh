// Numbers that look random and that the host can compute one by one: inputs of benchmarks and tests that are too large to be
// sent, or to be kept twice.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

// Number `index` of a sequence: the sum of four uniform variables, nearly normal, of mean 0 and standard deviation 1.15.
// (Mixing: splitmix64, Steele et al., "Fast splittable pseudorandom number generators".)
__device__ __forceinline__ float random_value(u64 seed, u64 index) {
  u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  const i32 sum = i32(x & 0xffff) + i32((x >> 16) & 0xffff) + i32((x >> 32) & 0xffff) + i32(x >> 48);
  // Exact: 18 bits.
  return float(sum - 131070) * 0x1p-15f;
}

template <typename T>
__device__ __forceinline__ void random_fill(T* to, u64 count, u64 seed) {
  const u64 stride = u64(gridDim.x) * blockDim.x;
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    to[i] = narrow<T>(random_value(seed, i));
  }
}

}  // namespace counterpoint
