// A tensor in another element type, every value rounded once.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kCastThreads = 256;
// Elements that a thread converts at a time: 16 bytes of the narrower type.
constexpr u32 kCastPack = 8;

// Any number of blocks. `src` and `dst` are aligned to 16 bytes.
template <typename Src, typename Dst>
__device__ __forceinline__ void cast(const Src* __restrict__ src, Dst* __restrict__ dst, u64 count) {
  const u64 packs = count / kCastPack;
  const u64 stride = u64(gridDim.x) * kCastThreads;
  const u64 first = u64(blockIdx.x) * kCastThreads + threadIdx.x;
  for (u64 i = first; i < packs; i += stride) {
    const Pack<Src, kCastPack> from = load_pack<Src, kCastPack>(src + i * kCastPack);
    Pack<Dst, kCastPack> to;
#pragma unroll
    for (u32 e = 0; e < kCastPack; ++e) to.at[e] = narrow<Dst>(widen(from.at[e]));
    store_pack(dst + i * kCastPack, to);
  }
  const u64 rest = packs * kCastPack + first;
  if (rest < count) dst[rest] = narrow<Dst>(widen(src[rest]));
}

}  // namespace counterpoint
