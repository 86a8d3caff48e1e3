// What precedes attention backward: the rows' statistics laid out head by head, counts begun at zero, dq cleared where it is not
// zero anyway, and zeros where no key tile sees a row.
//
// Attention backward reads rows of one head, and fetches by TMA the statistics of a block: so they are turned from
// [rows, heads] to [heads, rows] here, once for all key tiles, and get the factor that the exponential wants. It rounds dq
// itself where key tiles add to it (backward_dq.cuh).
#pragma once

#include "types.cuh"

namespace counterpoint {

// The one parameter of the kernel.
struct AttentionBackwardRowsArguments {
  const float* lse;    // [rows, heads], natural logarithm; minus infinity where a row saw nothing
  const float* delta;  // [rows, heads]
  float* statistics;   // [2, 4, heads, pitch]: first -lse * log2(e), and minus infinity where a row saw nothing, then delta; of
                       // each, copy i has row r at r - i, and zeros behind the last row
  u32* words;           // set to zero: `word_count` of them
  const u32* coverage;  // of each slab of `slab_rows` rows: 0 when no key tile sees a row of it
  float* dq;            // [rows, heads, head_dim]
  Element* rounded;     // as dq, in elements, or null; written in slabs that nobody sees
  u64 word_count;
  u32 slab_rows;
  u32 clears;  // 1 where dq is set to zero; otherwise it goes on from what is there
  u32 rows;
  u32 heads;
  u32 head_dim;
  u32 pitch;  // rows, rounded up to what TMA takes: a multiple of 4
};

namespace backward_rows {
constexpr u32 kThreads = 256;
constexpr u32 kCopies = 4;
constexpr u32 kHeads = 2;    // that a thread takes
constexpr u32 kPieces = 16;  // of a slab
}

// The body of the kernel: any number of blocks of kThreads threads.
__device__ __forceinline__ void attention_backward_rows(const AttentionBackwardRowsArguments& params) {
  using namespace backward_rows;
  const u64 thread = u64(blockIdx.x) * kThreads + threadIdx.x;
  const u64 threads = u64(gridDim.x) * kThreads;
  // A thread takes one row and two heads: a warp writes whole lines, and there are enough warps to fill the device.
  const u32 parts = (params.heads + kHeads - 1) / kHeads;
  const u32 row_warps = (params.rows + kCopies - 1 + 31) / 32;
  for (u64 i = thread / 32; i < u64(row_warps) * parts; i += threads / 32) {
    const u32 row = u32(i / parts) * 32 + threadIdx.x % 32;
    const u32 head0 = u32(i % parts) * kHeads;
    if (row >= params.rows + kCopies - 1) continue;
    const u64 from = u64(row) * params.heads;
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      const u32 head = head0 + h;
      if (head >= params.heads) break;
      float lse = 0.0f, delta = 0.0f;
      if (row < params.rows) {
        lse = __ldg(params.lse + from + head);
        // Such a row has no gradient, whatever dout is: its weights are exp2(-inf), and its delta counts for nothing.
        const bool dead = lse == minus_infinity();
        delta = dead ? 0.0f : __ldg(params.delta + from + head);
        if (!dead) lse *= -kLog2E;
      }
      const u64 copy = u64(params.heads) * params.pitch;
      float* to = params.statistics + u64(head) * params.pitch;
#pragma unroll
      for (u32 i = 0; i < kCopies; ++i) {
        if (row >= i && row - i < params.rows) {
          to[i * copy + row - i] = lse;
          to[(kCopies + i) * copy + row - i] = delta;
        }
      }
    }
  }
  for (u64 i = thread; i < params.word_count; i += threads) params.words[i] = 0;
  const u64 row_elements = u64(params.heads) * params.head_dim;
  const u32 piece_rows = params.slab_rows / kPieces;
  const u32 pieces = (params.rows + piece_rows - 1) / piece_rows;
  for (u32 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const bool seen = __ldg(params.coverage + piece / kPieces) > 0;
    if (seen && !params.clears) continue;
    const u64 begin = piece * piece_rows * row_elements;
    const u32 end = (min((piece + 1) * piece_rows, params.rows) - piece * piece_rows) * u32(row_elements);
    for (u32 i = 4 * threadIdx.x; i < end; i += 4 * kThreads) {
      float4* dq = reinterpret_cast<float4*>(params.dq + begin + i);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (params.clears) *dq = sum;
      else sum = *dq;
      if (!seen && params.rounded != nullptr) {
        *reinterpret_cast<uint2*>(params.rounded + begin + i) = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
      }
    }
  }
}

}  // namespace counterpoint
