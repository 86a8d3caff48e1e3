// delta = rowsum(dout * out) - dlse, which attention backward subtracts from every dout v^T of a row.
//
// The same pass sums the sink's gradient, -sum over rows of exp(sink - lse) * delta, in two steps: a block of rows
// here, then all blocks in attention_dsink. So the order of additions does not depend on the machine.
#pragma once

#include "types.cuh"

namespace counterpoint {

// The one parameter of attention_delta.
struct AttentionDeltaArguments {
  const Element* out;   // [rows, heads, head_dim]
  const Element* dout;  // [rows, heads, head_dim]
  const float* lse;     // [rows, heads], natural logarithm; read only with a sink or dlse
  const float* dlse;    // [rows, heads], the gradient of lse, or null
  float* delta;         // [rows, heads]
  const float* sink;    // [sinks, heads], or null
  float* dsink_parts;   // [heads, sinks, blocks of 64 rows]
  u32 row_begin;        // of the launch's first block
  u32 rows;
  u32 heads;
  u32 head_dim;         // a multiple of 8
  u32 sinks;
  u32 blocks;           // of all rows
};

// The one parameter of attention_dsink.
struct AttentionDsinkArguments {
  const float* parts;  // [heads, sinks, blocks]
  float* dsink;        // [sinks, heads]
  u32 sinks;
  u32 heads;
  u32 blocks;
  u32 reserved;
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

// The body of the first kernel, of kThreads threads. Grid: heads x blocks of 64 rows, heads first: neighbours share
// what they read of a row.
__device__ __forceinline__ void attention_delta(const AttentionDeltaArguments& params) {
  using namespace delta;
  __shared__ float sums[kRows];
  __shared__ float row_lse[kRows];
  const u32 head = blockIdx.x;
  const u32 row0 = params.row_begin + blockIdx.y * kRows;
  const u32 lane = threadIdx.x % kLanes;
  float sum[kRows / kRowsAtOnce];
#pragma unroll
  for (u32 i = 0; i < kRows / kRowsAtOnce; ++i) {
    const u32 row = row0 + i * kRowsAtOnce + threadIdx.x / kLanes;
    sum[i] = 0.0f;
    if (row < params.rows) {
      const u64 at = (u64(row) * params.heads + head) * params.head_dim;
      const uint4* out = reinterpret_cast<const uint4*>(params.out + at);
      const uint4* dout = reinterpret_cast<const uint4*>(params.dout + at);
      for (u32 x = lane; x < params.head_dim / 8; x += kLanes) sum[i] += dot(__ldg(out + x), __ldg(dout + x));
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
  if (threadIdx.x < kRows) {
    const u64 at = u64(row) * params.heads + head;
    const bool wants_lse = params.sink != nullptr || params.dlse != nullptr;
    const float lse = wants_lse && row < params.rows ? __ldg(params.lse + at) : minus_infinity();
    // What sees nothing has no gradient, whatever is asked of its lse.
    if (params.dlse != nullptr && lse != minus_infinity()) sums[threadIdx.x] -= __ldg(params.dlse + at);
    if (row < params.rows) params.delta[at] = sums[threadIdx.x];
    row_lse[threadIdx.x] = lse;
  }
  if (params.sink == nullptr) return;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  // One warp, two rows a lane: a fixed tree.
  for (u32 t = 0; t < params.sinks; ++t) {
    const float sink = __ldg(params.sink + u64(t) * params.heads + head);
    float partial_sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kRows; i += 32) {
      const float lse = row_lse[threadIdx.x + i];
      // A sink of minus infinity has no weight; so has every sink in a row whose denominator is zero.
      if (lse != minus_infinity()) partial_sum -= exp2_fast((sink - lse) * kLog2E) * sums[threadIdx.x + i];
    }
#pragma unroll
    for (u32 offset = 16; offset > 0; offset /= 2) partial_sum += __shfl_xor_sync(0xffffffffu, partial_sum, offset);
    if (threadIdx.x == 0) params.dsink_parts[(u64(head) * params.sinks + t) * params.blocks + row0 / kRows] = partial_sum;
  }
}

// The body of the second. Grid: heads x sinks; one warp.
__device__ __forceinline__ void attention_dsink(const AttentionDsinkArguments& params) {
  const u32 head = blockIdx.x;
  const u32 t = blockIdx.y;
  const float* parts = params.parts + (u64(head) * params.sinks + t) * params.blocks;
  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < params.blocks; i += 32) sum += parts[i];
#pragma unroll
  for (u32 offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x == 0) params.dsink[u64(t) * params.heads + head] = sum;
}

}  // namespace counterpoint
