// The other roles of a pair's CTA, which serve the rows of queries: loading, dQ of each block, and its additions.
#pragma once

#include "attention/backward_pair.cuh"
#include "attention/backward_queries.cuh"
#include "attention/backward_dq_order.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

namespace backward_pair {

// Writes the scheduler's next step down for both CTAs. By the first CTA's scheduler.
template <typename C>
__device__ __forceinline__ void announce(Storage<C>& shared, u32 count) {
  Step& step = shared.steps[count % kSteps];
  step = shared.scheduler.next;
  const u32 to = peer_address(shared_address(&step), 1);
  const u32 barrier = peer_address(shared_address(&shared.announced[count % kAnnouncements]), 1);
  const u32* words = reinterpret_cast<const u32*>(&shared.scheduler.next);
#pragma unroll
  for (u32 i = 0; i < sizeof(Step) / 4; ++i) peer_store(to + 4 * i, words[i], barrier);
}

// Half of the rows of a block: both CTAs get it. The other CTA fetches the other half for both.
template <typename C, u32 kCount>
__device__ __forceinline__ void load_half(u8* to, const TensorMap* map, u64* full, const Step& step, u32 rank) {
  constexpr u32 kHalf = C::kRows / 2;
#pragma unroll 1  // registers
  for (u32 c = 0; c < kCount; ++c) {
    tma_load_3d_multicast(to + c * kChunkBytes + rank * (kHalf * 128), map, full, 64 * c, step.head_q,
                          step.row + i32(rank * kHalf), 3);
  }
}

__device__ __forceinline__ bool has_rows(const Step& step) { return !(step.flags & (kExit | kEmpty)); }

template <typename C>
__device__ __forceinline__ void load_v(const BackwardParams<C>& params, Storage<C>& shared, const Step& step,
                                       u32 rank) {
  if (!has_rows(step)) return;
  i32 key = step.key;
  const TensorMap* map = key_map(params.all.v, params.all.arriving_v, params.all.own_rows, key);
  mbarrier_arrive_expect(&shared.full_v, sizeof(shared.v));
#pragma unroll
  for (u32 c = 0; c < C::kChunksV; ++c) {
    tma_load_3d(shared.v + c * kChunkBytes, map, &shared.full_v, 64 * c, step.head_kv, key + i32(rank * C::kOwnKeys));
  }
}

template <typename C>
__device__ __forceinline__ void load_k(const BackwardParams<C>& params, Storage<C>& shared, const Step& step,
                                       u32 rank) {
  if (!has_rows(step)) return;
  i32 key = step.key;
  const TensorMap* map = key_map(params.all.k, params.all.arriving_k, params.all.own_rows, key);
  mbarrier_arrive_expect(&shared.full_k, sizeof(shared.k) + sizeof(shared.peer_k));
#pragma unroll
  for (u32 c = 0; c < C::kChunks; ++c) {
    tma_load_3d(shared.k + c * kChunkBytes, map, &shared.full_k, 64 * c, step.head_kv, key + i32(rank * C::kOwnKeys));
  }
#pragma unroll 1  // registers
  for (u32 c = 0; c < C::kWholeParts; ++c) {
    tma_load_3d(shared.peer_k + c * kChunkBytes, map, &shared.full_k, 64 * part_chunk<C>(c, rank), step.head_kv,
                key + i32((rank ^ 1) * C::kOwnKeys));
  }
}

// The lse or delta of a block's rows, of which each CTA fetches its own; see load_rows in backward_queries.cuh.
template <typename C>
__device__ __forceinline__ void load_statistic(const BackwardParams<C>& params, float* to, u64* full,
                                               const Step& step, i32 first_copy) {
  tma_load_3d(to, &params.all.statistics, full, step.row & ~3, step.head_q, first_copy + (step.row & 3));
}

// The thread that loads. In the first CTA it schedules, for both.
template <typename C>
__device__ __forceinline__ void load_role(const BackwardParams<C>& params, Storage<C>& shared, u32 rank) {
  shared.delivered.begin(params.all);
  if (rank == 0) {
    shared.scheduler.begin(params);
    announce(shared, 0);
  }
  for (u32 count = 0;; ++count) {
    if (rank != 0) {
      u64* announced = &shared.announced[count % kAnnouncements];
      mbarrier_arrive_expect(announced, sizeof(Step));
      mbarrier_wait_cluster(announced, count / kAnnouncements % 2);
    }
    const Step& step = shared.steps[count % kSteps];
    const bool rows = has_rows(step);
    const u32 slot = slot_of(count);
    const u32 dout_slot = dout_slot_of<C>(count);
    u64* full_q = &shared.full_q[slot];
    u64* full_dout = &shared.full_dout[dout_slot];

    mbarrier_wait(&shared.empty_q[slot], parity_of(count) ^ 1);
    mbarrier_arrive_expect(full_q, rows ? sizeof(shared.q[0]) + C::kStatisticBytes : 0);
    if (rows) {
      load_half<C, C::kChunks>(shared.q[slot], &params.all.q, full_q, step, rank);
      load_statistic(params, shared.lse[slot], full_q, step, 0);
    }
    mbarrier_wait(&shared.empty_dout[dout_slot], dout_parity_of<C>(count) ^ 1);
    mbarrier_arrive_expect(full_dout, rows ? sizeof(shared.dout[0]) + C::kStatisticBytes : 0);
    if (rows) {
      load_half<C, C::kChunksV>(shared.dout[dout_slot], &params.all.dout, full_dout, step, rank);
      load_statistic(params, shared.delta[dout_slot], full_dout, step, 4);
    }
    if (rank == 0 && !(step.flags & kExit)) {
      shared.scheduler.advance(params);
      announce(shared, count + 1);
    }

    const bool first_step = count == 0;
    if (first_step || shared.steps[(count - 1) % kSteps].flags & kLast) {
      // Who has computed dS of the last block reads V no more; when dQ of it is computed, nobody reads K.
      if (!first_step) mbarrier_wait(&shared.full_ds[slot_of(count - 1)], parity_of(count - 1));
      if (rows) shared.delivered.await(params.all, step);
      load_v(params, shared, step, rank);
      if (!first_step) mbarrier_wait(&shared.empty_ds[slot_of(count - 1)], parity_of(count - 1));
      load_k(params, shared, step, rank);
    }
    if (step.flags & kExit) break;
  }
}

// The thread that adds to dq what the warpgroup that computes it leaves in shared memory.
template <typename C>
__device__ __forceinline__ void add_role(const BackwardParams<C>& params, Storage<C>& shared, u32 rank) {
  for (u32 count = 0;; ++count) {
    mbarrier_wait(&shared.full_dq[dq_slot_of<C>(count, 0)], dq_parity_of<C>(count, 0));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & kExit) break;
    const bool rows = has_rows(step);
    u32* counter = nullptr;
    if constexpr (C::kFixedOrder) {
      if (rows) {
        counter = order_counter(params, step);
        // Both CTAs of a tile add, the first one first: columns that both add to get their sums in one order too.
        await_order(params, counter, 2 * step.order + rank);
      }
    }
#pragma unroll 1
    for (u32 part = 0; part < C::kParts; ++part) {
      const u32 buffer = dq_slot_of<C>(count, part);
      if (part > 0) mbarrier_wait(&shared.full_dq[buffer], dq_parity_of<C>(count, part));
      if (rows) {
        const u32 column = 64 * part_chunk<C>(part, rank);
#pragma unroll 1
        for (u32 box = 0; box < 2; ++box) {
          tma_reduce_add_3d(&params.all.dq, shared.dq[buffer] + box * (64 * 128), column + 32 * box, step.head_q, step.row);
        }
      }
      tma_store_commit();
      if constexpr (C::kDqBuffers == 1) {
        tma_store_wait_read<0>();
        mbarrier_arrive(&shared.empty_dq[0]);
      } else {
        // The buffer before this one has been read by now.
        tma_store_wait_read<1>();
        if (count > 0 || part > 0) mbarrier_arrive(&shared.empty_dq[buffer ^ 1]);
      }
    }
    if (C::kFixedOrder && rows) {
      // The additions are done: the next one may add.
      tma_store_wait<0>();
      fence_device();
      add_relaxed(counter, 1);
    }
  }
  tma_store_wait<0>();
}

