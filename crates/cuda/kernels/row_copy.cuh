// Ranges of rows of many tensors to ranges of rows of others, in one launch: the receiving end of a group-cast.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kRowCopyThreads = 256;
constexpr u32 kRowCopySources = 240;
constexpr u32 kRowCopyTargets = 16;

// Where the tensors begin. By value, since they may be bound anew for every run, while the list of pieces stays.
struct RowCopyTensors {
  u64 sources[kRowCopySources];
  u64 targets[kRowCopyTargets];
};

// Bytes that lie together on both sides; a group of lanes copies them.
struct RowCopyPiece {
  u64 from;  // bytes into the source
  u64 to;    // bytes into the target
  u32 bytes;
  u16 source;
  u16 target;
};
static_assert(sizeof(RowCopyPiece) == 24 && sizeof(RowCopyTensors) == 2048, "layouts shared with the host");

// Words of 16 bytes that a lane has on their way at once: as many as there are registers for when a multiprocessor holds all
// threads that it can (aligned), or half of them.
constexpr u32 kRowCopyUnroll = 2;
constexpr u32 kRowCopyUnalignedUnroll = 4;

// Any number of blocks. Every address, offset and length is a multiple of 16. A piece has `lanes` lanes, a power of two up to
// 32: few where pieces are short, so that a warp has several on their way.
__device__ __forceinline__ void row_copy(const RowCopyTensors& tensors, const RowCopyPiece* __restrict__ pieces,
                                         u32 count, u32 lanes) {
  const u32 lane = threadIdx.x % lanes;
  const u32 groups = gridDim.x * (kRowCopyThreads / lanes);
  u32 i = blockIdx.x * (kRowCopyThreads / lanes) + threadIdx.x / lanes;
  if (i >= count) return;
  RowCopyPiece next = pieces[i];
  for (; i < count; i += groups) {
    const RowCopyPiece piece = next;
    // Short pieces would otherwise wait for the list as long as for their rows.
    if (i + groups < count) next = pieces[i + groups];
    const uint4* from = reinterpret_cast<const uint4*>(tensors.sources[piece.source] + piece.from);
    uint4* to = reinterpret_cast<uint4*>(tensors.targets[piece.target] + piece.to);
    const u32 words = piece.bytes / 16;
    for (u32 first = lane; first < words; first += kRowCopyUnroll * lanes) {
      uint4 held[kRowCopyUnroll];
#pragma unroll
      for (u32 u = 0; u < kRowCopyUnroll; ++u) {
        if (first + u * lanes < words) held[u] = from[first + u * lanes];
      }
#pragma unroll
      for (u32 u = 0; u < kRowCopyUnroll; ++u) {
        if (first + u * lanes < words) to[first + u * lanes] = held[u];
      }
    }
  }
}

// The 16 bytes that begin `shift` bytes, below 16, into two neighbouring words.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, u32 shift) {
  u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (u32 w = 0; w < 6; ++w) words[w] = shift & 8 ? words[w + 2] : words[w];
#pragma unroll
  for (u32 w = 0; w < 5; ++w) words[w] = shift & 4 ? words[w + 1] : words[w];
  const u32 bits = 8 * (shift % 4);
  return make_uint4(__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
                    __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits));
}

// The word of the next lane, which for the last one is what lane 0 has in `after`.
__device__ __forceinline__ uint4 next_word(const uint4& word, const uint4& after, u32 lane) {
  const auto next = [&](u32 own, u32 wrapped) {
    return __shfl_sync(0xffffffffu, lane == 0 ? wrapped : own, (lane + 1) % 32);
  };
  return make_uint4(next(word.x, after.x), next(word.y, after.y), next(word.z, after.z), next(word.w, after.w));
}

