// The sums of dq in attention backward: TMA adds to them, one thread at a time where the order of additions is not fixed. What is
// summed is rounded by others (backward_rounding.cuh).
#pragma once

#include "attention/backward_rounding.cuh"
#include "ptx/barrier.cuh"

namespace counterpoint {

namespace backward {

// Adds a part of a step's dq, from its buffer.
template <typename C>
__device__ __forceinline__ void add_part(const BackwardParams<C>& params, Storage<C>& shared, const Step& step,
                                         u32 part, u32 buffer) {
  const u32 column = 64 * (part % C::kChunks);
  const i32 row = step.row + i32(64 * (part / C::kChunks));
#pragma unroll 1
  for (u32 box = 0; box < 2; ++box) {
    tma_reduce_add_3d(&params.all.dq, shared.dq[buffer] + box * (64 * 128), column + 32 * box, step.head_q, row);
  }
}

template <typename C>
__device__ __forceinline__ void announce_added(Storage<C>& shared, u32 count, const AddedItem& item) {
  mbarrier_wait(&shared.empty_added[slot_of(count)], parity_of(count) ^ 1);
  shared.added[slot_of(count)] = item;
  mbarrier_arrive(&shared.full_added[slot_of(count)]);
}

// The thread that adds to dq what the query warpgroup leaves in shared memory, whoever else adds when.
template <typename C>
__device__ __forceinline__ void add_role(const BackwardParams<C>& params, Storage<C>& shared) {
  u32 items = 0;  // that have something to see
  for (u32 count = 0;; ++count) {
    mbarrier_wait(&shared.full_dq[dq_slot_of<C>(count, 0)], dq_parity_of<C>(count, 0));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & kExit) break;
    const bool rows = !(step.flags & kEmpty);
#pragma unroll 1
    for (u32 part = 0; part < C::kParts; ++part) {
      const u32 buffer = dq_slot_of<C>(count, part);
      if (part > 0) mbarrier_wait(&shared.full_dq[buffer], dq_parity_of<C>(count, part));
      if (rows) add_part(params, shared, step, part, buffer);
      tma_store_commit();
      // The buffer before this one has been read by now.
      tma_store_wait_read<1>();
      if (count > 0 || part > 0) {
        mbarrier_arrive(&shared.empty_dq[buffer > 0 ? buffer - 1 : C::kDqBuffers - 1]);
      }
    }
    if (rows && step.flags & kLast && params.rounding.rounded_dq != nullptr) {
      tma_store_wait<0>();
      const u32 heads = item_heads(params, step.flags);
      announce_added(shared, items++, AddedItem{step.head_q + 1 - heads, heads, step.run_begin, step.run_end});
    }
  }
  tma_store_wait<0>();
  if (params.rounding.rounded_dq != nullptr) announce_added(shared, items, AddedItem{0, 0, 0, 0});
}

}  // namespace backward

}  // namespace counterpoint
