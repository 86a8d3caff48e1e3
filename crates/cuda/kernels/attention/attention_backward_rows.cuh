// What precedes attention backward: the rows' statistics laid out head by head, dq cleared, and turns reset.
//
// Attention backward walks rows of one head, and fetches the statistics of a block by one warp: so they are turned from
// [rows, heads] to [heads, rows] here, once for all key tiles, and get the factor that the exponential wants.
#pragma once

#include "types.cuh"

namespace counterpoint {

// The one parameter of the kernel.
struct AttentionBackwardRowsArguments {
  const float* lse;    // [rows, heads], natural logarithm; minus infinity where a row saw nothing
  const float* delta;  // [rows, heads]
  float* row_lse;      // [heads, rows]: -lse * log2(e), and minus infinity where a row saw nothing
  float* row_delta;    // [heads, rows]
  float* dq;           // cleared: `dq_elements` of it, a multiple of 4
  u64 dq_elements;     // 0 where dq goes on from what is there
  u32* turns;          // cleared: `turn_count` of them
  u32 turn_count;
  u32 rows;
  u32 heads;
  u32 reserved;
};

namespace backward_rows {
constexpr u32 kThreads = 256;
}

// The body of the kernel: any number of blocks of kThreads threads.
__device__ __forceinline__ void attention_backward_rows(const AttentionBackwardRowsArguments& params) {
  using namespace backward_rows;
  const u64 thread = u64(blockIdx.x) * kThreads + threadIdx.x;
  const u64 threads = u64(gridDim.x) * kThreads;
  // A thread takes one row and eight heads: what it reads is a sector, and a warp writes whole lines.
  const u32 parts = (params.heads + 7) / 8;
  const u32 row_warps = (params.rows + 31) / 32;
  for (u64 i = thread / 32; i < u64(row_warps) * parts; i += threads / 32) {
    const u32 row = u32(i / parts) * 32 + threadIdx.x % 32;
    const u32 head0 = u32(i % parts) * 8;
    if (row >= params.rows) continue;
    const u64 from = u64(row) * params.heads;
#pragma unroll
    for (u32 h = 0; h < 8; ++h) {
      const u32 head = head0 + h;
      if (head >= params.heads) break;
      const float lse = __ldg(params.lse + from + head);
      const u64 to = u64(head) * params.rows + row;
      // Such a row has no gradient, whatever dout is: its weights are exp2(-inf), and its delta counts for nothing.
      const bool dead = lse == minus_infinity();
      params.row_lse[to] = dead ? lse : -kLog2E * lse;
      params.row_delta[to] = dead ? 0.0f : __ldg(params.delta + from + head);
    }
  }
  for (u64 i = thread; i < params.turn_count; i += threads) params.turns[i] = 0;
  float4* dq = reinterpret_cast<float4*>(params.dq);
  for (u64 i = thread; i < params.dq_elements / 4; i += threads) dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

}  // namespace counterpoint
