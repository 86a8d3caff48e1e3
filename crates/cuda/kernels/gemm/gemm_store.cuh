// The way of a result from accumulators to memory: a warpgroup puts 64 rows of 64 or 128 bytes into shared memory, and a thread that
// has nothing else to do lets the copy engine store them, or add them, wherever they belong, and tells who waits for them.
#pragma once

#include "gemm/gemm_work.cuh"
#include "ptx/flag.cuh"
#include "ptx/matrix.cuh"

namespace counterpoint {

// Where piece `piece` of 16 bytes of a row of a chunk lies, rows having `kPieces`: as the copy engine wants it, which changes
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
        store_rest<float, 32>(arguments, chunk, from, reinterpret_cast<float*>(arguments.d[destination]) + first);
      } else {
        store_rest<Element, C::kChunkColumns>(arguments, chunk, from,
                                              reinterpret_cast<Element*>(arguments.d[destination]) + first);
      }
    }
    tma_store_commit();
    tma_store_wait_read<0>();
    mbarrier_arrive(&shared.chunk_empty[group][buffer]);
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
  tma_store_wait<0>();
}

// One warpgroup's end of it.
template <typename C>
struct GemmStaging {
  const GemmArguments& arguments;
  GemmShared<C>& shared;
  const u32 group;
  const u32 warp;
  const u32 lane;
  u32 number = 0;  // chunks so far

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

  // A tile of f32 or of elements, of which `acc` are this thread's accumulators.
  template <bool kWide>
  __device__ __forceinline__ void tile(const float (&acc)[C::kTileN / 2], const GemmRowTile& of, u32 column,
                                       u32 signal_group) {
    constexpr u32 kColumns = kWide ? 32 : C::kChunkColumns;
    constexpr u32 kChunks = C::kTileN / kColumns;
    const u8 rows = u8(min(64u, of.rows - min(of.rows, 64 * group)));
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      const GemmChunk chunk{i32(column + c * kColumns), i32(of.destination_row + 64 * group), signal_group,
                            of.destination, rows, c + 1 == kChunks ? kChunkLast : u8(0)};
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
    const u32 row = 16 * warp + 8 * ((lane / 8) % 2) + lane % 8;
    const u32 address = shared_address(to);
#pragma unroll
    for (u32 j = 0; j < C::kChunkColumns / 8; j += 2) {
      const u32 matrices[4] = {pack(from[4 * j], from[4 * j + 1]), pack(from[4 * j + 2], from[4 * j + 3]),
                               pack(from[4 * j + 4], from[4 * j + 5]), pack(from[4 * j + 6], from[4 * j + 7])};
      store_matrix_x4(address + chunk_offset<C::kChunkColumns / 8>(row, j + lane / 16), matrices);
    }
  }
  __device__ __forceinline__ void write_floats(u8* to, const float* from) const {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 row = 16 * warp + 8 * i + lane / 4;
        const u32 offset = chunk_offset<8>(row, 2 * j + (lane % 4) / 2) + 8 * (lane % 2);
        *reinterpret_cast<float2*>(to + offset) =
            float2{from[4 * j + 2 * i], from[4 * j + 2 * i + 1]};
      }
    }
  }

  __device__ __forceinline__ void finish() {
    stage(GemmChunk{0, 0, 0, 0, 0, kChunkNone}, [](u8*) {});
  }
};

}  // namespace counterpoint
