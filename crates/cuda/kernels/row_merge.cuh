// Partial results of attention, (out, lse) pairs over disjoint columns, merged into their owner's rows: the receiving end of
// a group-reduce of logarithms.
//
// The operands of a row are merged one after the other in the order of the list, which is that of their ranks.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kRowMergeThreads = 256;
constexpr u32 kRowMergeSources = 128;
// Heads of a row that a warp merges before it looks for more.
constexpr u32 kRowMergeHeads = 4;
// Elements of one row and head that a lane holds at once.
constexpr u32 kRowMergeHeld = 4;

// Where every rank's partial results begin.
struct RowMergeSources {
  u64 out[kRowMergeSources];
  u64 lse[kRowMergeSources];
  __device__ __forceinline__ u64 out_of(u32 source) const { return out[source]; }
  __device__ __forceinline__ u64 lse_of(u32 source) const { return lse[source]; }
};

// Rows with the same operands: several where they have few heads. A warp merges `kRowMergeHeads` heads of them at once.
struct RowMergePiece {
  u32 to;  // first row
  u32 rows;
  u32 operand_begin;
  u32 operand_end;
};

struct RowMergeOperand {
  u32 from;  // first row
  u32 source;
};
static_assert(sizeof(RowMergePiece) == 16 && sizeof(RowMergeOperand) == 8, "layouts shared with the host");

struct MergeWeights {
  float lse;
  float own;
  float other;
};

// logaddexp(a, b) and the weights of the two sides. As `max + ln(1 + exp(min - max))` nothing overflows, and a side with -inf
// leaves the other's bits alone. Both -inf: -inf, and both weights 0 instead of NaN.
__device__ __forceinline__ MergeWeights merge_weights(float a, float b) {
  const float high = a > b ? a : b;
  const float low = a > b ? b : a;
  if (high == minus_infinity()) return {high, 0.0f, 0.0f};
  const float lse = high + log1pf(expf(low - high));
  return {lse, expf(a - lse), expf(b - lse)};
}

// A side of weight 0 counts for nothing, whatever it holds.
__device__ __forceinline__ float weigh(float weight, float value) { return weight == 0.0f ? 0.0f : weight * value; }

// What a lane holds of one operand of a row and head: `kPack` neighbouring elements as often as `kHeld` says. Widened at once: as 16-bit
// elements they would be taken apart in memory.
template <typename Partial, u32 kPack>
struct MergeOperand {
  static constexpr u32 kHeld = kRowMergeHeld / kPack;
  float lse;
  float values[kHeld][kPack];

  // Columns from `first` on, of row and head `at` of the operand's rows.
  template <typename Sources>
  __device__ __forceinline__ void load(const Sources& sources, RowMergeOperand operand, u64 at, u32 heads, u32 dim,
                                       u32 first) {
    const u64 from = u64(operand.from) * heads + at;
    lse = reinterpret_cast<const float*>(sources.lse_of(operand.source))[from];
    const Partial* out = reinterpret_cast<const Partial*>(sources.out_of(operand.source)) + from * dim;
#pragma unroll
    for (u32 h = 0; h < kHeld; ++h) {
      const u32 column = first + 32 * h * kPack;
      if (column < dim) {
        const Pack<Partial, kPack> pack = load_pack<Partial, kPack>(out + column);
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) values[h][e] = widen(pack.at[e]);
      }
    }
  }
};

