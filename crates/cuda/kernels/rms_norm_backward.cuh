// The gradients of RMSNorm: with s = 1 / sqrt(mean of h's squares + epsilon) and g = dout * weight, row by row
// dh = s (g - h s^2 mean(g h)) + dsum, and the weight's is the sum over the rows of dout h s.
//
// A block takes neighbouring rows one after the other, as many as follow from the number of rows alone, and sums what they add to the
// weight's gradient in its threads; the sums of blocks are the rows of `partials`, whose columns another kernel sums (column_sum.cuh).
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kRmsNormBackwardThreads = 512;

// The kernel's parameter. Shared with the host.
struct RmsNormBackwardArguments {
  u64 dout;      // [rows, columns]
  u64 sum;       // [rows, columns]: what was normalised
  u64 weight;    // [columns], or 0 for ones
  u64 dsum;      // [rows, columns]: what is added to its gradient, or 0
  u64 dh;        // [rows, columns]: the gradient of `sum`
  u64 partials;  // [blocks, columns] of float, or 0 where no gradient of the weight is wanted
  u32 rows;
  u32 rows_each;  // of a block
  u32 columns;
  float epsilon;
};

// Two sums over a block, for all its threads.
struct RmsNormSums {
  float squares;
  float along;
};

__device__ __forceinline__ RmsNormSums rms_norm_backward_block_sums(RmsNormSums own, RmsNormSums* of_warps) {
  constexpr u32 kWarps = kRmsNormBackwardThreads / 32;
#pragma unroll
  for (u32 lanes = 16; lanes > 0; lanes /= 2) {
    own.squares += __shfl_xor_sync(0xffffffffu, own.squares, lanes);
    own.along += __shfl_xor_sync(0xffffffffu, own.along, lanes);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  RmsNormSums sums = {0.0f, 0.0f};
#pragma unroll
  for (u32 w = 0; w < kWarps; ++w) {
    sums.squares += of_warps[w].squares;
    sums.along += of_warps[w].along;
  }
  return sums;
}

// As many blocks as there are blocks of `rows_each` rows. Rows of tensors are multiples of kPack elements.
//
// Of a row up to kRmsNormBackwardThreads * kPack * kKept columns stay in registers between the sums and the gradient, as do their partial sums of
// the weight's gradient from row to row. What is beyond is read twice, and its partial sums lie in `partials`: each thread has its own.
//
// Long: three passes over a row that stays in registers.
template <typename T, u32 kPack>
__device__ __forceinline__ void rms_norm_backward(const RmsNormBackwardArguments& arguments) {
  constexpr u32 kKept = 2;
  constexpr u32 kStep = kRmsNormBackwardThreads * kPack;  // columns from one pack of a thread to the next
  using Values = Pack<T, kPack>;
  using Partials = Pack<float, kPack>;
  __shared__ RmsNormSums of_warps[kRmsNormBackwardThreads / 32];
  const u32 columns = arguments.columns;
  const T* weight = reinterpret_cast<const T*>(arguments.weight);
  const T* added = reinterpret_cast<const T*>(arguments.dsum);
  float* partials = reinterpret_cast<float*>(arguments.partials);
  if (partials != nullptr) partials += u64(blockIdx.x) * columns;
  const u32 first = threadIdx.x * kPack;
  const u32 first_row = blockIdx.x * arguments.rows_each;
  const u32 end = min(first_row + arguments.rows_each, arguments.rows);
  const auto load_weight = [&](u32 column) {
    Values w;
    if (weight != nullptr) w = load_pack<T, kPack>(weight + column);
    return w;
  };
  // The gradient of what was normalised and multiplied by the weight.
  const auto of_element = [&](T dout, T w) { return weight != nullptr ? widen(dout) * widen(w) : widen(dout); };
  Partials own_sums[kKept] = {};
  for (u32 row = first_row; row < end; ++row) {
    const u64 begin = u64(row) * columns;
    const T* dout = reinterpret_cast<const T*>(arguments.dout) + begin;
    const T* h = reinterpret_cast<const T*>(arguments.sum) + begin;
    T* dh = reinterpret_cast<T*>(arguments.dh) + begin;
    Values x[kKept], d[kKept], other[kKept];
    RmsNormSums own = {0.0f, 0.0f};
    const auto sum_up = [&](const Values& x, const Values& d, u32 column) {
      const Values w = load_weight(column);
#pragma unroll
      for (u32 e = 0; e < kPack; ++e) {
        own.squares += widen(x.at[e]) * widen(x.at[e]);
        own.along += of_element(d.at[e], w.at[e]) * widen(x.at[e]);
      }
    };
#pragma unroll
    for (u32 i = 0; i < kKept; ++i) {
      const u32 column = first + i * kStep;
      if (column >= columns) continue;
      x[i] = load_pack<T, kPack>(h + column);
      d[i] = load_pack<T, kPack>(dout + column);
      if (added != nullptr) other[i] = load_pack<T, kPack>(added + begin + column);
    }
#pragma unroll
    for (u32 i = 0; i < kKept; ++i) {
      if (first + i * kStep < columns) sum_up(x[i], d[i], first + i * kStep);
    }
    for (u32 column = kKept * kStep + first; column < columns; column += kStep) {
      sum_up(load_pack<T, kPack>(h + column), load_pack<T, kPack>(dout + column), column);
    }
    const RmsNormSums sums = rms_norm_backward_block_sums(own, of_warps);
    const float scale = 1.0f / sqrtf(sums.squares / float(columns) + arguments.epsilon);
    const float along = sums.along / float(columns) * scale * scale;
    const auto finish = [&](const Values& x, const Values& d, const Values& other, u32 column, Partials& sums) {
      const Values w = load_weight(column);
      Values result;
#pragma unroll
      for (u32 e = 0; e < kPack; ++e) {
        const float own = scale * (of_element(d.at[e], w.at[e]) - widen(x.at[e]) * along);
        result.at[e] = narrow<T>(added != nullptr ? own + widen(other.at[e]) : own);
        sums.at[e] += widen(d.at[e]) * widen(x.at[e]) * scale;
      }
      store_pack(dh + column, result);
    };
#pragma unroll
    for (u32 i = 0; i < kKept; ++i) {
      if (first + i * kStep < columns) finish(x[i], d[i], other[i], first + i * kStep, own_sums[i]);
    }
    for (u32 column = kKept * kStep + first; column < columns; column += kStep) {
      Values beyond;
      if (added != nullptr) beyond = load_pack<T, kPack>(added + begin + column);
      Partials sums = {};
      if (partials != nullptr && row > first_row) sums = load_pack<float, kPack>(partials + column);
      finish(load_pack<T, kPack>(h + column), load_pack<T, kPack>(dout + column), beyond, column, sums);
      if (partials != nullptr) store_pack(partials + column, sums);
    }
  }
  if (partials == nullptr) return;
#pragma unroll
  for (u32 i = 0; i < kKept; ++i) {
    if (first + i * kStep < columns) store_pack(partials + first + i * kStep, own_sums[i]);
  }
}

}  // namespace counterpoint
