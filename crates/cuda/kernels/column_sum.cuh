// Sums of a matrix's columns: the gradient of a bias.
//
// A warp reads 512 bytes of a row at once, a block adds up kColumnSumRows rows of as many columns, and the block that comes last
// adds the blocks' sums. Each addition has its place in an order that follows from the number of rows alone.
#pragma once

#include "ptx/flag.cuh"
#include "row_pieces.cuh"
#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kColumnSumThreads = 256;
constexpr u32 kColumnSumRows = 128;

// The kernel's parameter in addition to the sources. Shared with the host.
struct ColumnSumArguments {
  const RowPiece* pieces;  // one after the other
  void* dst;                     // [columns]
  float* partials;               // [row blocks, columns]
  u32* arrivals;                 // [column blocks], zero between launches
  u32 piece_count;
  u32 rows;
  u32 columns;
  u32 adds;  // whether the sum is added to what is there
};

// Adds `kCount` rows that lie `stride` apart. All are on their way before the first is added.
template <typename T, u32 kPack, u32 kCount>
__device__ __forceinline__ void add_rows(float (&sums)[kPack], const T* from, u64 stride) {
  Pack<T, kPack> loaded[kCount];
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) loaded[i] = load_pack<T, kPack>(from + i * stride);
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
#pragma unroll
    for (u32 e = 0; e < kPack; ++e) sums[e] += widen(loaded[i].at[e]);
  }
}

// Any number of blocks. Rows of tensors are multiples of kPack elements.
template <typename T, typename Result, u32 kPack>
__device__ __forceinline__ void column_sum(const RowSources& sources, const ColumnSumArguments& arguments) {
  constexpr u32 kWarps = kColumnSumThreads / 32;
  constexpr u32 kColumns = 32 * kPack;
  constexpr u32 kUnroll = 8;
  __shared__ float of_warps[kWarps][kColumns];
  __shared__ u32 last;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 columns = arguments.columns;
  const u32 column_blocks = (columns + kColumns - 1) / kColumns;
  const u32 row_blocks = (arguments.rows + kColumnSumRows - 1) / kColumnSumRows;
  Result* dst = reinterpret_cast<Result*>(arguments.dst);
  for (u32 item = blockIdx.x; item < column_blocks * row_blocks; item += gridDim.x) {
    const u32 first_column = item % column_blocks * kColumns;
    const u32 row_block = item / column_blocks;
    const u32 column = first_column + lane * kPack;
    const u32 begin = row_block * kColumnSumRows;
    const u32 end = min(begin + kColumnSumRows, arguments.rows);
    float sums[kPack] = {};
    if (column < columns) {
      u32 row = begin + warp;
      for (u32 i = 0; i < arguments.piece_count && row < end; ++i) {
        const RowPiece piece = arguments.pieces[i];
        const u32 piece_end = min(piece.end, end);
        if (piece_end <= row) continue;
        const T* from = piece.row<T>(sources, row, columns) + column;
        const u64 stride = u64(kWarps) * columns;
        for (; row + (kUnroll - 1) * kWarps < piece_end; row += kUnroll * kWarps) {
          add_rows<T, kPack, kUnroll>(sums, from, stride);
          from += kUnroll * stride;
        }
        for (; row < piece_end; row += kWarps) {
          add_rows<T, kPack, 1>(sums, from, stride);
          from += stride;
        }
      }
    }
#pragma unroll
    for (u32 e = 0; e < kPack; ++e) of_warps[warp][lane * kPack + e] = sums[e];
    __syncthreads();
    for (u32 c = threadIdx.x; c < kColumns && first_column + c < columns; c += kColumnSumThreads) {
      float sum = 0.0f;
#pragma unroll
      for (u32 w = 0; w < kWarps; ++w) sum += of_warps[w][c];
      __stcg(arguments.partials + u64(row_block) * columns + first_column + c, sum);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      u32* arrivals = arguments.arrivals + item % column_blocks;
      last = add_acquire_release(arrivals, 1) + 1 == row_blocks;
      // The next launch finds it as this one did.
      if (last) store_relaxed(arrivals, 0);
    }
    __syncthreads();
    if (last) {
      __threadfence();
      for (u32 c = first_column + threadIdx.x; c < first_column + kColumns && c < columns; c += kColumnSumThreads) {
        float sum = 0.0f;
#pragma unroll 8
        for (u32 block = 0; block < row_blocks; ++block) sum += __ldcg(arguments.partials + u64(block) * columns + c);
        dst[c] = narrow<Result>(arguments.adds ? widen(dst[c]) + sum : sum);
      }
    }
    __syncthreads();
  }
}

}  // namespace counterpoint
