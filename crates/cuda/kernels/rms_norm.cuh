// RMSNorm of rows that come in pieces, with a residual in front of it (Zhang and Sennrich, arXiv 1910.07467): what undoes the order in
// which groups of rows have travelled, in the pass that a transformer needs anyway.
//
// A block takes a row at a time. What is normalised is the sum as it is stored, so the bits are those of two operations.
#pragma once

#include "row_pieces.cuh"
#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kRmsNormThreads = 256;

// The kernel's parameter beside the sources. Shared with the host.
struct RmsNormArguments {
  const RowPiece* pieces;  // one after the other
  u64 residual;                // [rows, columns], or 0
  u64 sum;                     // likewise: rows and residual together
  u64 weight;                  // [columns]
  u64 out;                     // [rows, columns]
  u32 piece_count;
  u32 rows;
  u32 columns;
  float epsilon;
};

__device__ __forceinline__ float rms_norm_block_sum(float value, float* of_warps) {
  constexpr u32 kWarps = kRmsNormThreads / 32;
#pragma unroll
  for (u32 lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (u32 w = 0; w < kWarps; ++w) sum += of_warps[w];
  return sum;
}

// Any number of blocks. Rows of tensors are multiples of kPack elements.
template <typename T, u32 kPack>
__device__ __forceinline__ void rms_norm(const RowSources& sources, const RmsNormArguments& arguments) {
  __shared__ float of_warps[kRmsNormThreads / 32];
  const u32 columns = arguments.columns;
  const T* residual = reinterpret_cast<const T*>(arguments.residual);
  T* sums = reinterpret_cast<T*>(arguments.sum);
  const T* weight = reinterpret_cast<const T*>(arguments.weight);
  T* out = reinterpret_cast<T*>(arguments.out);
  u32 p = 0;
  for (u32 row = blockIdx.x; row < arguments.rows; row += gridDim.x) {
    while (row >= arguments.pieces[p].end) ++p;
    const RowPiece piece = arguments.pieces[p];
    const T* from = piece.row<T>(sources, row, columns);
    const u64 begin = u64(row) * columns;
    // As it is stored.
    const auto summed = [&](u32 column) {
      Pack<T, kPack> x = load_pack<T, kPack>(from + column);
      if (residual != nullptr) {
        const Pack<T, kPack> r = load_pack<T, kPack>(residual + begin + column);
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) x.at[e] = narrow<T>(widen(x.at[e]) + widen(r.at[e]));
      }
      return x;
    };
    float squares = 0.0f;
    for (u32 column = threadIdx.x * kPack; column < columns; column += kRmsNormThreads * kPack) {
      const Pack<T, kPack> x = summed(column);
      if (sums != nullptr) store_pack(sums + begin + column, x);
#pragma unroll
      for (u32 e = 0; e < kPack; ++e) squares += widen(x.at[e]) * widen(x.at[e]);
    }
    const float mean = rms_norm_block_sum(squares, of_warps) / float(columns);
    const float scale = 1.0f / sqrtf(mean + arguments.epsilon);
    for (u32 column = threadIdx.x * kPack; column < columns; column += kRmsNormThreads * kPack) {
      // Each thread finds what it has read before, in the nearest cache.
      const Pack<T, kPack> x = sums != nullptr ? load_pack<T, kPack>(sums + begin + column) : summed(column);
      const Pack<T, kPack> w = load_pack<T, kPack>(weight + column);
      Pack<T, kPack> y;
#pragma unroll
      for (u32 e = 0; e < kPack; ++e) y.at[e] = narrow<T>(widen(x.at[e]) * scale * widen(w.at[e]));
      store_pack(out + begin + column, y);
    }
  }
}

}  // namespace counterpoint
