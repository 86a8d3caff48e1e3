// The way of a result from accumulators to memory: a warpgroup puts 64 rows of 64 or 128 bytes into shared memory, and a thread that
// has nothing else to do lets TMA store them, or add them, wherever they belong, and notifies who waits for them.
#pragma once

#include "gemm/gemm_parts.cuh"
#include "ptx/flag.cuh"
#include "ptx/matrix.cuh"

namespace counterpoint {

// Where piece `piece` of 16 bytes of a row of a chunk lies, rows having `kPieces`: as TMA wants it, which changes
// pieces' places by the number of the 128 bytes that they are in.
template <u32 kPieces>
__device__ __forceinline__ u32 chunk_offset(u32 row, u32 piece) {
  return 16 * (row * kPieces + (piece ^ (row * kPieces / 8 % kPieces)));
}

// The columns from n_whole on, fewer than 16 bytes of them, of a chunk that has them: by one thread, for they are few.
template <typename T, u32 kColumns>
__device__ __forceinline__ void store_rest(const GemmArguments& arguments, const GemmChunk& chunk, const u8* from, T* d) {
  if (arguments.n_whole >= u32(chunk.column) + kColumns || arguments.n_whole >= arguments.n) return;
  const u32 piece = (arguments.n_whole - u32(chunk.column)) * sizeof(T) / 16;
  for (u32 row = 0; row < chunk.rows; ++row) {
    const T* values = reinterpret_cast<const T*>(from + chunk_offset<kColumns * sizeof(T) / 16>(row, piece));
    T* to = d + u64(row) * arguments.d_stride + arguments.n_whole;
    for (u32 e = 0; e < arguments.n - arguments.n_whole; ++e) {
      if constexpr (sizeof(T) == 4) {
        to[e] = arguments.adds ? to[e] + values[e] : values[e];
      } else {
        to[e] = arguments.adds ? to_element(to_float(to[e]) + to_float(values[e])) : values[e];
      }
    }
  }
}

// The one thread that stores what warpgroup `group` computes.
template <typename C>
__device__ __forceinline__ void gemm_store(const GemmArguments& arguments, GemmShared<C>& shared, u32 group) {
  for (u32 number = 0;; ++number) {
    const u32 buffer = number % 2;
    mbarrier_wait(&shared.chunk_full[group][buffer], (number / 2) & 1);
    const GemmChunk chunk = shared.chunks[group][buffer];
    if (chunk.flags & kChunkNone) break;
    const u32 destination = chunk.destination;
    const u8* from = shared.staging[group][buffer];
    // The second warpgroup's rows may lie below all of the tile's.
    if (chunk.rows != 0 && u32(chunk.column) < arguments.n) {
      if (u32(chunk.column) < arguments.n_whole) {
        const TensorMap* map = &arguments.d_maps[destination];
        if (arguments.adds) {
          tma_reduce_add_2d(map, from, chunk.column, chunk.row);
        } else {
          tma_store_2d(map, from, chunk.column, chunk.row);
        }
      }
      const u64 first = u64(chunk.row) * arguments.d_stride;
      if (arguments.wide) {
        store_rest<float, C::kWideColumns>(arguments, chunk, from, reinterpret_cast<float*>(arguments.d[destination]) + first);
      } else {
        store_rest<Element, C::kChunkColumns>(arguments, chunk, from,
                                              reinterpret_cast<Element*>(arguments.d[destination]) + first);
      }
    }
    tma_store_commit();
    // Both buffers are read at once: the chunk before this one is, when only this one's group is not.
    tma_store_wait_read<1>();
    if (number > 0) mbarrier_arrive(&shared.chunk_empty[group][buffer ^ 1]);
    if ((chunk.flags & kChunkLast) && arguments.counters[destination] != 0) {
      // All of this thread's stores are complete, not only read, before others hear of them.
      tma_store_wait<0>();
      fence_async_proxy_all();
      u32* counter = reinterpret_cast<u32*>(arguments.counters[destination]) + chunk.group;
      if (arguments.counters_of_peers) {
        add_release_system(counter, 1);
      } else {
        add_release(counter, 1);
      }
    }
  }
  // Not complete: what comes after this kernel waits for that.
  tma_store_wait_read<0>();
}

// One warpgroup's end of it.
template <typename C>
struct GemmStaging {
  const GemmArguments& arguments;
  GemmShared<C>& shared;
  const u32 group;
  const u32 warp;
  const u32 lane;
  const u32 owned;  // chunks of a tile that this warpgroup stores, a bit each
  u32 number = 0;   // chunks so far

  // Waits for room, lets `write` fill it and hands it over.
  template <typename Write>
  __device__ __forceinline__ void stage(const GemmChunk& chunk, Write write) {
    const u32 buffer = number % 2;
    mbarrier_wait(&shared.chunk_empty[group][buffer], ((number / 2) & 1) ^ 1);
    write(shared.staging[group][buffer]);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      if (warp == 0) shared.chunks[group][buffer] = chunk;
      mbarrier_arrive(&shared.chunk_full[group][buffer]);
    }
    ++number;
  }

