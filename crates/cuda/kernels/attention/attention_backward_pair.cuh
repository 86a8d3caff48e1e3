// Attention backward for Hopper and heads of more than 128 elements: as attention_backward.cuh, but two CTAs share a tile.
//
// dk and dv of 128 keys would take all registers of a multiprocessor, so each CTA of a cluster of two owns 64 of a tile's
// keys. Rows of queries are fetched once for both, each CTA fetching half of a block's rows. dQ is summed over the keys of
// both before it leaves: they send each other dS, and each computes half of dQ's columns.
//
// Four warpgroups in each CTA:
//  - one computes S^T = K Q^T and P, and owns dv: dV += P^T dO, P^T from its registers (backward_pair_keys.cuh);
//  - one computes dP^T = V dO^T and dS, and owns dk: dK += dS^T Q, dS^T from its registers. It gets P from the first, in
//    shared memory, and puts dS there;
//  - one computes dQ^T = K^T dS^T (backward_pair_queries.cuh);
//  - one has a thread that loads, and a thread that adds dq to global memory, both by TMA. The first CTA's
//    loading thread goes through the schedule and announces each step to both.
//
// dq is rounded by a pass of its own, not by CTAs that have run out of work as in backward_dq.cuh.
#pragma once

#include "attention/backward_pair_keys.cuh"
#include "attention/backward_pair_queries.cuh"

namespace counterpoint {

// The body of the kernel, which is launched in clusters of two CTAs of kThreads threads and a Storage of dynamic shared memory.
template <typename C>
__device__ __forceinline__ void attention_backward_pair(const BackwardParams<C>& params) {
  using namespace backward_pair;
  backward_pair::Storage<C>& shared = *reinterpret_cast<backward_pair::Storage<C>*>(dynamic_shared);
  if (threadIdx.x == 0) shared.initialise();
  __syncthreads();
  cluster_sync();
  const u32 rank = cluster_rank();
  const u32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    registers_decrease<C::kLoadRegisters>();
    if (threadIdx.x == 0) load_role(params, shared, rank);
    if (threadIdx.x == 32) add_role(params, shared, rank);
  } else if (warpgroup == 1) {
    registers_decrease<C::kQueryRegisters>();
    query_role(params, shared, rank);
    if (threadIdx.x == 128) leave_queue(params.all);
  } else {
    registers_increase<C::kKeyRegisters>();
    if (warpgroup == 2) {
      value_role(params, shared);
    } else {
      key_role(params, shared);
    }
    gradients_arrive(params);
  }
  // Nobody leaves while the other CTA may still write to its shared memory.
  cluster_sync();
}

}  // namespace counterpoint
