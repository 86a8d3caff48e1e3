// Tiles of a product read by another kernel, of this GPU or another, while the product runs on: what is counted are elements that
// are not of their round. What a kernel's epilogue promises with a signal is all that orders the two.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/flag.cuh"
#include "ptx/tma.cuh"

namespace counterpoint {

constexpr u32 kSignalLitmusThreads = 128;
// Bytes of a tile's row that are read at once.
constexpr u32 kSignalLitmusRowBytes = 128;

// Shared with the host.
struct SignalLitmusTile {
  u32 row;
  u32 rows;
  u32 column_byte;  // a multiple of 16
  u32 bytes;        // of each row, a multiple of 16
};

// Shared with the host.
struct SignalLitmusCall {
  const u8* d;
  u64 row_bytes;
  const SignalLitmusTile* tiles;  // in the order in which they are begun
  const u32* counters;            // of each tile
  u64* wrong;                     // words that were not of their round
  u64* read;                      // tiles that were read
  u64 limit;                      // of a wait, in nanoseconds
  u32 tile_count;
  u32 rise;      // of a counter in each round
  u32 round;     // from 1
  u32 expected;  // two elements
  u32 of_system;  // whether another GPU's product raises the counters
};

__device__ __forceinline__ u32 signal_litmus_mix(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

__device__ __forceinline__ u32 load_acquire_system(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Waits for a tile; whether it came.
__device__ __forceinline__ bool signal_litmus_wait(const SignalLitmusCall& call, u32 tile) {
  const u32 wanted = call.rise * call.round;
  const u64 began = global_nanoseconds();
  for (;;) {
    const u32* counter = call.counters + tile;
    const u32 seen = call.of_system != 0 ? load_acquire_system(counter) : load_acquire(counter);
    if (i32(seen - wanted) >= 0) return true;
    if (global_nanoseconds() - began > call.limit) return false;
  }
}

// Every other block reads in the ordinary way, which may find old lines in its cache, the others by TMA, which goes by
// another proxy. Each has every `gridDim.x`-th tile; a quarter of them is waited for with a delay of up to two microseconds.
__device__ __forceinline__ void signal_litmus(const SignalLitmusCall& call) {
  __shared__ alignas(128) u32 row_copy[kSignalLitmusRowBytes / 4];
  __shared__ u64 full;
  __shared__ u32 came;
  const bool by_copy_engine = blockIdx.x % 2 == 1;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  u32 copies = 0;
  u64 wrong = 0, read = 0;
  for (u32 t = blockIdx.x; t < call.tile_count; t += gridDim.x) {
    const u32 drawn = signal_litmus_mix(call.round * 0x9e3779b9u + t);
    if (threadIdx.x == 0) {
      came = signal_litmus_wait(call, t);
      const u64 begin = clock64();
      while (drawn % 4 == 0 && clock64() - begin < (drawn >> 8) % 4096) {
      }
    }
    __syncthreads();
    if (came == 0) break;
    const SignalLitmusTile tile = call.tiles[t];
    const u8* from = call.d + tile.row * call.row_bytes + tile.column_byte;
    if (by_copy_engine) {
      // A few rows of each tile, others in every round.
      for (u32 i = 0; i < 4; ++i) {
        const u32 row = (drawn + i * 37) % tile.rows;
        const u32 bytes = min(tile.bytes, kSignalLitmusRowBytes);
        if (threadIdx.x == 0) {
          fence_async_proxy_all();
          mbarrier_arrive_expect(&full, bytes);
          bulk_load(row_copy, from + row * call.row_bytes, bytes, &full);
        }
        mbarrier_wait(&full, copies++ % 2);
        for (u32 w = threadIdx.x; w < bytes / 4; w += blockDim.x) wrong += row_copy[w] != call.expected;
        __syncthreads();
      }
    } else {
      const u32 vectors = tile.bytes / 16;
      for (u32 i = threadIdx.x; i < tile.rows * vectors; i += blockDim.x) {
        const u8* at = from + (i / vectors) * call.row_bytes + (i % vectors) * 16;
        const uint4 words = *reinterpret_cast<const uint4*>(at);
        wrong += (words.x != call.expected) + (words.y != call.expected) + (words.z != call.expected) +
                 (words.w != call.expected);
      }
    }
    read += threadIdx.x == 0;
    __syncthreads();
  }
  if (wrong != 0) atomicAdd(reinterpret_cast<unsigned long long*>(call.wrong), wrong);
  if (read != 0) atomicAdd(reinterpret_cast<unsigned long long*>(call.read), read);
}

}  // namespace counterpoint
