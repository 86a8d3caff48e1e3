// The end of a tile of the portable matrix product: from a warp's accumulators to memory, without shared memory, so that the next
// tile's operands can come meanwhile. What a tile is added to is asked for before it ends, and then read one group of rows ahead.
#pragma once

#include "gemm/portable_gemm_config.cuh"
#include "ptx/flag.cuh"
#include "ptx/global_memory.cuh"

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

// Lanes 0 and 2 of a quad give their parts of the second of two neighbouring D for those of the first that lanes 1 and 3 have: then each
// lane has 4 elements of a row.
__device__ __forceinline__ void exchange_in_pair(u32 (&words)[4], u32 lane) {
  const bool odd = lane & 1;
  const u32 first = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[2], 1);
  const u32 second = __shfl_xor_sync(0xffffffffu, odd ? words[1] : words[3], 1);
  (odd ? words[0] : words[2]) = first;
  (odd ? words[1] : words[3]) = second;
}

// Pieces of 16 bytes of a row: 4 elements in f32.
struct FloatPieces {
  using Value = float;
  static constexpr u32 kElements = 4;
  static constexpr u32 kColumns = 16;  // that a quad has
  static __device__ __forceinline__ u32 column(u32 lane) { return lane % 2 * 8 + lane / 2 % 2 * 4; }
  // Of the accumulators that begin with a group of columns, half `i` of the rows.
  static __device__ __forceinline__ void gather(u32 (&words)[4], const float* from, u32 i, u32 lane) {
#pragma unroll
    for (u32 w = 0; w < 4; ++w) words[w] = __float_as_uint(from[w / 2 * 4 + 2 * i + w % 2]);
    exchange_in_pair(words, lane);
  }
  static __device__ __forceinline__ u32 add(u32 there, u32 word) {
    return __float_as_uint(__uint_as_float(there) + __uint_as_float(word));
  }
  static __device__ __forceinline__ float value(const u32 (&words)[4], u32 e) { return __uint_as_float(words[e]); }
  static __device__ __forceinline__ float sum(float there, float value) { return there + value; }
};

// 8 elements.
struct ElementPieces {
  using Value = Element;
  static constexpr u32 kElements = 8;
  static constexpr u32 kColumns = 32;
  static __device__ __forceinline__ u32 column(u32 lane) { return lane % 4 * 8; }
  static __device__ __forceinline__ void gather(u32 (&words)[4], const float* from, u32 i, u32 lane) {
#pragma unroll
    for (u32 w = 0; w < 4; ++w) words[w] = pack(from[4 * w + 2 * i], from[4 * w + 2 * i + 1]);
    exchange_in_quad(words, lane);
  }
  static __device__ __forceinline__ u32 add(u32 there, u32 word) {
    return pack(low_float(there) + low_float(word), high_float(there) + high_float(word));
  }
  static __device__ __forceinline__ Element value(const u32 (&words)[4], u32 e) {
    return Element(e % 2 == 0 ? words[e / 2] & 0xffffu : words[e / 2] >> 16);
  }
  static __device__ __forceinline__ Element sum(Element there, Element value) {
    return to_element(to_float(there) + to_float(value));
  }
};

// A warp's part of a tile on its way to memory. A thread has a piece of every group of columns of every eighth row. Tiles that are whole
// have code without branches, so that exchanges of several pieces are under way at once.
template <typename C, typename Pieces, bool kAdds, bool kWhole>
struct PortableGemmPart {
  static constexpr u32 kPieces = C::kWarpN / Pieces::kColumns;
  static constexpr u32 kCount = 2 * C::kRowTiles * kPieces;
  static constexpr u32 kAhead = 6;  // pieces that are read before their time
  using Value = typename Pieces::Value;

  Value* to;    // this thread's first piece
  u32 stride;   // from one row to the next
  i32 rows;     // from this thread's first one on
  i32 columns;  // from its first piece on

