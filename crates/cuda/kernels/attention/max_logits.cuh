// The largest score of a query head (max_logits): one word that all tiles of the head share.
#pragma once

#include "types.cuh"

namespace counterpoint {

// The largest value of a warp's lanes that are equal modulo kLanes, in each of them.
template <u32 kLanes>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (u32 offset = kLanes; offset < 32; offset *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// largest = max(largest, value), in any order. Bits of floats from zero on grow with them as signed integers, those of floats below
// zero fall as unsigned ones, and are the larger unsigned and the smaller signed integers.
__device__ __forceinline__ void atomic_max(float* largest, float value) {
  value += 0.0f;  // of the two zeros the one that is not below zero
  if (value >= 0.0f) {
    atomicMax(reinterpret_cast<i32*>(largest), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<u32*>(largest), __float_as_uint(value));
  }
}

}  // namespace counterpoint
