// What streams wait for until the host has enqueued what is to start together.
#pragma once

#include "ptx/flag.cuh"

namespace counterpoint {

__device__ __forceinline__ void start_hold(u32 nanoseconds) {
  const u64 begin = global_nanoseconds();
  while (global_nanoseconds() - begin < nanoseconds) __nanosleep(500);
}

}  // namespace counterpoint
