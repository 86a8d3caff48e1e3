// Which of a thread's scores are unmasked, as bits, for blocks that a bound of the mask crosses.
#pragma once

#include "attention/tile_schedule.cuh"
#include "ptx/bits.cuh"

namespace counterpoint {

// The columns of a block of kBlock columns that a thread holds in its two rows of a wgmma accumulator: kBlock / 4 a
// row, column c of them being 8 * (c / 2) + 2 * (lane % 4) + c % 2. Bit c % 32 of words[row][c / 32] says that it is
// unmasked.
template <u32 kBlock>
struct ColumnMask {
  static constexpr u32 kColumns = kBlock / 4;
  static constexpr u32 kWords = (kColumns + 31) / 32;
  u32 words[2][kWords];

  // How many of the thread's columns lie left of column `x` of the block.
  static __device__ __forceinline__ i32 columns_before(i32 x, u32 lane) {
    const i32 shifted = min(max(x - i32(2 * (lane % 4)), 0), i32(kBlock));
    return ((shifted >> 2) & ~1) + min(shifted & 7, 2);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 w = 0; w < kWords; ++w) words[i][w] = 0;
    }
  }

  // Adds what `bound` unmasks in the row of query token `token`, row `i` of the two, in the block that begins at
  // `start`.
  __device__ __forceinline__ void unmask(u32 i, const TileBound& bound, i32 token, i32 start, u32 lane) {
    const i32 low = max(bound.k_start, token + bound.diag_min) - start;
    i32 high = min(bound.k_end, token + bound.diag_max + 1) - start;
    if (token < bound.q_start || token >= bound.q_end) high = low;
    const i32 first = columns_before(low, lane);
    const i32 last = max(columns_before(high, lane), first);
#pragma unroll
    for (u32 w = 0; w < kWords; ++w) {
      const i32 from = min(max(first - i32(32 * w), 0), 32);
      const i32 to = min(max(last - i32(32 * w), 0), 32);
      words[i][w] |= bit_mask(u32(from), u32(to - from));
    }
  }

  // Writes minus infinity over the masked scores.
  __device__ __forceinline__ void apply(float (&scores)[kBlock / 2]) const {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 c = 0; c < kColumns; ++c) {
        float& score = scores[4 * (c / 2) + 2 * i + c % 2];
        score = (words[i][c / 32] >> (c % 32)) & 1u ? score : minus_infinity();
      }
    }
  }
};

}  // namespace counterpoint
