// Ends rows of an online softmax outside of the forward: a state becomes a partial result of a row, merged partial results become its result.
#pragma once

#include "attention/attention_softmax.cuh"
#include "scalar.cuh"

namespace counterpoint {

// The kernel's parameter, shared with the host.
struct AttentionFinishArguments {
  const float* acc;      // [entries, head_dim_v]; `out` may be the same
  const float* row_max;  // [entries], times `max_scale` of base 2; `lse` may be the same. Null: rows are copied as they are
  const float* row_sum;  // [entries]; null: 1, and a maximum is a logarithm
  const float* sink;     // [sink_rows, heads_q]
  void* out;             // [entries, head_dim_v]
  float* lse;            // [entries], natural
  u64 entries;           // rows times heads
  u32 heads_q;
  u32 head_dim_v;
  u32 sink_rows;
  float max_scale;
};

constexpr u32 kFinishThreads = 256;

// A warp ends an entry. Any number of blocks.
template <typename Out>
__device__ __forceinline__ void attention_finish(const AttentionFinishArguments& arguments) {
  const u32 lane = threadIdx.x % 32, dim = arguments.head_dim_v;
  const u64 warps = u64(gridDim.x) * (kFinishThreads / 32);
  for (u64 entry = (u64(blockIdx.x) * kFinishThreads + threadIdx.x) / 32; entry < arguments.entries; entry += warps) {
    float factor = 1.0f;
    if (arguments.row_max != nullptr) {
      const float maximum = arguments.row_max[entry] * arguments.max_scale;
      const float sum = arguments.row_sum != nullptr ? arguments.row_sum[entry] : 1.0f;
      const float* sink = arguments.sink + entry % arguments.heads_q;
      const RowEnd end = arguments.sink_rows == 0
                             ? row_end(maximum, sum)
                             : row_end(maximum, sum, sink, arguments.sink_rows, arguments.heads_q);
      // A sum that is no number is no reason for a result of 0.
      factor = sum == sum ? end.factor : sum;
      // All lanes have read what may be written in place.
      __syncwarp();
      if (lane == 0) arguments.lse[entry] = end.lse;
    }
    const float* from = arguments.acc + entry * dim;
    Out* to = static_cast<Out*>(arguments.out) + entry * dim;
    for (u32 column = lane; column < dim; column += 32) to[column] = narrow<Out>(from[column] * factor);
  }
}

}  // namespace counterpoint