// Adds to dQ^T of a part, 64 columns x kRows rows, or begins it: the products of 64 keys.
template <typename C, bool kBegin>
__device__ __forceinline__ void multiply_part(float (&dq)[C::kRows / 2], const u8* keys, const u8* ds) {
  const u32 keys_operand = operand<C>(shared_address(keys), kChunkBytes);
  const u32 ds_operand = operand<C>(shared_address(ds), kChunkBytes);
  wgmma_fence();
  if (kBegin) {
    Wgmma<C::kRows>::template ss_first<Major::kMN, Major::kMN>(dq, descriptor(keys_operand, 0),
                                                               descriptor(ds_operand, 0));
  }
#pragma unroll
  for (u32 k = kBegin ? 1 : 0; k < C::kOwnKeys / 16; ++k) {
    Wgmma<C::kRows>::template ss<Major::kMN, Major::kMN>(dq, descriptor(keys_operand, k * 2048),
                                                         descriptor(ds_operand, k * 2048), 1);
  }
  wgmma_commit();
}

// The warpgroup that owns query rows: dQ.
template <typename C>
__device__ __forceinline__ void query_role(const BackwardParams<C>& params, Storage<C>& shared, u32 rank) {
  u32 offsets[2][2];
  dq_part_offsets(offsets);
  for (u32 count = 0;; ++count) {
    const u32 slot = slot_of(count);
    mbarrier_wait(&shared.full_ds[slot], parity_of(count));
    const u32 flags = step_flags(shared, count);
    if (flags & (kExit | kEmpty)) {
      // The adding thread leaves at the first part of the last step.
      for (u32 part = 0; part < (flags & kExit ? 1 : C::kParts); ++part) {
        const u32 buffer = dq_slot_of<C>(count, part);
        mbarrier_wait(&shared.empty_dq[buffer], dq_parity_of<C>(count, part) ^ 1);
        if (elect_one()) mbarrier_arrive(&shared.full_dq[buffer]);
      }
      if (flags & kExit) break;
      release_to_both(&shared.empty_ds[slot]);
      continue;
    }
    if (flags & kFirst) mbarrier_wait(&shared.full_k, item_parity_of(flags));
#pragma unroll 1  // what the compiler would keep for each part costs registers that this warpgroup has not
    for (u32 part = 0; part < C::kParts; ++part) {
      float dq[C::kRows / 2];
      const u32 buffer = dq_slot_of<C>(count, part);
      __syncwarp();
      multiply_part<C, true>(dq, shared.k + part_chunk<C>(part, rank) * kChunkBytes, shared.ds[slot]);
      if (C::kParts == C::kWholeParts || part < C::kWholeParts) {
        multiply_part<C, false>(dq, shared.peer_k + part * kChunkBytes, shared.peer_ds[slot]);
      }
      mbarrier_wait(&shared.empty_dq[buffer], dq_parity_of<C>(count, part) ^ 1);
      wgmma_wait<0>();
      pin(dq);
      if (part + 1 == C::kParts) release_to_both(&shared.empty_ds[slot]);
      store_dq_part(shared.dq[buffer], offsets, dq, params.all.scale);
      fence_async_proxy();
      __syncwarp();
      if (elect_one()) mbarrier_arrive(&shared.full_dq[buffer]);
    }
  }
}

}  // namespace backward_pair

}  // namespace counterpoint
