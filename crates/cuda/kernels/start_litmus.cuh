// Blocks that write down when they begin, and stay for a while, as those of communication and computation do: what shows
// which of two kernels held its multiprocessors first.
#pragma once

#include "ptx/flag.cuh"

namespace counterpoint {

__device__ __forceinline__ void start_litmus(u64* starts, u32 nanoseconds) {
  if (threadIdx.x != 0) return;
  const u64 begin = global_nanoseconds();
  starts[blockIdx.x] = begin;
  while (global_nanoseconds() - begin < nanoseconds) {
  }
}

}  // namespace counterpoint
