// What a library's kernel copies as the sign that it has started: a number that no run before has had, also where a graph is replayed.
#pragma once

#include "types.cuh"

namespace counterpoint {

__device__ __forceinline__ void count_up(u32* word) { *word += 1; }

}  // namespace counterpoint
