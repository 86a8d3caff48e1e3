// Partial results of rows in the memories of several GPUs, combined into their owner's rows by plain loads between two device-side
// barriers: the group-reduces that `link_reduce` has no copies for, which are merges by logarithms and sums that round on their way.
//
// The operands of a row are combined in the order of their ranks, as `row_merge` and `row_reduce` do, and with the same bits.
#pragma once

#include "link_barrier.cuh"
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
