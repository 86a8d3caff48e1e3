// The online softmax of the two rows that a thread shares with the three other threads of its quad.
#pragma once

#include "types.cuh"

namespace counterpoint {

// How far the true maximum of a row may exceed the one in use, in powers of two, before the accumulators are rescaled:
// weights then stay below 2^8, far inside the range of f16, and most blocks need no rescaling at all (FlashAttention 4).
constexpr float kMaxGrowth = 8.0f;

// The largest value of a quad.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// The maximum in use and this thread's share of the sum, for two rows. Both in the unit of the scores.
struct RowState {
  float max[2];
  float sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      max[i] = minus_infinity();
      sum[i] = 0.0f;
    }
  }
};

// Turns scores into weights exp2(scale * (score - max)) and adds them to the sum. Returns whether a row of the warp took
// a new maximum: accumulators must then be multiplied by `rescale`.
template <u32 kCount>
__device__ __forceinline__ bool online_softmax(float (&scores)[kCount], RowState& state, float scale,
                                               float (&rescale)[2]) {
  bool grew = false;
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    float chain[2] = {scores[2 * i], scores[2 * i + 1]};
#pragma unroll
    for (u32 j = 1; j < kCount / 4; ++j) {
      chain[0] = fmaxf(chain[0], scores[4 * j + 2 * i]);
      chain[1] = fmaxf(chain[1], scores[4 * j + 2 * i + 1]);
    }
    const float seen = quad_max(fmaxf(chain[0], chain[1]));
    // False for a row that has seen nothing but minus infinities, true for the first finite score.
    const bool take = (seen - state.max[i]) * scale > kMaxGrowth;
    const float previous = state.max[i];
    state.max[i] = take ? seen : previous;
    rescale[i] = take ? exp2_fast((previous - seen) * scale) : 1.0f;
    grew |= take;
  }
  grew = __any_sync(0xffffffffu, grew);
  if (grew) {
    state.sum[0] *= rescale[0];
    state.sum[1] *= rescale[1];
  }
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const float offset = state.max[i] == minus_infinity() ? 0.0f : -state.max[i] * scale;
    float chain[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        float& score = scores[4 * j + 2 * i + e];
        score = exp2_fast(fmaf(score, scale, offset));
        chain[e] += score;
      }
    }
    state.sum[i] += chain[0] + chain[1];
  }
  return grew;
}

}  // namespace counterpoint
