// A residual added to rows, and a root mean square norm of the sums.
//
// A block has a row. What a thread has summed and stored it reads again when the row's scale is known: it is in the first cache.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kResidualNormThreads = 256;

// Shared with the host.
struct ResidualNormArguments {
  const void* src;       // [rows, columns]
  const void* residual;  // [rows, columns]
  const void* weight;    // [columns]
  void* sum;             // [rows, columns]
  void* dst;             // [rows, columns]
  u32 rows;
  u32 columns;
  float epsilon;
};

// Of all threads of a block, the same in each; always in the same order.
__device__ __forceinline__ float sum_of_block(float value) {
  constexpr u32 kWarps = kResidualNormThreads / 32;
  __shared__ float of_warps[kWarps];
#pragma unroll
  for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  // Those of the row before have been read.
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (u32 warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
  return sum;
}

// Any number of blocks. Columns are a multiple of kPack.
template <typename T, u32 kPack>
__device__ __forceinline__ void residual_norm(const ResidualNormArguments& arguments) {
  const u32 packs = arguments.columns / kPack;
  for (u32 row = blockIdx.x; row < arguments.rows; row += gridDim.x) {
    const u64 first = u64(row) * arguments.columns;
    const T* src = static_cast<const T*>(arguments.src) + first;
    const T* residual = static_cast<const T*>(arguments.residual) + first;
    T* sum = static_cast<T*>(arguments.sum) + first;
    float squares = 0.0f;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < packs; i += kResidualNormThreads) {
      const Pack<T, kPack> a = load_pack<T, kPack>(src + i * kPack);
      const Pack<T, kPack> b = load_pack<T, kPack>(residual + i * kPack);
      Pack<T, kPack> rounded;
#pragma unroll
      for (u32 e = 0; e < kPack; ++e) {
        rounded.at[e] = narrow<T>(widen(a.at[e]) + widen(b.at[e]));
        squares += widen(rounded.at[e]) * widen(rounded.at[e]);
      }
      store_pack(sum + i * kPack, rounded);
    }
    const float mean = sum_of_block(squares) / float(arguments.columns);
    const float scale = 1.0f / sqrtf(mean + arguments.epsilon);
    const T* weight = static_cast<const T*>(arguments.weight);
    T* dst = static_cast<T*>(arguments.dst) + first;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < packs; i += kResidualNormThreads) {
      const Pack<T, kPack> of = load_pack<T, kPack>(sum + i * kPack);
      const Pack<T, kPack> times = load_pack<T, kPack>(weight + i * kPack);
      Pack<T, kPack> normed;
#pragma unroll
      for (u32 e = 0; e < kPack; ++e) normed.at[e] = narrow<T>(widen(of.at[e]) * scale * widen(times.at[e]));
      store_pack(dst + i * kPack, normed);
    }
  }
}

}  // namespace counterpoint