// A warp's copy of `bytes` from `from` to `to`, both multiples of 2. Whole words of the target are put together from the two
// words of the source that hold their bytes; what is left at both ends goes by 2 bytes. Nothing outside of the source is read.
__device__ __forceinline__ void copy_unaligned(u64 from, u64 to, u32 bytes, u32 lane) {
  u32 head = u32(-to % 16);
  const u32 shift = u32((from + head) % 16);
  // The source word of the target's first whole word must not begin before the source.
  if (head < shift) head += 16;
  const u32 readable = bytes + shift < head ? 0 : (bytes + shift - head) / 16;
  const u32 words = shift != 0 && readable != 0 ? readable - 1 : readable;
  const u32 rest = bytes - 16 * words;
  // Below 48 bytes, so a lane has at most one pair; they are on their way with the words.
  const u32 end = 2 * lane < head ? 2 * lane : 2 * lane + 16 * words;
  u16 pair = 0;
  if (2 * lane < rest) pair = *reinterpret_cast<const u16*>(from + end);
  const uint4* source = reinterpret_cast<const uint4*>(from + head - shift);
  uint4* target = reinterpret_cast<uint4*>(to + head);
  constexpr u32 kUnroll = kRowCopyUnalignedUnroll;
  for (u32 first = 0; first < words; first += 32 * kUnroll) {
    // Lane 0 also has the word after those of all lanes.
    uint4 held[kUnroll + 1];
#pragma unroll
    for (u32 u = 0; u <= kUnroll; ++u) {
      const u32 word = first + 32 * u + lane;
      if (word < readable && (u < kUnroll || lane == 0)) held[u] = source[word];
    }
#pragma unroll
    for (u32 u = 0; u < kUnroll; ++u) {
      const uint4 after = next_word(held[u], held[u + 1], lane);
      const u32 word = first + 32 * u + lane;
      if (word < words) target[word] = shifted(held[u], after, shift);
    }
  }
  if (2 * lane < rest) *reinterpret_cast<u16*>(to + end) = pair;
}

// As `row_copy`, for addresses, offsets and lengths that are multiples of 2. A piece has a warp.
__device__ __forceinline__ void row_copy_unaligned(const RowCopyTensors& tensors,
                                                   const RowCopyPiece* __restrict__ pieces, u32 count) {
  const u32 warps = gridDim.x * (kRowCopyThreads / 32);
  u32 i = blockIdx.x * (kRowCopyThreads / 32) + threadIdx.x / 32;
  if (i >= count) return;
  RowCopyPiece next = pieces[i];
  for (; i < count; i += warps) {
    const RowCopyPiece piece = next;
    if (i + warps < count) next = pieces[i + warps];
    copy_unaligned(tensors.sources[piece.source] + piece.from, tensors.targets[piece.target] + piece.to,
                            piece.bytes, threadIdx.x % 32);
  }
}

// Elements that a lane has on their way at once where they are rounded.
constexpr u32 kRowCopyRoundedUnroll = 4;

// A warp's copy of elements, each rounded to a narrower type on its way.
template <typename T, typename Wire>
__device__ __forceinline__ void copy_rounded(u64 from, u64 to, u32 bytes, u32 lane) {
  const T* source = reinterpret_cast<const T*>(from);
  T* target = reinterpret_cast<T*>(to);
  const u32 count = bytes / sizeof(T);
  for (u32 first = lane; first < count; first += 32 * kRowCopyRoundedUnroll) {
    T held[kRowCopyRoundedUnroll];
#pragma unroll
    for (u32 u = 0; u < kRowCopyRoundedUnroll; ++u) {
      if (first + 32 * u < count) held[u] = source[first + 32 * u];
    }
#pragma unroll
    for (u32 u = 0; u < kRowCopyRoundedUnroll; ++u) {
      if (first + 32 * u < count) target[first + 32 * u] = narrow<T>(through<Wire>(widen(held[u])));
    }
  }
}

// As `row_copy`, with every element rounded to a narrower type on its way.
template <typename T, typename Wire>
__device__ __forceinline__ void row_copy_rounded(const RowCopyTensors& tensors, const RowCopyPiece* __restrict__ pieces,
                                                 u32 count) {
  const u32 lane = threadIdx.x % 32;
  const u32 warps = gridDim.x * (kRowCopyThreads / 32);
  for (u32 i = blockIdx.x * (kRowCopyThreads / 32) + threadIdx.x / 32; i < count; i += warps) {
    const RowCopyPiece piece = pieces[i];
    copy_rounded<T, Wire>(tensors.sources[piece.source] + piece.from, tensors.targets[piece.target] + piece.to,
                          piece.bytes, lane);
  }
}

}  // namespace counterpoint
