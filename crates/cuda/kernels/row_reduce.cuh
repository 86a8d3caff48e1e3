// Partial results of rows, summed into their owner's rows: the receiving end of a group-reduce.
//
// The operands of an element are added one after the other in the order of the list, which is that of their ranks, so a
// result has the same bits every time.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kRowReduceThreads = 256;
constexpr u32 kRowReduceSources = 256;

// Where every rank's partial results begin.
struct RowReduceSources {
  u64 at[kRowReduceSources];
};

// Elements that lie together and have the same operands; a warp sums them.
struct RowReducePiece {
  u64 to;  // first element
  u32 count;
  u32 operand_begin;
  u32 operand_end;
  u32 divisor;  // 1 for a sum, the number of operands for their mean
};

struct RowReduceOperand {
  u64 from;  // first element
  u32 source;
  u32 reserved;
};
static_assert(sizeof(RowReducePiece) == 24 && sizeof(RowReduceOperand) == 16, "layouts shared with the host");

// `Partial`: of the operands. `Wire`: on their way. `Sum`: in which they are combined, each step rounded. `Result`: of `result`.
template <typename Partial, typename Wire, typename Sum, typename Result, u32 kPack>
__device__ __forceinline__ void reduce_piece(const RowReduceSources& sources, const RowReducePiece& piece,
                                             const RowReduceOperand* __restrict__ operands, Result* result,
                                             bool accumulate, u32 lane) {
  constexpr u32 kUnroll = kPack == 1 ? 1 : 4;
  const u32 packs = piece.count / kPack;
  for (u32 first = lane; first < packs; first += 32 * kUnroll) {
    float sums[kUnroll][kPack] = {};
#pragma unroll
    for (u32 u = 0; u < kUnroll; ++u) {
      const u32 pack = first + 32 * u;
      if (accumulate && pack < packs) {
        const Pack<Result, kPack> own = load_pack<Result, kPack>(result + piece.to + u64(pack) * kPack);
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) sums[u][e] = through<Sum>(widen(own.at[e]));
      }
    }
    for (u32 o = piece.operand_begin; o < piece.operand_end; ++o) {
      const RowReduceOperand operand = operands[o];
      const Partial* from = reinterpret_cast<const Partial*>(sources.at[operand.source]) + operand.from;
#pragma unroll
      for (u32 u = 0; u < kUnroll; ++u) {
        const u32 pack = first + 32 * u;
        if (pack < packs) {
          const Pack<Partial, kPack> term = load_pack<Partial, kPack>(from + u64(pack) * kPack);
#pragma unroll
          for (u32 e = 0; e < kPack; ++e) {
            sums[u][e] = through<Sum>(sums[u][e] + through<Sum>(through<Wire>(widen(term.at[e]))));
          }
        }
      }
    }
#pragma unroll
    for (u32 u = 0; u < kUnroll; ++u) {
      const u32 pack = first + 32 * u;
      if (pack < packs) {
        Pack<Result, kPack> out;
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) {
          float sum = sums[u][e];
          if (piece.divisor != 1) sum = through<Sum>(__fdiv_rn(sum, float(piece.divisor)));
          out.at[e] = narrow<Result>(sum);
        }
        store_pack(result + piece.to + u64(pack) * kPack, out);
      }
    }
  }
}

// Any number of blocks. `packed`: every address is aligned to 16 bytes, every offset and count is a multiple of 4 elements.
template <typename Partial, typename Wire, typename Sum, typename Result>
__device__ __forceinline__ void row_reduce(const RowReduceSources& sources, const RowReducePiece* __restrict__ pieces,
                                           const RowReduceOperand* __restrict__ operands, Result* result, u32 count,
                                           u32 accumulate, u32 packed) {
  const u32 lane = threadIdx.x % 32;
  const u32 warps = gridDim.x * (kRowReduceThreads / 32);
  for (u32 i = blockIdx.x * (kRowReduceThreads / 32) + threadIdx.x / 32; i < count; i += warps) {
    const RowReducePiece piece = pieces[i];
    if (packed) {
      reduce_piece<Partial, Wire, Sum, Result, 4>(sources, piece, operands, result, accumulate, lane);
    } else {
      reduce_piece<Partial, Wire, Sum, Result, 1>(sources, piece, operands, result, accumulate, lane);
    }
  }
}

}  // namespace counterpoint