  // 64 rows of a tile of f32 or of elements, of which `acc` are this thread's accumulators.
  template <bool kWide>
  __device__ __forceinline__ void rows(const float (&acc)[C::kTileN / 2], u32 first_row, const GemmTile& of) {
    constexpr u32 kColumns = kWide ? C::kWideColumns : C::kChunkColumns;
    constexpr u32 kChunks = C::kTileN / kColumns, kWithin = C::kChunkColumns / kColumns;
    const u8 rows = u8(min(64u, of.rows - min(of.rows, first_row)));
    // Of a tile by boxes, where those of its rows begin (gemm_grouped.cuh).
    const auto row = [&] {
      if constexpr (C::kGrouped) {
        if (of.destination & 1) return first_row == 0 ? of.destination_row : of.group;
      }
      return of.destination_row + first_row;
    };
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      const u32 left = owned >> (c / kWithin);
      if ((left & 1) == 0) continue;
      const GemmChunk chunk{i32(of.column + c * kColumns), i32(row()), of.group,
                            of.destination, rows, left == 1 && (c + 1) % kWithin == 0 ? kChunkLast : u8(0)};
      stage(chunk, [&](u8* to) {
        const float* from = acc + c * (kColumns / 2);
        if constexpr (kWide) {
          write_floats(to, from);
        } else {
          write_elements(to, from);
        }
      });
    }
  }

  __device__ __forceinline__ void write_elements(u8* to, const float* from) const {
    u32 elements[C::kChunkColumns / 4];
#pragma unroll
    for (u32 w = 0; w < C::kChunkColumns / 4; ++w) elements[w] = pack(from[2 * w], from[2 * w + 1]);
    write_words(to, elements);
  }
  // Two elements in each word.
  __device__ __forceinline__ void write_words(u8* to, const u32 (&elements)[C::kChunkColumns / 4]) const {
    const u32 row = 16 * warp + 8 * ((lane / 8) % 2) + lane % 8;
    const u32 address = shared_address(to);
#pragma unroll
    for (u32 j = 0; j < C::kChunkColumns / 8; j += 2) {
      const u32 matrices[4] = {elements[2 * j], elements[2 * j + 1], elements[2 * j + 2], elements[2 * j + 3]};
      store_matrix_x4(address + chunk_offset<C::kChunkColumns / 8>(row, j + lane / 16), matrices);
    }
  }
  __device__ __forceinline__ void write_floats(u8* to, const float* from) const {
#pragma unroll
    for (u32 j = 0; j < C::kWideColumns / 8; ++j) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 row = 16 * warp + 8 * i + lane / 4;
        const u32 offset = chunk_offset<C::kWideColumns / 4>(row, 2 * j + (lane % 4) / 2) + 8 * (lane % 2);
        *reinterpret_cast<float2*>(to + offset) =
            float2{from[4 * j + 2 * i], from[4 * j + 2 * i + 1]};
      }
    }
  }

  __device__ __forceinline__ void finish() {
    stage(GemmChunk{0, 0, 0, 0, 0, kChunkNone}, [](u8*) {});
  }
};

// What of a tile is not in shared memory yet when its warpgroup goes on with the next one: nothing.
template <typename C>
struct GemmNothingHeld {
  static constexpr u32 kCount = 0;
  __device__ __forceinline__ void stage(GemmStaging<C>&, u32) {}
};

// The chunks of a tile for which there is no room in shared memory, as elements in registers. Multiprocessors come to the ends of
// their tiles together, and what they all send at once takes a link some microseconds: these chunks follow while the next tile is
// multiplied.
template <typename C>
struct GemmHeld {
  static constexpr u32 kChunks = C::kTileN / C::kChunkColumns;
  // As many as buffers are staged at once.
  static constexpr u32 kCount = kChunks > 2 ? kChunks - 2 : 0;
  static constexpr u32 kWords = C::kChunkColumns / 4;  // of a thread in a chunk

  GemmChunk first;  // the tile's
  bool any = false;
  u32 words[kCount > 0 ? kCount : 1][kWords];

  // Stages what there is room for, or, where `now`, all, and keeps the rest. `chunk` is the tile's first.
  __device__ __forceinline__ void take(GemmStaging<C>& staging, const GemmChunk& chunk, const float (&acc)[C::kTileN / 2],
                                       bool now) {
    first = chunk;
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      u32 elements[kWords];
#pragma unroll
      for (u32 w = 0; w < kWords; ++w) elements[w] = pack(acc[2 * (c * kWords + w)], acc[2 * (c * kWords + w) + 1]);
      if (c < kChunks - kCount || now) {
        write(staging, c, elements);
      } else {
#pragma unroll
        for (u32 w = 0; w < kWords; ++w) words[c - (kChunks - kCount)][w] = elements[w];
      }
    }
    any = !now;
  }

  // Stages one of those that were kept.
  __device__ __forceinline__ void stage(GemmStaging<C>& staging, u32 held) {
    if (any) write(staging, kChunks - kCount + held, words[held]);
    if (held + 1 == kCount) any = false;
  }

  // Parts for other ranks as their threads hold them, 16 rows, those of a warp, together; rows for TMA otherwise.
  __device__ __forceinline__ void write(GemmStaging<C>& staging, u32 c, const u32 (&elements)[kWords]) const {
    const bool part = first.flags & kChunkPart;
    GemmChunk chunk = first;
    chunk.column += c * (part ? 1 : C::kChunkColumns);
    if (c + 1 == kChunks) chunk.flags |= kChunkLast;
    staging.stage(chunk, [&](u8* to) {
      if (part) {
#pragma unroll
        for (u32 p = 0; p < kWords / 4; ++p) {
          *reinterpret_cast<uint4*>(to + place(staging.warp, p, staging.lane)) =
              make_uint4(elements[4 * p], elements[4 * p + 1], elements[4 * p + 2], elements[4 * p + 3]);
        }
      } else {
        staging.write_words(to, elements);
      }
    });
  }

  // Of 8 elements of a thread in a part's chunk.
  __device__ __forceinline__ static u32 place(u32 warp, u32 pack, u32 lane) {
    return ((warp * (kWords / 4) + pack) * 32 + lane) * 16;
  }
};

}  // namespace counterpoint
