// Attention backward for Hopper: dk, dv of the keys that a CTA owns, and its partial sums of dq.
//
// A CTA takes items (a tile of 128 keys, a key head) from a queue. It holds K and V in shared memory and loops over the
// blocks of query rows that see the tile, for every query head of the key head, so dk and dv stay in registers until
// the item ends.
//
// Four warpgroups:
//  - two "key" warpgroups own 64 keys each (backward_keys.cuh). All their products have keys as rows: S^T = K Q^T,
//    dP^T = V dO^T, and then P^T and dS^T are in registers just as operand A of dV += P^T dO and dK += dS^T Q wants them.
//  - a "query" warpgroup computes dQ^T = K^T dS^T of each block from the dS^T that the key warpgroups leave in shared
//    memory (backward_queries.cuh). So the key warpgroups wait for nobody's dq, have no registers for it, and are free to
//    drift apart: one's exponentials run under the other's products.
//    While it waits for dS, it rounds dq of rows that all tiles have added to (backward_rounding.cuh).
//  - one has a thread that loads and one that adds dq to global memory, both by TMA (backward_dq.cuh), and a warp that
//    counts what was added; or, where the order of additions is fixed, two threads that add and count (backward_dq_order.cuh). Another one finds
//    rows that can be rounded.
//
// The order in a key warpgroup, block after block: S; P; dP and dV are issued together, and dS is computed as soon as
// dP is there; dK. P is packed before dP begins, because registers do not hold S, dP, dK and dV at a time.
#pragma once

#include "attention/backward_dq.cuh"
#include "attention/backward_keys.cuh"
#include "attention/backward_queries.cuh"
#include "attention/backward_dq_order.cuh"

namespace counterpoint {

// The body of the kernel, which is launched with kThreads threads and a Storage of dynamic shared memory, one CTA a multiprocessor
// at most.
template <typename C>
__device__ __forceinline__ void attention_backward(const BackwardParams<C>& params) {
  using namespace backward;
  Storage<C>& shared = *reinterpret_cast<Storage<C>*>(dynamic_shared);
  if (threadIdx.x == 0) shared.initialise();
  __syncthreads();
  const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_decrease<C::kLoadRegisters>();
    if (threadIdx.x == 0) load_role(params, shared);
    if constexpr (C::kFixedOrder) {
      const u32 adder = threadIdx.x / 32 - 1;
      if (threadIdx.x % 32 == 0 && adder < C::kAdders) add_in_order_role(params, shared, adder);
    } else {
      if (threadIdx.x == 32) add_role(params, shared);
      if (threadIdx.x / 32 == 2) count_role(params, shared);
    }
    if (threadIdx.x == 96) find_role(params, shared);
  } else if (warpgroup == 1) {
    registers_decrease<C::kQueryRegisters>();
    query_role(params, shared);
    if (threadIdx.x == 128) leave_queue(params.all);
  } else {
    registers_increase<C::kKeyRegisters>();
    key_role(params, shared, warpgroup - 2);
    gradients_arrive(params);
    round_role(params);
  }
}

}  // namespace counterpoint
