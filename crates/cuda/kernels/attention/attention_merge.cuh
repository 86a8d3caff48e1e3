// Merges the partial results of tiles: out and lse of a row over disjoint keys, and its sinks; into results, or in f32 into partial results that are
// merged with others.
#pragma once

#include "attention/tile_schedule.cuh"

namespace counterpoint {

// The kernel's parameter, shared with the host. Launch: x = split tiles, y = heads_q; z and the threads: any number.
struct AttentionMergeArguments {
  const TileMerge* merges;
  const float* partial_out;  // [slots, tile_tokens, heads_q, head_dim_v]
  const float* partial_lse;  // [slots, tile_tokens, heads_q]
  void* out;                 // [rows_q, heads_q, head_dim_v]
  float* lse;                // [rows_q, heads_q]
  const float* sink;         // [sink_rows, heads_q]
  u32 tile_tokens;
  u32 heads_q;
  u32 head_dim_v;  // a multiple of 8
  u32 sink_rows;
};

__device__ __forceinline__ void store_merged(Element* to, const float (&sums)[8], float factor) {
  uint4 bits;
  bits.x = pack(sums[0] * factor, sums[1] * factor);
  bits.y = pack(sums[2] * factor, sums[3] * factor);
  bits.z = pack(sums[4] * factor, sums[5] * factor);
  bits.w = pack(sums[6] * factor, sums[7] * factor);
  *reinterpret_cast<uint4*>(to) = bits;
}

__device__ __forceinline__ void store_merged(float* to, const float (&sums)[8], float factor) {
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const float* from = sums + 4 * half;
    reinterpret_cast<float4*>(to)[half] = {from[0] * factor, from[1] * factor, from[2] * factor, from[3] * factor};
  }
}

// A thread makes 8 columns of a row. Slots are summed in their order, so the result does not depend on timing. `Result`: of `out`.
template <typename Result>
__device__ __forceinline__ void attention_merge(const AttentionMergeArguments& arguments) {
  const TileMerge merge = arguments.merges[blockIdx.x];
  const u32 head = blockIdx.y;
  const u32 pieces = arguments.head_dim_v / 8;
  const u32 rows = u32(merge.end - merge.start);
  for (u32 index = blockIdx.z * blockDim.x + threadIdx.x; index < rows * pieces; index += gridDim.z * blockDim.x) {
    const u32 row = index / pieces, piece = index % pieces;
    const u64 place = (u64(u32(merge.start)) + row) * arguments.heads_q + head;
    const auto slot_place = [&](u32 slot) {
      return (u64(slot) * arguments.tile_tokens + row) * arguments.heads_q + head;
    };
    float top = minus_infinity();
    for (u32 slot = merge.slot_begin; slot < merge.slot_end; ++slot) {
      top = fmaxf(top, arguments.partial_lse[slot_place(slot)]);
    }
    for (u32 t = 0; t < arguments.sink_rows; ++t) {
      top = fmaxf(top, arguments.sink[u64(t) * arguments.heads_q + head]);
    }
    float total = 0.0f;
    float sums[8] = {};
    // A row that has seen nothing has no finite maximum: its sums stay 0.
    if (top != minus_infinity()) {
      for (u32 slot = merge.slot_begin; slot < merge.slot_end; ++slot) {
        const u64 at = slot_place(slot);
        const float weight = exp2_fast((arguments.partial_lse[at] - top) * kLog2E);
        const float* part = arguments.partial_out + at * arguments.head_dim_v + 8 * piece;
        const float4* from = reinterpret_cast<const float4*>(part);
        const float4 low = from[0], high = from[1];
        const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 c = 0; c < 8; ++c) sums[c] = fmaf(weight, values[c], sums[c]);
        total += weight;
      }
      for (u32 t = 0; t < arguments.sink_rows; ++t) {
        total += exp2_fast((arguments.sink[u64(t) * arguments.heads_q + head] - top) * kLog2E);
      }
    }
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;
    store_merged(static_cast<Result*>(arguments.out) + place * arguments.head_dim_v + 8 * piece, sums, factor);
    if (piece == 0) arguments.lse[place] = total > 0.0f ? top + log2_fast(total) * kLn2 : minus_infinity();
  }
}

}  // namespace counterpoint
