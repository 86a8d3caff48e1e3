// The other roles of attention backward, which serve the rows of queries: loading, dq of each block, and its additions.
#pragma once

#include "attention/backward_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/flag.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

namespace backward {

// Announces the walk's next step and fetches its rows, when the slot is free. One warp; its first lane walks.
__device__ __forceinline__ void load_rows(const AttentionBackwardArguments& params, Storage& shared, u32 lane) {
  Walk& walk = shared.walk;
  __syncwarp();
  const u32 count = walk.count;
  const u32 flags = walk.next.flags;
  if (flags & kExit && count > 0 && shared.steps[(count - 1) % kSteps].flags & kExit) return;
  const u32 slot = slot_of(count);
  const i32 row = walk.next.row;
  const u32 head = walk.next.head_q;
  u64* full_q = &shared.full_q[slot];
  u64* full_dout = &shared.full_dout[slot];
  mbarrier_wait(&shared.empty[slot], parity_of(count) ^ 1);
  __syncwarp();
  const bool rows = !(flags & (kExit | kEmpty));
  if (lane == 0) {
    shared.steps[count % kSteps] = walk.next;
    walk.count = count + 1;
    mbarrier_arrive_expect(full_q, rows ? kRowBytes : 0);
    mbarrier_arrive_expect(full_dout, rows ? kRowBytes : 0);
    if (rows) {
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        tma_load_3d(shared.q[slot] + c * kRows * 128, &params.q, full_q, 64 * c, head, row);
      }
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        tma_load_3d(shared.dout[slot] + c * kRows * 128, &params.dout, full_dout, 64 * c, head, row);
      }
    }
  }
  // The copy engine wants places that are multiples of 16 bytes; a block may begin at any row.
  const u64 first = u64(head) * params.rows_q;
  if (rows) {
#pragma unroll
    for (u32 i = 0; i < kRows; i += 32) {
      const u32 own = u32(row) + i + lane;
      cp_async_4(shared_address(&shared.lse[slot][i + lane]), params.row_lse + first + own, own < params.rows_q);
    }
  }
  cp_async_arrive(full_q);
  if (rows) {
#pragma unroll
    for (u32 i = 0; i < kRows; i += 32) {
      const u32 own = u32(row) + i + lane;
      cp_async_4(shared_address(&shared.delta[slot][i + lane]), params.row_delta + first + own, own < params.rows_q);
    }
  }
  cp_async_arrive(full_dout);
  if (lane == 0 && !(flags & kExit)) walk.advance(params);
  __syncwarp();
}

__device__ __forceinline__ void load_keys(const TensorMap* map, u8* to, u64* full, const Step& step) {
  if (step.flags & (kExit | kEmpty)) return;
  mbarrier_arrive_expect(full, kKeyBytes);
#pragma unroll
  for (u32 c = 0; c < kChunks; ++c) tma_load_3d(to + c * kKeys * 128, map, full, 64 * c, step.head_kv, step.key);
}

// The warp that loads.
__device__ __forceinline__ void load_role(const AttentionBackwardArguments& params, Storage& shared) {
  const u32 lane = threadIdx.x;
  if (lane == 0) shared.walk.begin(params);
  load_rows(params, shared, lane);
  if (lane == 0) {
    load_keys(&params.k, shared.k, &shared.full_k, shared.steps[0]);
    load_keys(&params.v, shared.v, &shared.full_v, shared.steps[0]);
  }
  for (u32 count = 0; !(shared.steps[count % kSteps].flags & kExit); ++count) {
    load_rows(params, shared, lane);
    if (shared.steps[count % kSteps].flags & kLast) {
      const Step& next = shared.steps[(count + 1) % kSteps];
      // Who has computed dS of the last block reads V no more; when dq of it is computed, nobody reads K.
      mbarrier_wait(&shared.full_ds[slot_of(count)], parity_of(count));
      if (lane == 0) load_keys(&params.v, shared.v, &shared.full_v, next);
      mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count));
      if (lane == 0) load_keys(&params.k, shared.k, &shared.full_k, next);
      __syncwarp();
    }
  }
}

// Polls of a turn before a CTA gives up waiting: seconds. Whoever is waited for has started, so only a fault gets
// there.
constexpr u32 kMostPolls = 1u << 26;

// Waits until `turn` others have added. A wait that does not end is a fault, which the host finds in `fault`.
__device__ __forceinline__ void await_turn(const u32* turns, u32 turn, u32* fault) {
  for (u32 polls = 0; load_acquire(turns) != turn; ++polls) {
    if (polls == kMostPolls) {
      *fault = 1;
      break;
    }
  }
  fence_async_proxy_all();
}

