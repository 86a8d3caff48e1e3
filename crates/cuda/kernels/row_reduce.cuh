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
  __device__ __forceinline__ u64 of(u32 source) const { return at[source]; }
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

// The values of one operand, or zeros past the end.
template <typename Partial, u32 kUnroll, u32 kPack>
__device__ __forceinline__ void load_values(Pack<Partial, kPack> (&values)[kUnroll], const Partial* from, u32 first, u32 packs) {
#pragma unroll
  for (u32 u = 0; u < kUnroll; ++u) {
    const u32 pack = first + 32 * u;
    if (pack < packs) values[u] = load_pack<Partial, kPack>(from + u64(pack) * kPack);
  }
}

// `Partial`: of the operands. `Wire`: on their way. `Sum`: in which they are combined, each step rounded. `Result`: of `result`.
//
// Under a product there are few multiprocessors, and what each has on its way is what counts: the loads of two operands are
// begun before the first is added.
template <typename Partial, typename Wire, typename Sum, typename Result, u32 kPack, typename Sources>
__device__ __forceinline__ void reduce_piece(const Sources& sources, const RowReducePiece& piece,
                                             const RowReduceOperand* __restrict__ operands, Result* result,
                                             bool accumulate, u32 lane) {
  // As many as registers allow.
  constexpr u32 kUnroll = kPack == 1 ? 1 : sizeof(Result) > sizeof(Partial) ? 2 : sizeof(Partial) == 2 ? 3 : 4;
  const u32 packs = piece.count / kPack;
  const auto operand_at = [&](u32 operand) {
    const RowReduceOperand from = operands[operand];
    return reinterpret_cast<const Partial*>(sources.of(from.source)) + from.from;
  };
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
    const auto add = [&](const Pack<Partial, kPack> (&values)[kUnroll]) {
#pragma unroll
      for (u32 u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) {
          sums[u][e] = through<Sum>(sums[u][e] + through<Sum>(through<Wire>(widen(values[u].at[e]))));
        }
      }
    };
    u32 o = piece.operand_begin;
#pragma unroll 1
    for (; o + 1 < piece.operand_end; o += 2) {
      Pack<Partial, kPack> one[kUnroll] = {}, other[kUnroll] = {};
      const Partial* from = operand_at(o);
      const Partial* next = operand_at(o + 1);
      load_values(one, from, first, packs);
      load_values(other, next, first, packs);
      add(one);
      add(other);
    }
    if (o < piece.operand_end) {
      Pack<Partial, kPack> one[kUnroll] = {};
      load_values(one, operand_at(o), first, packs);
      add(one);
    }
    // Tested once: a test at each element takes longer than all else that is done with it.
    if (piece.divisor != 1) {
#pragma unroll
      for (u32 u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) sums[u][e] = through<Sum>(__fdiv_rn(sums[u][e], float(piece.divisor)));
      }
    }
#pragma unroll
    for (u32 u = 0; u < kUnroll; ++u) {
      const u32 pack = first + 32 * u;
      if (pack < packs) {
        Pack<Result, kPack> out;
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) out.at[e] = narrow<Result>(sums[u][e]);
        store_pack(result + piece.to + u64(pack) * kPack, out);
      }
    }
  }
}

// Any number of blocks of `kThreads`. `Sources` says where the operands of each source begin. `packed`: every address is aligned to
// 16 bytes, every offset and count is a multiple of 8 elements.
template <typename Partial, typename Wire, typename Sum, typename Result, u32 kThreads = kRowReduceThreads, typename Sources>
__device__ __forceinline__ void row_reduce(const Sources& sources, const RowReducePiece* __restrict__ pieces,
                                           const RowReduceOperand* __restrict__ operands, Result* result, u32 count,
                                           u32 accumulate, u32 packed) {
  const u32 lane = threadIdx.x % 32;
  const u32 warps = gridDim.x * (kThreads / 32);
  for (u32 i = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; i < count; i += warps) {
    const RowReducePiece piece = pieces[i];
    if (packed) {
      reduce_piece<Partial, Wire, Sum, Result, 16 / sizeof(Partial)>(sources, piece, operands, result, accumulate, lane);
    } else {
      reduce_piece<Partial, Wire, Sum, Result, 1>(sources, piece, operands, result, accumulate, lane);
    }
  }
}

}  // namespace counterpoint
