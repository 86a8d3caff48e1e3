// RMSNorm of rows that come in pieces, where there is one with a residual in front of it (Zhang and Sennrich, arXiv 1910.07467): what
// undoes the order in which groups of rows have travelled, in the pass that a transformer needs anyway.
//
// A block takes a row at a time. What is normalised is the sum as it is stored, so the bits are those of two operations.
#pragma once

#include "ptx/barrier.cuh"
#include "row_pieces.cuh"
#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kRmsNormThreads = 512;

// The kernel's parameter in addition to the sources. Shared with the host.
struct RmsNormArguments {
  const RowPiece* pieces;  // one after the other
  u64 residual;                // [rows, columns], or 0
  u64 sum;                     // [rows, columns]: what is normalised, rows and residual together
  u64 weight;                  // [columns], or 0 for ones
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

// Any number of blocks, at most as many as rows. Rows of tensors are multiples of kPack elements.
//
// A row takes two flights to memory, whatever its length is up to kRmsNormThreads * kPack * kKept columns: all loads of a thread are begun
// before the first is used, and what it has of the row stays in registers while the mean is found.
template <typename T, u32 kPack>
__device__ __forceinline__ void rms_norm(const RowSources& sources, const RmsNormArguments& arguments) {
  constexpr u32 kKept = 2;
  constexpr u32 kStep = kRmsNormThreads * kPack;  // columns from one pack of a thread to the next
  __shared__ float of_warps[kRmsNormThreads / 32];
  const u32 columns = arguments.columns;
  const T* residual = reinterpret_cast<const T*>(arguments.residual);
  T* sums = reinterpret_cast<T*>(arguments.sum);
  const T* weight = reinterpret_cast<const T*>(arguments.weight);
  T* out = reinterpret_cast<T*>(arguments.out);
  let_dependents_start();
  u32 p = 0;
  const auto piece_of = [&](u32 row) {
    while (row >= arguments.pieces[p].end) ++p;
    return arguments.pieces[p];
  };
  // The list has been there since the kernel was made ready.
  RowPiece piece = piece_of(blockIdx.x);
  wait_for_previous();
  for (u32 row = blockIdx.x; row < arguments.rows; row += gridDim.x) {
    if (row >= piece.end) piece = piece_of(row);
    const T* from = piece.row<T>(sources, row, columns);
    const u64 begin = u64(row) * columns;
    const u32 first = threadIdx.x * kPack;
    Pack<T, kPack> x[kKept], weights[kKept];
    float squares = 0.0f;
    // The beginning of the row, which is kept, comes last.
    for (u32 span = (columns - 1) / (kKept * kStep) + 1; span-- > 0;) {
      const u32 at = span * kKept * kStep + first;
      Pack<T, kPack> added[kKept];
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) {
        const u32 column = at + i * kStep;
        if (column >= columns) continue;
        x[i] = load_pack<T, kPack>(from + column);
        if (residual != nullptr) added[i] = load_pack<T, kPack>(residual + begin + column);
        if (span == 0 && weight != nullptr) weights[i] = load_pack<T, kPack>(weight + column);
      }
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) {
        const u32 column = at + i * kStep;
        if (column >= columns) continue;
        if (residual != nullptr) {
#pragma unroll
          for (u32 e = 0; e < kPack; ++e) x[i].at[e] = narrow<T>(widen(x[i].at[e]) + widen(added[i].at[e]));
        }
        store_pack(sums + begin + column, x[i]);
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) squares += widen(x[i].at[e]) * widen(x[i].at[e]);
      }
    }
    const float mean = rms_norm_block_sum(squares, of_warps) / float(columns);
    const float scale = 1.0f / sqrtf(mean + arguments.epsilon);
    const auto store = [&](u32 column, const Pack<T, kPack>& summed, const Pack<T, kPack>& w) {
      Pack<T, kPack> y;
#pragma unroll
      for (u32 e = 0; e < kPack; ++e) {
        const float normalised = widen(summed.at[e]) * scale;
        y.at[e] = narrow<T>(weight != nullptr ? normalised * widen(w.at[e]) : normalised);
      }
      store_pack(out + begin + column, y);
    };
#pragma unroll
    for (u32 i = 0; i < kKept; ++i) {
      if (first + i * kStep < columns) store(first + i * kStep, x[i], weights[i]);
    }
    // What did not fit, which each thread has written before, so that it is in the nearest cache.
    for (u32 column = kKept * kStep + first; column < columns; column += kStep) {
      Pack<T, kPack> w;
      if (weight != nullptr) w = load_pack<T, kPack>(weight + column);
      store(column, load_pack<T, kPack>(sums + begin + column), w);
    }
  }
}

}  // namespace counterpoint