// The thread that adds to dq what the query warpgroup leaves in shared memory.
__device__ __forceinline__ void add_role(const AttentionBackwardArguments& params, Storage& shared) {
  for (u32 count = 0;; ++count) {
    mbarrier_wait(&shared.full_dq[dq_slot_of(count, 0)], dq_parity_of(count, 0));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & kExit) break;
    const bool rows = !(step.flags & kEmpty);
    u32* turns = nullptr;
    if (kDeterministic && rows) {
      turns = params.turns + u64(u32(step.row) / kRows) * (params.heads_kv * params.group) + step.head_q;
      await_turn(turns, step.turn, params.fault);
    }
#pragma unroll 1
    for (u32 part = 0; part < kParts; ++part) {
      const u32 buffer = dq_slot_of(count, part);
      if (part > 0) mbarrier_wait(&shared.full_dq[buffer], dq_parity_of(count, part));
      if (rows) {
        const u32 column = 64 * (part % kChunks);
        const i32 row = step.row + i32(64 * (part / kChunks));
#pragma unroll 1
        for (u32 box = 0; box < 2; ++box) {
          tma_reduce_add_3d(&params.dq, shared.dq[buffer] + box * (64 * 128), column + 32 * box, step.head_q, row);
        }
      }
      tma_store_commit();
      // The buffer before this one has been read by now.
      tma_store_wait_read<1>();
      if (count > 0 || part > 0) {
        mbarrier_arrive(&shared.empty_dq[buffer > 0 ? buffer - 1 : kDqBuffers - 1]);
      }
    }
    if (kDeterministic && rows) {
      // The additions are done: it is the next tile's turn.
      tma_store_wait<0>();
      fence_async_proxy_all();
      add_release(turns, 1);
    }
  }
  tma_store_wait<0>();
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

// The warpgroup that owns query rows: dq.
__device__ __forceinline__ void query_role(const AttentionBackwardArguments& params, Storage& shared) {
  const u32 lane = threadIdx.x % 32;
  u32 offsets[2][2];
  dq_part_offsets(offsets);
  for (u32 count = 0;; ++count) {
    const u32 slot = slot_of(count);
    // Not full_q: the rows of the step after next may be there before this warpgroup comes to look.
    mbarrier_wait(&shared.full_ds[slot], parity_of(count));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & (kExit | kEmpty)) {
      // The adding thread leaves at the first part of the last step.
      for (u32 part = 0; part < (step.flags & kExit ? 1 : kParts); ++part) {
        const u32 buffer = dq_slot_of(count, part);
        mbarrier_wait(&shared.empty_dq[buffer], dq_parity_of(count, part) ^ 1);
        if (lane == 0) mbarrier_arrive(&shared.full_dq[buffer]);
      }
      if (step.flags & kExit) break;
      if (lane == 0) mbarrier_arrive(&shared.empty_ds[slot]);
      continue;
    }
    if (step.flags & kFirst) mbarrier_wait(&shared.full_k, item_parity_of(step.flags));
#pragma unroll 1  // what the compiler would keep for each part costs registers that this warpgroup has not
    for (u32 part = 0; part < kParts; ++part) {
      const u32 chunk = part % kChunks;
      const u32 half = part / kChunks;
      float dq[32];
      const u32 keys = operand(shared_address(shared.k) + chunk * kKeys * 128, kKeys * 128);
      const u32 rows = operand(shared_address(shared.ds[0]) + slot * kDsBytes + half * kKeys * 128, kKeys * 128);
      __syncwarp();
      wgmma_fence();
      Wgmma<64>::ss_first<Major::kMN, Major::kMN>(dq, descriptor(keys, 0), descriptor(rows, 0));
#pragma unroll
      for (u32 k = 1; k < kKeys / 16; ++k) {
        Wgmma<64>::ss<Major::kMN, Major::kMN>(dq, descriptor(keys, k * 2048), descriptor(rows, k * 2048), 1);
      }
      wgmma_commit();
      const u32 buffer = dq_slot_of(count, part);
      mbarrier_wait(&shared.empty_dq[buffer], dq_parity_of(count, part) ^ 1);
      wgmma_wait<0>();
      pin(dq);
      if (part + 1 == kParts && lane == 0) mbarrier_arrive(&shared.empty_ds[slot]);
      store_dq_part(shared.dq[buffer], offsets, dq, params.scale);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.full_dq[buffer]);
    }
  }
}

}  // namespace backward

}  // namespace counterpoint
