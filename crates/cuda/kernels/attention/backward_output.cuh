// How V comes to the warpgroups that own keys, and dk and dv leave them: rounded, by way of V's buffer, in whole lines. From
// registers, 8 bytes a thread, they take as long as one and a half blocks.
//
// A warp's 16 keys of V are its own: when dP of the item's last block is done its dv passes there, then dk, and then it fetches its
// keys of the next item's V, which the first dP will wait for. So nobody else need know when that memory is free.
#pragma once

#include "attention/backward_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/matrix.cuh"

namespace counterpoint {

namespace backward {

// Blocks of 128 rows leave no registers for it.
constexpr bool kOutputInLines = !kOutputF32 && kRows == 64;

// The first of this thread's two keys in the tile; the other is 8 further. Asked for again where it is wanted, because
// the main loop has no register to keep it.
__device__ __forceinline__ i32 own_key() {
  const u32 thread = threadIdx.x % (2 * kOwnKeys);  // the warpgroups that own keys come last
  const u32 first = kCtas == 2 ? kOwnKeys * cluster_rank() : 0;
  return i32(first + 16 * (thread / 32) + thread % 32 / 4);
}

// Which of the two warpgroups that own keys this thread is of, and which of their warps. Likewise.
__device__ __forceinline__ u32 own_warpgroup() { return uniform(thread_now() / 128 % 2); }
__device__ __forceinline__ u32 own_warp() { return uniform(thread_now() / 32 % 8); }

// Where this lane's row of a stored matrix of this warp's keys lies in a buffer: 128 bytes a key, 16-byte pieces swizzled by the key.
// Asked for again at every block, like own_key.
__device__ __forceinline__ u32 own_matrix_row(u32 buffer, u32 thread_of_block = threadIdx.x) {
  const u32 thread = thread_of_block % (2 * kOwnKeys);
  const u32 key = 16 * (thread / 32) + thread % 16;
  return buffer + key * 128 + (((thread % 32 / 16) ^ (key % 8)) << 4);
}

// Stores the accumulators of a warpgroup, 64 keys x a head, times `factor`.
template <u32 kCount>
__device__ __forceinline__ void store_gradient(void* out, u32 head_dim, const AttentionBackwardArguments& params,
                                               const Step& step, const float (&d)[kCount], float factor) {
  const i32 key = uniform_load(&step.key) + own_key();
  const i32 key_end = uniform_load(&step.key_end);
  const u32 head = uniform_load(&step.head_kv);
  const u32 c = threadIdx.x % 4;
  const u64 row_stride = u64(params.heads_kv) * head_dim;
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    const bool owned = row < key_end;
    const u64 base = u64(u32(row)) * row_stride + u64(head) * head_dim;
    if (kOutputF32) {
      float* to = static_cast<float*>(out) + base;
#pragma unroll
      for (u32 j = 0; j < kCount / 4; ++j) {
        const u32 column = 8 * j + 2 * c;
        if (owned && column < head_dim) {
          *reinterpret_cast<float2*>(to + column) =
              make_float2(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
        }
      }
    } else {
      // Neighbours swap pairs, so that a thread writes 8 bytes and four threads a whole sector.
      Element* to = static_cast<Element*>(out) + base;
      const bool odd = c & 1;
#pragma unroll
      for (u32 j = 0; j < kCount / 4; j += 2) {
        const u32 even_tile = pack(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
        const u32 odd_tile = pack(d[4 * j + 4 + 2 * i] * factor, d[4 * j + 5 + 2 * i] * factor);
        const u32 other = __shfl_xor_sync(0xffffffffu, odd ? even_tile : odd_tile, 1);
        const u32 column = 8 * (j + (odd ? 1 : 0)) + 2 * (c & ~1u);
        if (owned && column < head_dim) {
          *reinterpret_cast<uint2*>(to + column) =
              make_uint2(odd ? other : even_tile, odd ? odd_tile : other);
        }
      }
    }
  }
}

// Zeros for keys that nobody sees.
__device__ __forceinline__ void store_zeros(void* out, u32 head_dim, const AttentionBackwardArguments& params,
                                            const Step& step) {
  const i32 key = uniform_load(&step.key) + own_key();
  const i32 key_end = uniform_load(&step.key_end);
  const u32 head = uniform_load(&step.head_kv);
  const u32 lane = threadIdx.x % 32;
  constexpr u32 kSize = kOutputF32 ? 4 : 2;
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    if (row >= key_end) continue;
    u8* to = static_cast<u8*>(out) + (u64(u32(row)) * params.heads_kv + head) * head_dim * kSize;
    for (u32 x = 16 * (lane % 4); x < head_dim * kSize; x += 64) {
      *reinterpret_cast<uint4*>(to + x) = make_uint4(0, 0, 0, 0);
    }
  }
}

// Fetches this warp's keys of V, of the item that begins with `step`. Who has seen its K knows that V has come to this device.
__device__ __forceinline__ void fetch_values(const AttentionBackwardArguments& params, Storage& shared, const Step& step) {
  const u32 warp = own_warp();
  if (elect_one()) {
    // The thread that waited for the rows is not the one whose copy engine reads them here.
    if (params.arrivals.mailbox != nullptr) fence_async_proxy_all();
    // dk of the item before has been read there.
    fence_async_proxy();
    i32 key = step.key;
    const TensorMap* map = key_map(params.v, params.arriving_v, params.own_rows, key);
    u64* full = &shared.full_v[warp / 4];
    mbarrier_arrive_expect(full, kKeyBytes / 8);
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      tma_load_3d(shared.v + c * (kKeys * 128) + warp * (kWarpKeys * 128), map, full, 64 * c, step.head_kv,
                  key + i32(kWarpKeys * warp));
    }
  }
  __syncwarp();
}

// Writes this warp's accumulators, 16 keys x a head, times `factor`, rounded, by way of where its keys of V were.
template <u32 kCount>
__device__ __forceinline__ void put_gradient(void* out, u32 head_dim, const AttentionBackwardArguments& params,
                                             Storage& shared, const Step& step, const float (&d)[kCount], float factor) {
  constexpr u32 kPieces = kHeadDim / 8;  // of 16 bytes, of a key
  constexpr u32 kAtOnce = 32 / kPieces;  // keys
  const u32 thread = thread_now();
  const u32 matrix_row = own_matrix_row(shared_address(shared.v), thread);
#pragma unroll
  for (u32 j = 0; j < kCount / 4; j += 2) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = pack(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
    store_matrix_x4((matrix_row ^ (j % 8 << 4)) + j / 8 * (kKeys * 128), pairs);
  }
  __syncwarp();
  const u32 first = kWarpKeys * (thread / 32 % 8) + thread % 32 / kPieces;  // of the tile's keys
  const u32 piece = thread % kPieces;
  const i32 key = uniform_load(&step.key);
  const u32 owned = 8 * piece < head_dim ? u32(uniform_load(&step.key_end) - key) : 0;
  const u64 stride = u64(params.heads_kv) * head_dim;
  Element* to = static_cast<Element*>(out) + (u64(u32(key)) + first) * stride + u64(uniform_load(&step.head_kv)) * head_dim +
                8 * piece;
  const u8* from = shared.v + piece / 8 * (kKeys * 128);
#pragma unroll
  for (u32 i = 0; i < kWarpKeys / kAtOnce; ++i) {
    const u32 row = first + i * kAtOnce;
    const uint4 value = *reinterpret_cast<const uint4*>(from + row * 128 + ((piece ^ row) % 8 << 4));
    if (row < owned) *reinterpret_cast<uint4*>(to + i * kAtOnce * stride) = value;
  }
  __syncwarp();
}

}  // namespace backward

}  // namespace counterpoint
