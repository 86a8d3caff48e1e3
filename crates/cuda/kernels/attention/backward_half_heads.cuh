// Items that are half of the query heads of a tile and a key head, in attention backward: long items would otherwise be few to hand
// out, and could not be taken in the order in which the cache serves them best.
//
// Whichever warp is done first with a half of its keys' dk and dv leaves it where the tensors of this GPU have these rows; the warp that
// has the other half adds that to its own, and goes on as if it had computed all heads. Two summands have one sum, so results
// are bitwise the same whoever was first.
#pragma once

#include "attention/backward_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/flag.cuh"

namespace counterpoint {

namespace backward {

// The first of this thread's two keys in the tile; the other is 8 further. Asked for again where it is wanted, because
// the main loop has no register to keep it.
template <typename C>
__device__ __forceinline__ i32 own_key() {
  const u32 thread = threadIdx.x % (2 * C::kOwnKeys);  // the warpgroups that own keys come last
  const u32 first = C::kCtas == 2 ? C::kOwnKeys * cluster_rank() : 0;
  return i32(first + 16 * (thread / 32) + thread % 32 / 4);
}

// What a thread does with its rows of partial sums in memory.
enum class PartialRows {
  kLeave,  // stores its own there
  kAdd,    // adds them to its own
  kTake,   // has them in place of its own, and leaves zeros
};

template <PartialRows kWhat, u32 kCount, typename C>
__device__ __forceinline__ void partial_rows(void* out, u32 head_dim, const BackwardParams<C>& params,
                                             const Step& step, float (&d)[kCount]) {
  const i32 key = uniform_load(&step.key) + own_key<C>();
  const i32 key_end = uniform_load(&step.key_end);
  const u32 head = uniform_load(&step.head_kv);
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    float* at = static_cast<float*>(out) + (u64(u32(row)) * params.all.heads_kv + head) * head_dim + 2 * (threadIdx.x % 4);
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
      if (row >= key_end || 8 * j + 2 * (threadIdx.x % 4) >= head_dim) continue;
      float2* pair = reinterpret_cast<float2*>(at + 8 * j);
      if (kWhat == PartialRows::kLeave) {
        __stcg(pair, make_float2(d[4 * j + 2 * i], d[4 * j + 2 * i + 1]));
        continue;
      }
      const float2 partial = __ldcg(pair);
      d[4 * j + 2 * i] = kWhat == PartialRows::kAdd ? d[4 * j + 2 * i] + partial.x : partial.x;
      d[4 * j + 2 * i + 1] = kWhat == PartialRows::kAdd ? d[4 * j + 2 * i + 1] + partial.y : partial.y;
      if (kWhat == PartialRows::kTake) __stcg(pair, make_float2(0.0f, 0.0f));
    }
  }
}

// Of a warp that is done with a half: whether it now has both. It waits at most for the other one to store what it has.
template <u32 kCount, u32 kCountV, typename C>
__device__ __forceinline__ bool is_whole(const BackwardParams<C>& params, const Step& step, float (&dk)[kCount],
                                         float (&dv)[kCountV]) {
  constexpr u32 kTaken = 1, kLeft = 2;
  u32* word = params.half_heads.words + 8 * uniform_load(&step.counter) + threadIdx.x % 256 / 32;
  const bool leads = threadIdx.x % 32 == 0;
  u32 before = 0;
  if (leads) before = add_relaxed(word, kTaken);
  before = uniform(before);
  if (before == 0) {
    partial_rows<PartialRows::kLeave>(params.all.dv, params.all.head_dim_v, params, step, dv);
    partial_rows<PartialRows::kLeave>(params.all.dk, params.all.head_dim, params, step, dk);
    __syncwarp();
    if (leads) add_release(word, kLeft);
    __syncwarp();
    return false;
  }
  if (leads) {
    await_value(word, 2 * kTaken + kLeft, params.all.wait);
    store_relaxed(word, 0);
  }
  __syncwarp();
  partial_rows<PartialRows::kAdd>(params.all.dv, params.all.head_dim_v, params, step, dv);
  partial_rows<PartialRows::kAdd>(params.all.dk, params.all.head_dim, params, step, dk);
  return true;
}

}  // namespace backward

}  // namespace counterpoint
