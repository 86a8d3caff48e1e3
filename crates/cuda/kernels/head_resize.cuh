// Heads of another number of elements: longer ones end in zeros, shorter ones lose their end.
#pragma once

#include "types.cuh"

namespace counterpoint {

constexpr u32 kHeadResizeThreads = 256;

// Any number of blocks. `src` is [heads, from], `dst` [heads, to]; `Word` is as large as an element.
template <typename Word>
__device__ __forceinline__ void head_resize(const Word* __restrict__ src, Word* __restrict__ dst, u64 heads, u32 from,
                                            u32 to) {
  const u64 stride = u64(gridDim.x) * kHeadResizeThreads;
  for (u64 i = u64(blockIdx.x) * kHeadResizeThreads + threadIdx.x; i < heads * to; i += stride) {
    const u64 head = i / to;
    const u32 column = u32(i - head * to);
    dst[i] = column < from ? src[head * from + column] : Word(0);
  }
}

}  // namespace counterpoint