// One row and head; heads longer than what a warp holds take several passes. An operand's rows are on their way while the one
// before is merged: the chain of logarithms and weights is longer than memory's latency allows.
template <typename Partial, typename Wire, typename Sum, typename Result, u32 kPack, typename Sources>
__device__ __forceinline__ void merge_head(const Sources& sources, const RowMergePiece& piece,
                                           const RowMergeOperand* __restrict__ operands, Result* result,
                                           float* result_lse, u64 at, u32 heads, u32 dim, bool accumulate, u32 lane) {
  using Operand = MergeOperand<Partial, kPack>;
  constexpr u32 kHeld = Operand::kHeld;
  const u64 to = u64(piece.to) * heads + at;
  float own_lse = minus_infinity();
  if (accumulate) own_lse = through<Sum>(result_lse[to]);
  float lse = own_lse;
  for (u32 begin = 0; begin < dim; begin += 32 * kRowMergeHeld) {
    const u32 first = begin + lane * kPack;
    Operand next;
    if (piece.operand_begin < piece.operand_end) {
      next.load(sources, operands[piece.operand_begin], at, heads, dim, first);
    }
    lse = own_lse;
    float sums[kHeld][kPack] = {};
    if (accumulate) {
#pragma unroll
      for (u32 h = 0; h < kHeld; ++h) {
        const u32 column = first + 32 * h * kPack;
        if (column < dim) {
          const Pack<Result, kPack> own = load_pack<Result, kPack>(result + to * dim + column);
#pragma unroll
          for (u32 e = 0; e < kPack; ++e) sums[h][e] = through<Sum>(widen(own.at[e]));
        }
      }
    }
#pragma unroll 1
    for (u32 o = piece.operand_begin; o < piece.operand_end; ++o) {
      const Operand operand = next;
      if (o + 1 < piece.operand_end) next.load(sources, operands[o + 1], at, heads, dim, first);
      const MergeWeights weights = merge_weights(lse, through<Sum>(operand.lse));
      lse = through<Sum>(weights.lse);
#pragma unroll
      for (u32 h = 0; h < kHeld; ++h) {
        if (first + 32 * h * kPack < dim) {
#pragma unroll
          for (u32 e = 0; e < kPack; ++e) {
            const float value = through<Sum>(through<Wire>(operand.values[h][e]));
            sums[h][e] = through<Sum>(weigh(weights.own, sums[h][e]) + weigh(weights.other, value));
          }
        }
      }
    }
#pragma unroll
    for (u32 h = 0; h < kHeld; ++h) {
      const u32 column = first + 32 * h * kPack;
      if (column < dim) {
        Pack<Result, kPack> merged;
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) merged.at[e] = narrow<Result>(sums[h][e]);
        store_pack(result + to * dim + column, merged);
      }
    }
  }
  // Every lane has read the row's own logarithm.
  __syncwarp();
  if (lane == 0) result_lse[to] = lse;
}

// Any number of blocks of `kThreads`. `Sources` says where the operands of each source begin. `result_lse` and the operands' are
// [rows, heads], the others [rows, heads, dim]. `packed`: every address is aligned to 16 bytes, `dim` is a multiple of 4.
template <typename Partial, typename Wire, typename Sum, typename Result, u32 kThreads = kRowMergeThreads, typename Sources>
__device__ __forceinline__ void row_merge(const Sources& sources, const RowMergePiece* __restrict__ pieces,
                                          const RowMergeOperand* __restrict__ operands, Result* result,
                                          float* result_lse, u32 count, u32 heads, u32 dim, u32 accumulate,
                                          u32 packed) {
  const u32 lane = threadIdx.x % 32;
  const u32 warps = gridDim.x * (kThreads / 32);
  const u32 passes = heads > kRowMergeHeads ? (heads + kRowMergeHeads - 1) / kRowMergeHeads : 1;
  for (u64 i = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; i < u64(count) * passes; i += warps) {
    const RowMergePiece piece = pieces[i / passes];
    // A piece of more than one row has one pass.
    const u32 begin = u32(i % passes) * kRowMergeHeads;
    const u32 end = passes == 1 ? piece.rows * heads : min(begin + kRowMergeHeads, heads);
    for (u32 at = begin; at < end; ++at) {
      if (packed) {
        merge_head<Partial, Wire, Sum, Result, 4>(sources, piece, operands, result, result_lse, at, heads, dim,
                                                  accumulate, lane);
      } else {
        merge_head<Partial, Wire, Sum, Result, 1>(sources, piece, operands, result, result_lse, at, heads, dim,
                                                  accumulate, lane);
      }
    }
  }
}

}  // namespace counterpoint