  __device__ __forceinline__ Value* at(u32 group, u32 p) const {
    return to + (u64(8 * group) * stride + Pieces::kColumns * p);
  }
  __device__ __forceinline__ bool has(u32 group, u32 p, u32 elements) const {
    return kWhole || (i32(8 * group) < rows && i32(Pieces::kColumns * p + elements) <= columns);
  }
  // Pieces go group by group.
  __device__ __forceinline__ void read(uint4& there, u32 index) const {
    const u32 group = index / kPieces, p = index % kPieces;
    if (index < kCount && has(group, p, Pieces::kElements)) there = load_global_16(at(group, p));
  }
  __device__ __forceinline__ void store(const float (&acc)[C::kRowTiles][C::kWarpN / 2], u32 lane) const {
    uint4 there[kAhead];
    if (kAdds) {
#pragma unroll
      for (u32 index = 0; index < kAhead; ++index) read(there[index], index);
    }
#pragma unroll
    for (u32 index = 0; index < kCount; ++index) {
      const u32 group = index / kPieces, p = index % kPieces;
      u32 words[4];
      Pieces::gather(words, &acc[group / 2][Pieces::kColumns / 2 * p], group % 2, lane);
      const uint4 was = there[index % kAhead];
      if (kAdds) read(there[index % kAhead], index + kAhead);
      if (has(group, p, Pieces::kElements)) {
        if (kAdds) {
          words[0] = Pieces::add(was.x, words[0]);
          words[1] = Pieces::add(was.y, words[1]);
          words[2] = Pieces::add(was.z, words[2]);
          words[3] = Pieces::add(was.w, words[3]);
        }
        store_global_16(at(group, p), words);
      } else if (has(group, p, 1)) {
        edge(at(group, p), words, columns - i32(Pieces::kColumns * p));
      }
    }
  }
  // A piece that is cut off by the end of a row.
  __device__ __forceinline__ void edge(Value* to, const u32 (&words)[4], i32 elements) const {
#pragma unroll
    for (u32 e = 0; e + 1 < Pieces::kElements; ++e) {
      if (i32(e) >= elements) return;
      const Value value = Pieces::value(words, e);
      to[e] = kAdds ? Pieces::sum(to[e], value) : value;
    }
  }
};

// What is stored of a tile.
template <typename C>
struct PortableGemmStore {
  const PortableGemmArguments& arguments;
  const u32 column;  // of D: the tile's first
  const u32 rows;    // of the tile
  const u64 d;       // the tile's first row

  __device__ __forceinline__ void add_bias(float (&acc)[C::kRowTiles][C::kWarpN / 2], u32 first) const {
#pragma unroll
    for (u32 n = 0; n < C::kWarpN / 8; ++n) {
      const u32 at = first + 8 * n;
      const float low = at < arguments.n ? to_float(arguments.bias[at]) : 0.0f;
      const float high = at + 1 < arguments.n ? to_float(arguments.bias[at + 1]) : 0.0f;
#pragma unroll
      for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) acc[m][4 * n + e] += e % 2 == 0 ? low : high;
      }
    }
  }

  template <typename Pieces, bool kAdds>
  __device__ __forceinline__ void store_as(const float (&acc)[C::kRowTiles][C::kWarpN / 2], u32 lane, u32 row,
                                           u32 first) const {
    const u32 at = column + first + Pieces::column(lane), r = row + lane / 4;
    auto* to = reinterpret_cast<typename Pieces::Value*>(d) + (u64(r) * arguments.d_stride + at);
    const i32 rows_left = i32(rows - r), columns_left = i32(arguments.n - at);
    if (rows == C::kTileM && i32(arguments.n - column) >= i32(C::kTileN)) {
      PortableGemmPart<C, Pieces, kAdds, true>{to, arguments.d_stride, rows_left, columns_left}.store(acc, lane);
    } else {
      PortableGemmPart<C, Pieces, kAdds, false>{to, arguments.d_stride, rows_left, columns_left}.store(acc, lane);
    }
  }
  // A warp's part, whose corner is at a row and column of the tile.
  __device__ __forceinline__ void store(float (&acc)[C::kRowTiles][C::kWarpN / 2], u32 lane, u32 row, u32 first) const {
    if (arguments.bias != nullptr) add_bias(acc, column + first + 2 * (lane % 4));
    if (arguments.wide) {
      arguments.adds ? store_as<FloatPieces, true>(acc, lane, row, first)
                     : store_as<FloatPieces, false>(acc, lane, row, first);
    } else {
      arguments.adds ? store_as<ElementPieces, true>(acc, lane, row, first)
                     : store_as<ElementPieces, false>(acc, lane, row, first);
    }
  }

  // Fetches all of it into the level 2 cache, by 32 bytes.
  __device__ __forceinline__ void prefetch() const {
    arguments.wide ? prefetch_as<float>() : prefetch_as<Element>();
  }
  template <typename Value>
  __device__ __forceinline__ void prefetch_as() const {
    constexpr u32 kElements = 32 / sizeof(Value), kPieces = C::kTileN / kElements, kStep = C::kThreads / kPieces;
    const u32 at = column + threadIdx.x % kPieces * kElements;
    if (at >= arguments.n) return;
    const u32 first = threadIdx.x / kPieces;
    const Value* from = reinterpret_cast<const Value*>(d) + (u64(first) * arguments.d_stride + at);
#pragma unroll 1
    for (u32 row = first; row < rows; row += kStep, from += u64(kStep) * arguments.d_stride) prefetch_l2(from);
  }
};

}  // namespace counterpoint
