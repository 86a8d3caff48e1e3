// Rows in the memories of several GPUs, fetched by plain loads between two device-side barriers: the group-reduces that `link_reduce`
// has no copies for, which are merges by logarithms and sums that round on their way, and the group-casts that `link_copy` has none for,
// whose rows round on their way or are no multiples of 16 bytes.
//
// The operands of a row are combined in the order of their ranks. All is as `row_merge`, `row_reduce` and `row_copy` do it, with the same bits.
#pragma once

#include "link_barrier.cuh"
#include "row_copy.cuh"
#include "row_merge.cuh"
#include "row_reduce.cuh"

namespace counterpoint {

// A warp waits for a peer's memory for most of its time, and blocks are few.
constexpr u32 kLinkRowThreads = 512;

// Where the operands of a rank begin: its tensors as they were announced, [rank][tensor].
struct LinkRowSources {
  const u64* tensors;
  u32 tensor;
  __device__ __forceinline__ u64 of(u32 rank) const { return tensors[rank * kLinkTensors + tensor]; }
};

// The same for pairs (out, lse), one behind the other.
struct LinkPairSources {
  const u64* tensors;
  __device__ __forceinline__ u64 out_of(u32 rank) const { return tensors[rank * kLinkTensors]; }
  __device__ __forceinline__ u64 lse_of(u32 rank) const { return tensors[rank * kLinkTensors + 1]; }
};

// `work` is given where the ranks' tensors are, [rank][tensor], and is left out when a wait gave up.
template <typename Work>
__device__ __forceinline__ void link_rows(const LinkCall& call, const Work& work) {
  __shared__ u64 tensors[kLinkRanks * kLinkTensors];
  __shared__ u32 begun;
  u64 number = 0;
  if (threadIdx.x < 32) {
    number = link_begin(call, tensors);
    if (threadIdx.x == 0) begun = number != 0;
  }
  __syncthreads();
  if (begun == 0) return;
  work(tensors);
  __syncthreads();
  if (threadIdx.x < 32) link_end(call, number);
}

// One pair; lists and shapes are those of `row_merge`.
template <typename Partial, typename Wire, typename Sum, typename Result>
__device__ __forceinline__ void link_merge(const LinkCall& call, const RowMergePiece* __restrict__ pieces,
                                           const RowMergeOperand* __restrict__ operands, u32 count, u32 heads, u32 dim,
                                           u32 accumulate, u32 packed) {
  link_rows(call, [&](const u64* tensors) {
    row_merge<Partial, Wire, Sum, Result, kLinkRowThreads>(
        LinkPairSources{tensors}, pieces, operands, reinterpret_cast<Result*>(call.own[0]),
        reinterpret_cast<float*>(call.own[1]), count, heads, dim, accumulate, packed);
  });
}

// What becomes of a tensor's elements on their way, two bits a tensor: nothing, or they are rounded, of this type.
enum LinkElements : u32 { kLinkPlain = 0, kLinkRoundedBf16 = 1, kLinkRoundedF16 = 2, kLinkRoundedF32 = 3 };

// Pieces are those of `row_copy`, whose sources are [rank][tensor]. `Wire`: what elements that are rounded are rounded to.
template <typename Wire>
__device__ __forceinline__ void link_cast(const LinkCall& call, const RowCopyPiece* __restrict__ pieces, u32 count,
                                          u32 elements) {
  link_rows(call, [&](const u64* tensors) {
    const u32 lane = threadIdx.x % 32;
    const u32 warps = gridDim.x * (kLinkRowThreads / 32);
    for (u32 i = blockIdx.x * (kLinkRowThreads / 32) + threadIdx.x / 32; i < count; i += warps) {
      const RowCopyPiece piece = pieces[i];
      const u64 from = tensors[piece.source] + piece.from, to = call.own[piece.target] + piece.to;
      const u32 kind = elements >> 2 * piece.target & 3;
      // Nothing is rounded to the widest type.
      if (sizeof(Wire) == sizeof(F32) || kind == kLinkPlain) {
        copy_unaligned(from, to, piece.bytes, lane);
      } else if (kind == kLinkRoundedF32) {
        copy_rounded<F32, Wire>(from, to, piece.bytes, lane);
      } else if (kind == kLinkRoundedF16) {
        copy_rounded<F16, Wire>(from, to, piece.bytes, lane);
      } else {
        copy_rounded<Bf16, Wire>(from, to, piece.bytes, lane);
      }
    }
  });
}

// Where the list of a tensor is; its operands are counted from the first of all.
struct LinkRowList {
  u32 begin;
  u32 count;
};

struct LinkRowLists {
  LinkRowList at[kLinkTensors];
};
static_assert(sizeof(LinkRowLists) == 104, "layouts shared with the host");

// All tensors, one behind the other; lists are those of `row_reduce`. `packed`: a bit for each tensor.
template <typename Partial, typename Wire, typename Sum, typename Result>
__device__ __forceinline__ void link_sum(const LinkCall& call, const RowReducePiece* __restrict__ pieces,
                                         const RowReduceOperand* __restrict__ operands, const LinkRowLists& lists,
                                         u32 accumulate, u32 packed) {
  link_rows(call, [&](const u64* tensors) {
    for (u32 t = 0; t < call.tensors; ++t) {
      row_reduce<Partial, Wire, Sum, Result, kLinkRowThreads>(
          LinkRowSources{tensors, t}, pieces + lists.at[t].begin, operands, reinterpret_cast<Result*>(call.own[t]),
          lists.at[t].count, accumulate, packed >> t & 1);
    }
  });
}

}  // namespace counterpoint
