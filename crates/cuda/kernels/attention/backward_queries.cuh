// The other roles of attention backward that serve the rows of queries: loading, and dq of each block.
#pragma once

#include "attention/backward_rounding.cuh"
#include "attention/backward_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

namespace backward {

// Announces the scheduler's next step and fetches its rows, when the slot is free.
//
// lse and delta come as boxes of a tensor, too. A box begins at a multiple of 16 bytes and a block at any row, so there are
// four copies of them, each a row ahead of the one before.
template <typename C>
__device__ __forceinline__ void load_rows(const BackwardParams<C>& params, Storage<C>& shared) {
  TileScheduler<C>& scheduler = shared.scheduler;
  const u32 count = scheduler.count;
  const u32 flags = scheduler.next.flags;
  if (flags & kExit && count > 0 && shared.steps[(count - 1) % kSteps].flags & kExit) return;
  const u32 slot = slot_of(count);
  u64* full_q = &shared.full_q[slot];
  u64* full_dout = &shared.full_dout[slot];
  mbarrier_wait(&shared.empty[slot], parity_of(count) ^ 1);
  shared.steps[count % kSteps] = scheduler.next;
  scheduler.count = count + 1;
  // Every thread that adds leaves at a step of its own.
  if (flags & kExit && C::kAdders > 1) shared.steps[(count + 1) % kSteps].flags = kExit;
  if (flags & (kExit | kEmpty)) {
    mbarrier_arrive(full_q);
    mbarrier_arrive(full_dout);
  } else {
    const i32 row = scheduler.next.row;
    const u32 head = scheduler.next.head_q;
    mbarrier_arrive_expect(full_q, C::kRowBytes + C::kStatisticBytes);
    mbarrier_arrive_expect(full_dout, C::kRowBytes + C::kStatisticBytes);
#pragma unroll
    for (u32 c = 0; c < C::kChunks; ++c) {
      tma_load_3d(shared.q[slot] + c * C::kRows * 128, &params.all.q, full_q, 64 * c, head, row);
    }
    tma_load_3d(shared.lse[slot], &params.all.statistics, full_q, row & ~3, head, row & 3);
#pragma unroll
    for (u32 c = 0; c < C::kChunks; ++c) {
      tma_load_3d(shared.dout[slot] + c * C::kRows * 128, &params.all.dout, full_dout, 64 * c, head, row);
    }
    tma_load_3d(shared.delta[slot], &params.all.statistics, full_dout, row & ~3, head, 4 + (row & 3));
  }
  if (!(flags & kExit)) scheduler.advance(params);
}

template <typename C>
__device__ __forceinline__ void load_keys(const BackwardParams<C>& params, const TensorMap& own,
                                          const TensorMap& arriving, u8* to, u64* full, const Step& step) {
  if (step.flags & (kExit | kEmpty)) return;
  i32 key = step.key;
  const TensorMap* map = key_map(own, arriving, params.all.own_rows, key);
  mbarrier_arrive_expect(full, C::kKeyBytes);
#pragma unroll
  for (u32 c = 0; c < C::kChunks; ++c) tma_load_3d(to + c * C::kKeys * 128, map, full, 64 * c, step.head_kv, key);
}
template <typename C>
__device__ __forceinline__ void load_k(const BackwardParams<C>& params, Storage<C>& shared, const Step& step) {
  load_keys(params, params.all.k, params.all.arriving_k, shared.k, &shared.full_k, step);
}
template <typename C>
__device__ __forceinline__ void load_v(const BackwardParams<C>& params, Storage<C>& shared, const Step& step) {
  load_keys(params, params.all.v, params.all.arriving_v, shared.v, &shared.full_v, step);
}

// Before the first keys of an item are loaded.
__device__ __forceinline__ void await_keys(const AttentionBackwardArguments& params, Delivered& delivered,
                                           const Step& step) {
  if (!(step.flags & (kExit | kEmpty))) delivered.await(params, step);
}

// The thread that loads.
template <typename C>
__device__ __forceinline__ void load_role(const BackwardParams<C>& params, Storage<C>& shared) {
  shared.scheduler.begin(params);
  load_rows(params, shared);
  shared.delivered.begin(params.all);
  await_keys(params.all, shared.delivered, shared.steps[0]);
  load_k(params, shared, shared.steps[0]);
  load_v(params, shared, shared.steps[0]);
  for (u32 count = 0; !(shared.steps[count % kSteps].flags & kExit); ++count) {
    load_rows(params, shared);
    if (shared.steps[count % kSteps].flags & kLast) {
      const Step& next = shared.steps[(count + 1) % kSteps];
      // Who has computed dS of the last block reads V no more; when dq of it is computed, nobody reads K.
      mbarrier_wait(&shared.full_ds[slot_of(count)], parity_of(count));
      await_keys(params.all, shared.delivered, next);
      load_v(params, shared, next);
      mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count));
      load_k(params, shared, next);
    }
  }
}

// Where a thread's elements of a part of dq go, which is computed transposed: element (column lane / 4 + 8 i of 16 warp ..,
// row 8 j + 2 (lane % 4) + e) to box column / 32, swizzled, and 1024 j bytes further.
__device__ __forceinline__ void dq_part_offsets(u32 (&offsets)[2][2]) {
  const u32 lane = threadIdx.x % 32;
  const u32 column = 16 * (threadIdx.x % 128 / 32) + lane / 4;
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
#pragma unroll
    for (u32 e = 0; e < 2; ++e) {
      const u32 x = column + 8 * i;
      const u32 r = 2 * (lane % 4) + e;
      offsets[i][e] = (x / 32) * (64 * 128) + r * 128 + ((((x % 32) / 4) ^ r) << 4) + (x % 4) * 4;
    }
  }
}

