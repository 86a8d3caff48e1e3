// Items that are some of the query heads of a tile and a key head, in attention backward: where a key head has several query heads and
// tiles see many rows, CTAs that all compute one query head find its rows in L2, and those that compute several do not.
//
// Every item adds its dk and dv to sums in f32, as it adds to dq: by TMA. Whichever warpgroup adds the last part of its keys
// takes the sums, leaves zeros, and goes on as if it had computed all heads.
#pragma once

#include "attention/backward_half_heads.cuh"
#include "ptx/barrier.cuh"

namespace counterpoint {

namespace backward {

// The barrier of each warpgroup that owns keys among its threads; 0 is __syncthreads.
constexpr u32 kSumBarrier = 1;

// The thread's number, asked for again: what is worked out from it is not kept in registers meanwhile.
__device__ __forceinline__ u32 own_thread() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Adds a warpgroup's 64 keys x a head to `map`, 64 columns at a time. Rows from the tile's end on are another tile's: they get zeros.
template <u32 kCount, typename C>
__device__ __forceinline__ void add_to_sums(const TensorMap* map, u8* buffer, u32 warpgroup, const Step& step,
                                            const float (&d)[kCount]) {
  const u32 thread = own_thread() % 128, lane = thread % 32;
  const i32 key = uniform_load(&step.key) + i32(64 * warpgroup);
  const i32 rows = uniform_load(&step.key_end) - key;
  const u32 head = uniform_load(&step.head_kv);
  const u32 row = 16 * (thread / 32) + lane / 4;
#pragma unroll
  for (u32 chunk = 0; chunk < kCount / 32; ++chunk) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const bool owned = i32(row + 8 * i) < rows;
      u8* to = buffer + (row + 8 * i) * 128 + 8 * (lane % 2);
#pragma unroll
      for (u32 j = 0; j < 8; ++j) {
        const u32 place = 32 * chunk + 4 * j + 2 * i;
        const float2 pair = make_float2(owned ? d[place] : 0.0f, owned ? d[place + 1] : 0.0f);
        // Columns 8 j + 2 (lane % 4) of a box of 32, whose pieces of 16 bytes are swizzled by the row.
        const u32 piece = (2 * (j % 4) + lane % 4 / 2) ^ (lane / 4);
        *reinterpret_cast<float2*>(to + j / 4 * (64 * 128) + (piece << 4)) = pair;
      }
    }
    fence_async_proxy();
    barrier_sync(kSumBarrier + warpgroup, 128);
    if (thread == 0) {
      for (u32 box = 0; box < 2; ++box) {
        tma_reduce_add_3d(map, buffer + box * (64 * 128), i32(64 * chunk + 32 * box), i32(head), key);
      }
      tma_store_commit();
      tma_store_wait_read<0>();
    }
    barrier_sync(kSumBarrier + warpgroup, 128);
  }
}

// Of a warpgroup that is done with a part: whether it was the last one, and now has the sums of all.
template <u32 kCount, u32 kCountV, typename C>
__device__ __forceinline__ bool has_sums(const BackwardParams<C>& params, Storage<C>& shared, u32 warpgroup,
                                         const Step& step, float (&dk)[kCount], float (&dv)[kCountV]) {
  u8* buffer = shared.dq[C::kDqBuffers + warpgroup];
  add_to_sums<kCountV, C>(&params.sums.dv_map, buffer, warpgroup, step, dv);
  add_to_sums<kCount, C>(&params.sums.dk_map, buffer, warpgroup, step, dk);
  u32* word = params.sums.words + 2 * uniform_load(&step.counter) + warpgroup;
  const bool leads = threadIdx.x % 128 == 0;
  if (leads) {
    // What was added is there before it is counted, and what others counted before what is read.
    tma_store_wait<0>();
    fence_device();
    shared.parts_before[warpgroup] = add_relaxed(word, 1);
    fence_device();
  }
  barrier_sync(kSumBarrier + warpgroup, 128);
  if (uniform_load(&shared.parts_before[warpgroup]) + 1 != params.sums.parts) return false;
  fence_device();
  if (leads) store_relaxed(word, 0);
  partial_rows<PartialRows::kTake>(params.sums.dv, params.all.head_dim_v, params, step, dv);
  partial_rows<PartialRows::kTake>(params.sums.dk, params.all.head_dim, params, step, dk);
  return true;
}

}  // namespace backward

}  // namespace counterpoint
