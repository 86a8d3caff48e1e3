// Who fills the forward's shared memory: one thread that starts the copies of the planned steps.
#pragma once

#include "attention/attention_forward_work.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

template <typename C>
struct AttentionForwardLoader {
  const AttentionForwardArguments& arguments;
  AttentionForwardShared<C>& shared;
  const u32 rank = C::kCtas > 1 ? cluster_rank() : 0;
  u32 items = 0;
  u32 steps = 0;
  i32 key_head = 0;
  i32 value_start = 0;  // of the step before
  i32 value_head = 0;
  i32 there = arguments.arrivals.mailbox == nullptr ? arguments.rows_k : arguments.own_rows;  // rows that have come
  u32 parts = 0;                                                                            // of the others that have come

  // The map that has the rows from `start` on, and where they are in it.
  __device__ __forceinline__ const TensorMap* map_of(const TensorMap& own, const TensorMap& arriving, i32& start) const {
    if (start < arguments.own_rows) return &own;
    start -= arguments.own_rows;
    return &arriving;
  }

  // Until the rows of a step have come.
  __device__ __forceinline__ void await_rows(i32 start) {
    while (there < min(start + i32(C::kBlock), arguments.rows_k) && start < arguments.rows_k) {
      link_await_part(arguments.arrivals, parts);
      there = arguments.arrivals.ends[parts++];
    }
  }

  // A block of keys or values, of which each CTA of a cluster loads its rows, for all.
  template <u32 kChunks>
  __device__ __forceinline__ void load(u8* block, const TensorMap* map, u64* full, i32 head, i32 start) const {
    mbarrier_arrive_expect(full, kChunks * C::kBlock * kRowBytes);
#pragma unroll
    for (u32 chunk = 0; chunk < kChunks; ++chunk) {
      u8* place = block + chunk * C::kBlock * kRowBytes;
      if constexpr (C::kCtas == 1) {
        tma_load_3d(place, map, full, i32(64 * chunk), head, start);
      } else {
        tma_load_3d_multicast(place + rank * C::kLoadRows * kRowBytes, map, full, i32(64 * chunk), head,
                              start + i32(rank * C::kLoadRows), u16((1 << C::kCtas) - 1));
      }
    }
  }

  __device__ __forceinline__ void load_keys(const AttentionForwardStep& step) {
    const u32 stage = steps % C::kStages;
    await_rows(step.start);
    i32 start = step.start;
    const TensorMap* map = map_of(arguments.k_map, arguments.arriving_k_map, start);
    load<C::kKeyChunks>(shared.keys[stage], map, &shared.key_full[stage], key_head, start);
  }

  // Query rows of the item just begun.
  __device__ __forceinline__ void load_queries(const AttentionForwardItem& item) {
    const u32 slot = items % C::kQuerySlots;
#pragma unroll
    for (u32 group = 0; group < C::kConsumers; ++group) {
      mbarrier_wait(&shared.query_empty[slot][group], ((items / C::kQuerySlots) & 1) ^ 1);
      mbarrier_arrive_expect(&shared.query_full[slot][group], C::kKeyChunks * 64 * kRowBytes);
#pragma unroll
      for (u32 chunk = 0; chunk < C::kKeyChunks; ++chunk) {
        tma_load_3d(shared.queries[slot] + (chunk * C::kTileRows + 64 * group) * kRowBytes, &arguments.q_map,
                    &shared.query_full[slot][group], i32(64 * chunk), i32(item.head * C::kPack),
                    item.start + i32(64 / C::kPack * group));
      }
    }
  }

  // Values of the step before.
  __device__ __forceinline__ void load_values() {
    if (steps == 0) return;
    const u32 number = steps - 1;
    const u32 stage = number % C::kStages;
    i32 start = value_start;
    const TensorMap* map = map_of(arguments.v_map, arguments.arriving_v_map, start);
    mbarrier_wait(&shared.value_empty[stage], ((number / C::kStages) & 1) ^ 1);
    load<C::kValueChunks>(shared.values[stage], map, &shared.value_full[stage], value_head, start);
  }

  // Keys of a step, values of the one before, and the query rows of a new item: consumers want them in this order.
  __device__ __forceinline__ void work() {
    for (;;) {
      const u32 stage = steps % C::kStages;
      mbarrier_wait(&shared.key_empty[stage], ((steps / C::kStages) & 1) ^ 1);
      // Consumers are done with the step whose keys were there.
      if (steps >= C::kStages) mbarrier_arrive(&shared.step_empty[(steps - C::kStages) % kPlanned]);
      mbarrier_wait(&shared.step_full[steps % kPlanned], (steps / kPlanned) & 1);
      const AttentionForwardStep step = shared.steps[steps % kPlanned];
      const AttentionForwardItem& item = shared.items[items % kItems];
      if (step.flags & kStepNone) {
        // Whoever waits for its keys sees that there is no more.
        mbarrier_arrive(&shared.key_full[stage]);
        load_values();
        // By now this CTA's scheduler is through too. The last CTA leaves the queue, and what has been delivered, as it was found.
        if (atomicInc(&arguments.queue[1], gridDim.x - 1) == gridDim.x - 1) {
          arguments.queue[0] = arguments.queue[2] = 0;
          if (arguments.arrivals.mailbox != nullptr) link_take_back(arguments.arrivals);
        }
        return;
      }
      if (step.flags & kStepFirst) key_head = i32(item.key_head);
      load_keys(step);
      load_values();
      if (step.flags & kStepFirst) {
        load_queries(item);
        ++items;
      }
      value_start = step.start;
      value_head = key_head;
      ++steps;
    }
  }
};

}  // namespace counterpoint
