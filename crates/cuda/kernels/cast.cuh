// A tensor in another element type, every value rounded once.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kCastThreads = 256;
// Elements that a thread loads at once: 16 bytes of f32, so that neighbouring threads write neighbouring sectors.
constexpr u32 kCastPack = 4;
constexpr u32 kCastUnroll = 4;

// Any number of blocks. `src` and `dst` are aligned to 16 bytes.
template <typename Src, typename Dst>
__device__ __forceinline__ void cast(const Src* __restrict__ src, Dst* __restrict__ dst, u64 count) {
  constexpr u32 kStep = kCastThreads * kCastUnroll;
  const u64 packs = count / kCastPack;
  for (u64 begin = u64(blockIdx.x) * kStep; begin < packs; begin += u64(gridDim.x) * kStep) {
    Pack<Src, kCastPack> from[kCastUnroll];
#pragma unroll
    for (u32 u = 0; u < kCastUnroll; ++u) {
      const u64 i = begin + u * kCastThreads + threadIdx.x;
      if (i < packs) from[u] = load_pack<Src, kCastPack>(src + i * kCastPack);
    }
#pragma unroll
    for (u32 u = 0; u < kCastUnroll; ++u) {
      const u64 i = begin + u * kCastThreads + threadIdx.x;
      Pack<Dst, kCastPack> to;
#pragma unroll
      for (u32 e = 0; e < kCastPack; ++e) to.at[e] = narrow<Dst>(widen(from[u].at[e]));
      if (i < packs) store_pack(dst + i * kCastPack, to);
    }
  }
  const u64 rest = packs * kCastPack + u64(blockIdx.x) * kCastThreads + threadIdx.x;
  if (rest < count) dst[rest] = narrow<Dst>(widen(src[rest]));
}

}  // namespace counterpoint
