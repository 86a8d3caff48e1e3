// The online softmax of the two rows that a thread shares with the three other threads of its quad.
#pragma once

#include "types.cuh"

namespace counterpoint {

// The largest value of a quad.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Each lane of a quad holds pairs of columns 2 * (lane % 4) + {0, 1} of two groups of 8 columns; the result is columns
// 4 * (lane % 4 / 2) + {0, 1, 2, 3} of group lane % 2: 8 bytes to store at once, 32 next to each other by a quad.
__device__ __forceinline__ uint2 pair_transpose(u32 g0, u32 g1, u32 lane) {
  const bool odd = lane & 1;
  const u32 other = __shfl_xor_sync(0xffffffffu, odd ? g0 : g1, 1);
  return odd ? uint2{other, g1} : uint2{g0, other};
}

// The maximum in use and the sum of two rows, the same in all threads of a quad.
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

// What makes the scores of two rows into weights exp2(scale * score + offset).
struct RowScaling {
  float offset[2];
  float rescale[2];  // what accumulators and sums of earlier blocks must be multiplied by
  bool grew;         // whether that is not 1 in a row of this warp
};

// Takes the maximum of `scores` into `state` and rescales the sums.
template <u32 kCount>
__device__ __forceinline__ RowScaling update_maximum(const float (&scores)[kCount], RowState& state, float scale) {
  RowScaling scaling;
  bool grew = false;
  // Chains side by side hide the latency of the instruction.
  constexpr u32 kChains = 4;
  float chain[2][kChains];
#pragma unroll
  for (u32 place = 0; place < kCount; ++place) {
    float& top = chain[place / 2 % 2][place / 4 % 2 * 2 + place % 2];
    top = place < 4 * kChains / 2 ? scores[place] : fmaxf(top, scores[place]);
  }
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const float seen = quad_max(fmaxf(fmaxf(chain[i][0], chain[i][1]), fmaxf(chain[i][2], chain[i][3])));
    const bool larger = seen > state.max[i];
    // A lazier rule (FlashAttention 4 lets the maximum lag by a factor of 2^8) is 2 % faster, but a row's heaviest key
    // then has a rounded weight instead of exactly 1, and errors of rows with few keys double.
    scaling.rescale[i] = larger ? exp2_fast((state.max[i] - seen) * scale) : 1.0f;
    state.max[i] = larger ? seen : state.max[i];
    scaling.offset[i] = state.max[i] == minus_infinity() ? 0.0f : -state.max[i] * scale;
    state.sum[i] *= scaling.rescale[i];
    grew |= larger;
  }
  scaling.grew = __any_sync(0xffffffffu, grew);
  return scaling;
}

// Makes the scores of column groups kFrom to kTo (of 8 columns each) into weights and adds them to this thread's partial sums
// of the block's sums.
template <u32 kFrom, u32 kTo, u32 kCount>
__device__ __forceinline__ void exponentiate(float (&scores)[kCount], float (&partial_sum)[2], float scale,
                                             const RowScaling& scaling) {
  float chain[2][2] = {};
#pragma unroll
  for (u32 place = 4 * kFrom; place < 4 * kTo; ++place) {
    const u32 i = place / 2 % 2;
    scores[place] = exp2_fast(fmaf(scores[place], scale, scaling.offset[i]));
    chain[i][place % 2] += scores[place];
  }
#pragma unroll
  for (u32 i = 0; i < 2; ++i) partial_sum[i] += chain[i][0] + chain[i][1];
}

// What a row's accumulators are multiplied by in the end, and its logarithm of the sum.
struct RowEnd {
  float factor;
  float lse;
};

// Ends a row whose weights were taken relative to 2^maximum and add up to `sum`. One that has seen nothing: factor 0, and
// lse minus infinity.
__device__ __forceinline__ RowEnd row_end(float maximum, float sum) {
  return RowEnd{sum > 0.0f ? reciprocal_fast(sum) : 0.0f, (maximum + log2_fast(sum)) * kLn2};
}

// The same where `sinks` scores, `stride` apart, join the sum without a value: lse is then at least that of the sinks.
__device__ __forceinline__ RowEnd row_end(float maximum, float sum, const float* sink, u32 sinks, u32 stride) {
  float top = sum > 0.0f ? maximum : minus_infinity();
  const float own = top;
#pragma unroll 1
  for (u32 t = 0; t < sinks; ++t) top = fmaxf(top, sink[u64(t) * stride] * kLog2E);
  if (top == minus_infinity()) return RowEnd{0.0f, minus_infinity()};
  const float weight = exp2_fast(own - top);
  float total = sum * weight;
#pragma unroll 1
  for (u32 t = 0; t < sinks; ++t) total += exp2_fast(sink[u64(t) * stride] * kLog2E - top);
  return RowEnd{weight * reciprocal_fast(total), (top + log2_fast(total)) * kLn2};
}

// softcap * tanh(scale * product / softcap) in powers of two, for all products. tanh(x) = 1 - 2 / (1 + e^2x): the
// unit's own tanh is good to 11 bits only.
template <u32 kCount>
__device__ __forceinline__ void cap(float (&scores)[kCount], float softcap_scale, float softcap_log2) {
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    const float tanh = fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(scores[i] * softcap_scale)), 1.0f);
    scores[i] = softcap_log2 * tanh;
  }
}

}  // namespace counterpoint
