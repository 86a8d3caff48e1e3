// Additions to dq in a fixed order, so that two runs give the same bits: of the key tiles that add to a block of rows, each waits
// until as many have added as come before it in the order.
//
// Additions of a few microseconds' latency follow one another from CTA to CTA. So that a CTA does not wait for the end of its own
// before it begins the next, several threads add, block by block alternately. Who comes before `ordered_from` does not
// wait: nothing but zero is there, or one other's partial sum, and two summands have one sum in either order.
#pragma once

#include "attention/backward_dq.cuh"
#include "ptx/flag.cuh"
#include "wait_limit.cuh"

namespace counterpoint {

namespace backward {

// What counts the additions to a step's rows.
template <typename C>
__device__ __forceinline__ u32* order_counter(const BackwardParams<C>& params, const Step& step) {
  return params.order.added + u64(step.counter) * (params.all.heads_kv * params.all.group) + step.head_q;
}

// Waits until `order` others have added.
template <typename C>
__device__ __forceinline__ void await_order(const BackwardParams<C>& params, const u32* counter, u32 order) {
  if (order < params.order.ordered_from) return;
  // Not until there are exactly so many: those that come later wait for this one.
  await_value(counter, order, params.all.wait);
}

// A thread that adds to dq every kAdders-th of what the query warpgroup leaves in shared memory, `adder` first.
template <typename C>
__device__ __forceinline__ void add_in_order_role(const BackwardParams<C>& params, Storage<C>& shared, u32 adder) {
  for (u32 count = adder;; count += C::kAdders) {
    mbarrier_wait(&shared.full_dq[dq_slot_of<C>(count, 0)], dq_parity_of<C>(count, 0));
    // Read before the buffers are free, after which the place is another step's.
    const Step& step = shared.steps[count % kSteps];
    const u32 flags = step.flags;
    if (flags & kExit) break;
    const bool rows = !(flags & kEmpty);
    const u32 slab = u32(step.row) / C::kRows;
    const u32 head = step.head_q;
    const u32 added = u32(step.row_end - step.row);
    u32* counter = order_counter(params, step);
    if (rows) await_order(params, counter, step.order);
#pragma unroll 1
    for (u32 part = 0; part < C::kParts; ++part) {
      const u32 buffer = dq_slot_of<C>(count, part);
      if (part > 0) mbarrier_wait(&shared.full_dq[buffer], dq_parity_of<C>(count, part));
      if (rows) add_part(params, shared, step, part, buffer);
      tma_store_commit();
      if (part > 0) {
        tma_store_wait_read<1>();
        mbarrier_arrive(&shared.empty_dq[buffer - 1]);
      }
    }
    tma_store_wait_read<0>();
    mbarrier_arrive(&shared.empty_dq[dq_slot_of<C>(count, C::kParts - 1)]);
    if (!rows) continue;
    // The additions are done: the next tile may add.
    tma_store_wait<0>();
    fence_device();
    add_relaxed(counter, 1);
    if (params.rounding.rounded_dq != nullptr) count_added(params, slab, head, added);
  }
}

}  // namespace backward

}  // namespace counterpoint
