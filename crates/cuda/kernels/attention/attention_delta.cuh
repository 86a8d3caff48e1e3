// What attention backward needs of every row beside q and dout: delta = rowsum(dout * out) and the logarithm of the softmax's
// denominator, laid out row after row for each head, so that a warp fetches a block of rows of one head at once.
//
// The same pass clears dq, and sums the sink's gradient: -sum over rows of exp(sink - lse) * delta, in two steps (a block of
// rows here, then all blocks in attention_dsink), so the sum's order does not depend on the machine.
#pragma once

#include "types.cuh"

namespace counterpoint {

#ifndef CLEAR_DQ
#define CLEAR_DQ 1
#endif

struct AttentionDeltaParams {
  const Element* out;   // [rows, heads, head_dim]
  const Element* dout;  // [rows, heads, head_dim]
  const float* lse;     // [rows, heads], natural logarithm; minus infinity where a row saw nothing
  float* row_lse;       // [heads, rows]: -lse * log2(e), and minus infinity for rows that saw nothing
  float* row_delta;     // [heads, rows]
  float* dq;            // [rows, heads, head_dim], set to zero when CLEAR_DQ
  const float* sink;    // [sinks, heads], or null
  float* dsink_part;    // [heads, sinks, blocks of rows]
  u64 out_stride;       // elements between rows of out and of dout
  u64 dout_stride;
  u32 rows;
  u32 heads;
  u32 head_dim;         // a multiple of 8, at most 256
  u32 sinks;
};

namespace delta {

constexpr u32 kRows = 64;
constexpr u32 kThreads = 256;
constexpr u32 kLanes = 16;  // threads of a row; each reads 8 elements at a time
constexpr u32 kRowsAtOnce = kThreads / kLanes;

__device__ __forceinline__ float dot(uint4 a, uint4 b) {
  return low_float(a.x) * low_float(b.x) + high_float(a.x) * high_float(b.x) + low_float(a.y) * low_float(b.y) +
         high_float(a.y) * high_float(b.y) + low_float(a.z) * low_float(b.z) + high_float(a.z) * high_float(b.z) +
         low_float(a.w) * low_float(b.w) + high_float(a.w) * high_float(b.w);
}

}  // namespace delta

// Grid: blocks of 64 rows x heads.
extern "C" __global__ void __launch_bounds__(delta::kThreads)
    attention_delta(const __grid_constant__ AttentionDeltaParams params) {
  using namespace delta;
  __shared__ float sums[kRows];
  const u32 head = blockIdx.y;
  const u32 row0 = blockIdx.x * kRows;
  const u32 lane = threadIdx.x % kLanes;
  float sum[kRows / kRowsAtOnce];
#pragma unroll
  for (u32 i = 0; i < kRows / kRowsAtOnce; ++i) {
    const u32 row = row0 + i * kRowsAtOnce + threadIdx.x / kLanes;
    sum[i] = 0.0f;
    if (row < params.rows) {
      const uint4* out = reinterpret_cast<const uint4*>(params.out + row * params.out_stride + u64(head) * params.head_dim);
      const uint4* dout =
          reinterpret_cast<const uint4*>(params.dout + row * params.dout_stride + u64(head) * params.head_dim);
      for (u32 x = lane; x < params.head_dim / 8; x += kLanes) sum[i] += dot(__ldg(out + x), __ldg(dout + x));
#if CLEAR_DQ
      float4* dq = reinterpret_cast<float4*>(params.dq + (u64(row) * params.heads + head) * params.head_dim);
      for (u32 x = lane; x < params.head_dim / 4; x += kLanes) dq[x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
    }
  }
#pragma unroll
  for (u32 i = 0; i < kRows / kRowsAtOnce; ++i) {
#pragma unroll
    for (u32 offset = kLanes / 2; offset > 0; offset /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
    if (lane == 0) sums[i * kRowsAtOnce + threadIdx.x / kLanes] = sum[i];
  }
  __syncthreads();
  const u32 row = row0 + threadIdx.x;
  float lse = minus_infinity();
  if (threadIdx.x < kRows && row < params.rows) {
    lse = __ldg(params.lse + u64(row) * params.heads + head);
    const u64 at = u64(head) * params.rows + row;
    const bool dead = lse == minus_infinity();
    params.row_lse[at] = dead ? lse : -kLog2E * lse;
    // out of such a row is zero, but what if dout is not finite there: its gradients are zero all the same.
    params.row_delta[at] = dead ? 0.0f : sums[threadIdx.x];
  }
  if (params.sink == nullptr) return;
  // One warp, two rows a lane: a fixed tree.
  __shared__ float row_lse[kRows];
  if (threadIdx.x < kRows) row_lse[threadIdx.x] = lse;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  for (u32 t = 0; t < params.sinks; ++t) {
    const float sink = __ldg(params.sink + u64(t) * params.heads + head);
    float share = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kRows; i += 32) {
      const float denominator = row_lse[threadIdx.x + i];
      if (denominator != minus_infinity()) {
        share -= exp2_fast((sink - denominator) * kLog2E) * sums[threadIdx.x + i];
      }
    }
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) share += __shfl_xor_sync(0xffffffffu, share, offset);
    if (threadIdx.x == 0) params.dsink_part[(u64(head) * params.sinks + t) * gridDim.x + blockIdx.x] = share;
  }
}

struct AttentionDsinkParams {
  const float* parts;  // [heads, sinks, blocks]
  float* dsink;        // [sinks, heads]
  u32 sinks;
  u32 heads;
  u32 blocks;
  u32 accumulate;      // 1: add to dsink
};

// Grid: heads x sinks; one warp.
extern "C" __global__ void __launch_bounds__(32) attention_dsink(const __grid_constant__ AttentionDsinkParams params) {
  const u32 head = blockIdx.x;
  const u32 t = blockIdx.y;
  const float* parts = params.parts + (u64(head) * params.sinks + t) * params.blocks;
  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < params.blocks; i += 32) sum += parts[i];
#pragma unroll
  for (u32 offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x == 0) {
    float* to = params.dsink + u64(t) * params.heads + head;
    *to = params.accumulate ? *to + sum : sum;
  }
}

}  // namespace counterpoint