__device__ __forceinline__ void store_dq_part(u8* to, const u32 (&offsets)[2][2], const float (&dq)[32], float scale) {
#pragma unroll
  for (u32 j = 0; j < 8; ++j) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        *reinterpret_cast<float*>(to + offsets[i][e] + j * 1024) = dq[4 * j + 2 * i + e] * scale;
      }
    }
  }
}

// Zeros in the place of what store_dq_part has stored of rows from `end` on, which belong to others: who rounds those may be done with
// them, and zero times infinity is none.
__device__ __forceinline__ void clear_dq_rows(u8* to, const u32 (&offsets)[2][2], i32 end) {
#pragma unroll 1
  for (u32 j = 0; j < 8; ++j) {
#pragma unroll
    for (u32 e = 0; e < 2; ++e) {
      if (i32(8 * j + 2 * (threadIdx.x % 4) + e) < end) continue;
#pragma unroll
      for (u32 i = 0; i < 2; ++i) *reinterpret_cast<float*>(to + offsets[i][e] + j * 1024) = 0.0f;
    }
  }
}

// The warpgroup that owns query rows: dq.
template <typename C>
__device__ __forceinline__ void query_role(const BackwardParams<C>& params, Storage<C>& shared) {
  const u32 lane = threadIdx.x % 32;
  u32 offsets[2][2];
  dq_part_offsets(offsets);
  OverlappedRounding<C> rounding;
  for (u32 count = 0;; ++count) {
    const u32 slot = slot_of(count);
    // Not full_q: the rows of the step after next may be there before this warpgroup comes to look.
    if (rounding.has_rows(shared)) {
      typename OverlappedRounding<C>::Rows rows;
      rounding.load(params, shared, rows);
      mbarrier_wait(&shared.full_ds[slot], parity_of(count));
      rounding.round(params, shared, rows);
    } else {
      mbarrier_wait(&shared.full_ds[slot], parity_of(count));
    }
    const u32 flags = uniform_load(&shared.steps[count % kSteps].flags);
    if (flags & kExit) {
      // Threads that add leave at the first part of a step.
      for (u32 adder = 0; adder < C::kAdders; ++adder) {
        const u32 buffer = dq_slot_of<C>(count + adder, 0);
        mbarrier_wait(&shared.empty_dq[buffer], dq_parity_of<C>(count + adder, 0) ^ 1);
        if (lane == 0) mbarrier_arrive(&shared.full_dq[buffer]);
      }
      break;
    }
    if (flags & kEmpty) {
      for (u32 part = 0; part < C::kParts; ++part) {
        const u32 buffer = dq_slot_of<C>(count, part);
        mbarrier_wait(&shared.empty_dq[buffer], dq_parity_of<C>(count, part) ^ 1);
        if (lane == 0) mbarrier_arrive(&shared.full_dq[buffer]);
      }
      if (lane == 0) mbarrier_arrive(&shared.empty_ds[slot]);
      continue;
    }
    if (flags & kFirst) mbarrier_wait(&shared.full_k, item_parity_of(flags));
#pragma unroll 1  // what the compiler would keep for each part costs registers that this warpgroup has not
    for (u32 part = 0; part < C::kParts; ++part) {
      const u32 chunk = part % C::kChunks;
      const u32 half = part / C::kChunks;
      float dq[32];
      const u32 keys = operand<C>(shared_address(shared.k) + chunk * C::kKeys * 128, C::kKeys * 128);
      const u32 rows = operand<C>(shared_address(shared.ds[0]) + slot * C::kDsBytes + half * C::kKeys * 128, C::kKeys * 128);
      __syncwarp();
      wgmma_fence();
      Wgmma<64>::ss_first<Major::kMN, Major::kMN>(dq, descriptor(keys, 0), descriptor(rows, 0));
#pragma unroll
      for (u32 k = 1; k < C::kKeys / 16; ++k) {
        Wgmma<64>::ss<Major::kMN, Major::kMN>(dq, descriptor(keys, k * 2048), descriptor(rows, k * 2048), 1);
      }
      wgmma_commit();
      const u32 buffer = dq_slot_of<C>(count, part);
      mbarrier_wait(&shared.empty_dq[buffer], dq_parity_of<C>(count, part) ^ 1);
      wgmma_wait<0>();
      pin(dq);
      if (part + 1 == C::kParts && lane == 0) mbarrier_arrive(&shared.empty_ds[slot]);
      store_dq_part(shared.dq[buffer], offsets, dq, params.all.scale);
      const Step& step = shared.steps[count % kSteps];
      // Asked for again, which saves a register.
      if (uniform_load(&step.flags) & kShort) {
        const i32 end = uniform_load(&step.row_end) - uniform_load(&step.row) - i32(64 * half);
        clear_dq_rows(shared.dq[buffer], offsets, end);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.full_dq[buffer]);
    }
  }
  rounding.finish(params, shared);
}

}  // namespace backward

}  // namespace counterpoint
