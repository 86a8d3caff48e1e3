// The end of a tile of the portable matrix product: from a warp's accumulators to memory, without shared memory, so that the next
// tile's operands can come meanwhile.
#pragma once

#include "gemm/portable_gemm_config.cuh"
#include "ptx/flag.cuh"

namespace counterpoint {

// Thread q of each quad gives word n to thread n, and gets the words that the quad's threads have for it, in their order: of four
// neighbouring D, the 8 elements of a row of number q.
__device__ __forceinline__ void exchange_in_quad(u32 (&words)[4], u32 lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const u32 first = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
  const u32 second = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
  (odd ? words[0] : words[1]) = first;
  (odd ? words[2] : words[3]) = second;
  const u32 third = __shfl_xor_sync(0xffffffffu, upper ? words[0] : words[2], 2);
  const u32 fourth = __shfl_xor_sync(0xffffffffu, upper ? words[1] : words[3], 2);
  (upper ? words[0] : words[2]) = third;
  (upper ? words[1] : words[3]) = fourth;
}

// Both halves of a pair of elements added to those of another.
__device__ __forceinline__ u32 add_pairs(u32 one, u32 other) {
  return pack(low_float(one) + low_float(other), high_float(one) + high_float(other));
}

// What is stored of a tile.
template <typename C>
struct PortableGemmStore {
  const PortableGemmArguments& arguments;
  const u32 lane;
  const u32 row;     // this thread's first, of the tile
  const u32 column;  // of D: the warp's first
  const u32 rows;    // of the tile
  const u64 d;       // the tile's first row

  __device__ __forceinline__ void add_bias(float (&acc)[C::kRowTiles][C::kWarpN / 2]) const {
#pragma unroll
    for (u32 n = 0; n < C::kWarpN / 8; ++n) {
      const u32 at = column + 8 * n + 2 * (lane % 4);
      const float low = at < arguments.n ? to_float(arguments.bias[at]) : 0.0f;
      const float high = at + 1 < arguments.n ? to_float(arguments.bias[at + 1]) : 0.0f;
#pragma unroll
      for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) acc[m][4 * n + e] += e % 2 == 0 ? low : high;
      }
    }
  }

  // Rows of 64 bytes at once, 16 of each thread.
  __device__ __forceinline__ void elements(const float (&acc)[C::kRowTiles][C::kWarpN / 2]) const {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 r = row + 16 * m + 8 * i;
        Element* to = reinterpret_cast<Element*>(d) + u64(r) * arguments.d_stride;
#pragma unroll
        for (u32 quarter = 0; quarter < C::kWarpN / 32; ++quarter) {
          u32 words[4];
#pragma unroll
          for (u32 w = 0; w < 4; ++w) {
            const float* pair = &acc[m][4 * (4 * quarter + w) + 2 * i];
            words[w] = pack(pair[0], pair[1]);
          }
          exchange_in_quad(words, lane);
          const u32 at = column + 32 * quarter + 8 * (lane % 4);
          if (r < rows && at < arguments.n) piece(to + at, words, arguments.n - at);
        }
      }
    }
  }
  __device__ __forceinline__ void piece(Element* to, u32 (&words)[4], u32 columns) const {
    if (columns >= 8) {
      uint4* at = reinterpret_cast<uint4*>(to);
      if (arguments.adds) {
        const uint4 there = *at;
        words[0] = add_pairs(there.x, words[0]);
        words[1] = add_pairs(there.y, words[1]);
        words[2] = add_pairs(there.z, words[2]);
        words[3] = add_pairs(there.w, words[3]);
      }
      *at = make_uint4(words[0], words[1], words[2], words[3]);
      return;
    }
#pragma unroll
    for (u32 e = 0; e < 7; ++e) {
      if (e >= columns) return;
      const Element value = Element(e % 2 == 0 ? words[e / 2] & 0xffffu : words[e / 2] >> 16);
      to[e] = arguments.adds ? to_element(to_float(to[e]) + to_float(value)) : value;
    }
  }

  // Rows of 32 bytes at once, 8 of each thread.
  __device__ __forceinline__ void floats(const float (&acc)[C::kRowTiles][C::kWarpN / 2]) const {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 r = row + 16 * m + 8 * i;
        float* to = reinterpret_cast<float*>(d) + u64(r) * arguments.d_stride;
#pragma unroll
        for (u32 n = 0; n < C::kWarpN / 8; ++n) {
          const u32 at = column + 8 * n + 2 * (lane % 4);
          if (r < rows && at < arguments.n) pair(to + at, &acc[m][4 * n + 2 * i], at + 1 < arguments.n);
        }
      }
    }
  }
  __device__ __forceinline__ void pair(float* to, const float* values, bool both) const {
    if (!both) {
      *to = arguments.adds ? *to + values[0] : values[0];
      return;
    }
    float2 sum = make_float2(values[0], values[1]);
    if (arguments.adds) {
      const float2 there = *reinterpret_cast<const float2*>(to);
      sum = make_float2(there.x + sum.x, there.y + sum.y);
    }
    *reinterpret_cast<float2*>(to) = sum;
  }
};

}  // namespace counterpoint
