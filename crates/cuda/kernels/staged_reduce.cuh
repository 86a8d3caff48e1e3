// Partial results of rows in this GPU's own memory, where others' copy engines have put them, summed into their owner's rows by a
// few multiprocessors that a product leaves free.
//
// A multiprocessor gets as much from L2 as it has on its way. Registers hold 70 KB of that, its shared memory 190: so TMA
// fetches, as in `link_reduce`, whose bits and lists these are. Nothing here waits for a link, so what one team adds, operand by operand,
// is not enough: several take pieces one by one.
#pragma once

#include "link_reduce.cuh"

namespace counterpoint {

// One call.
struct StagedCall {
  u64 sources[kLinkRanks * kLinkTensors];  // where partial results lie, [rank][tensor]
  u64 own[kLinkTensors];                   // the results
};

// As `link_reduce`, of a launch that begins when all operands are there.
template <typename C>
__device__ __forceinline__ void staged_reduce(const StagedCall& call, const LinkReducePiece* __restrict__ pieces,
                                              const LinkFetch* __restrict__ fetches,
                                              const LinkBlock* __restrict__ blocks, u32 accumulate) {
  extern __shared__ __align__(128) u8 shared_bytes[];
  LinkReduceShared<C>& shared = *reinterpret_cast<LinkReduceShared<C>*>(shared_bytes);
  const LinkBlock begin = blocks[blockIdx.x];
  const LinkBlock end = blocks[blockIdx.x + 1];
  if (threadIdx.x == 0) link_stages_init(shared);
  for (u32 i = threadIdx.x; i < kLinkRanks * kLinkTensors; i += blockDim.x) shared.tensors[i] = call.sources[i];
  __syncthreads();
  if (threadIdx.x >= 32 * C::kFetchers) {
    if (begin.pieces == end.pieces) return;
    link_add<C>(call, shared, pieces, pieces[begin.pieces], begin.pieces, end.pieces, accumulate);
  } else {
    const LinkFetches<C> mine(fetches, begin.fetches, end.fetches, uniform(threadIdx.x / 32));
    link_fetch(call, shared, mine, mine.from(0));
  }
}

}  // namespace counterpoint
