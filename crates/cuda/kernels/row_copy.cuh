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

template <typename Word>
__device__ __forceinline__ void copy_words(const u8* from, u8* to, u32 bytes, u32 lane, u32 lanes) {
  constexpr u32 kUnroll = 4;
  const Word* src = reinterpret_cast<const Word*>(from);
  Word* dst = reinterpret_cast<Word*>(to);
  const u32 words = bytes / sizeof(Word);
  u32 i = lane;
  for (; i + lanes * (kUnroll - 1) < words; i += lanes * kUnroll) {
    Word held[kUnroll];
#pragma unroll
    for (u32 u = 0; u < kUnroll; ++u) held[u] = src[i + lanes * u];
#pragma unroll
    for (u32 u = 0; u < kUnroll; ++u) dst[i + lanes * u] = held[u];
  }
  for (; i < words; i += lanes) dst[i] = src[i];
}

// Any number of blocks. Every address, offset and length is a multiple of `alignment`: 16, 8, 4 or 2. A piece has `lanes`
// lanes, a power of two up to 32: few where pieces are short, so that a warp has several on their way.
__device__ __forceinline__ void row_copy(const RowCopyTensors& tensors, const RowCopyPiece* __restrict__ pieces,
                                         u32 count, u32 alignment, u32 lanes) {
  const u32 lane = threadIdx.x % lanes;
  const u32 groups = gridDim.x * (kRowCopyThreads / lanes);
  u32 i = blockIdx.x * (kRowCopyThreads / lanes) + threadIdx.x / lanes;
  if (i >= count) return;
  RowCopyPiece next = pieces[i];
  for (; i < count; i += groups) {
    const RowCopyPiece piece = next;
    // Short pieces would otherwise wait for the list as long as for their rows.
    if (i + groups < count) next = pieces[i + groups];
    const u8* from = reinterpret_cast<const u8*>(tensors.sources[piece.source]) + piece.from;
    u8* to = reinterpret_cast<u8*>(tensors.targets[piece.target]) + piece.to;
    if (alignment == 16) {
      copy_words<uint4>(from, to, piece.bytes, lane, lanes);
    } else if (alignment == 8) {
      copy_words<uint2>(from, to, piece.bytes, lane, lanes);
    } else if (alignment == 4) {
      copy_words<u32>(from, to, piece.bytes, lane, lanes);
    } else {
      copy_words<u16>(from, to, piece.bytes, lane, lanes);
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
    const u8* from = reinterpret_cast<const u8*>(tensors.sources[piece.source]) + piece.from;
    u8* to = reinterpret_cast<u8*>(tensors.targets[piece.target]) + piece.to;
    for (u32 e = lane; e < piece.bytes / sizeof(T); e += 32) {
      const float value = widen(reinterpret_cast<const T*>(from)[e]);
      reinterpret_cast<T*>(to)[e] = narrow<T>(through<Wire>(value));
    }
  }
}

}  // namespace counterpoint
