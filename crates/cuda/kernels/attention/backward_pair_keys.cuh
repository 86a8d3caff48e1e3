// The warpgroups of a pair's CTA that hold gradients of its 64 keys. One computes S and P and owns dv; the other computes
// dP and dS and owns dk, and takes P from the first.
#pragma once

#include "attention/backward_keys.cuh"
#include "attention/backward_pair.cuh"

namespace counterpoint {

namespace backward_pair {

// Where a lane leaves its part of P, 64 bytes in four pieces 512 bytes apart. A warp's part lies where its part of dS will:
// the warp of the other warpgroup that reads it is the one that overwrites it.
template <typename C>
__device__ __forceinline__ u32 own_weights(const Storage<C>& shared, u32 slot) {
  return shared_address(shared.ds[slot]) + threadIdx.x % 128 / 32 * 2048 + threadIdx.x % 32 * 16;
}

template <u32 kCount>
__device__ __forceinline__ void store_weights(u32 address, const u32 (&w)[kCount][4]) {
#pragma unroll
  for (u32 k = 0; k < kCount; ++k) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address + 512 * k), "r"(w[k][0]), "r"(w[k][1]),
                 "r"(w[k][2]), "r"(w[k][3])
                 : "memory");
  }
}

template <u32 kCount>
__device__ __forceinline__ void load_weights(u32 address, u32 (&w)[kCount][4]) {
#pragma unroll
  for (u32 k = 0; k < kCount; ++k) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[k][0]), "=r"(w[k][1]), "=r"(w[k][2]), "=r"(w[k][3])
                 : "r"(address + 512 * k)
                 : "memory");
  }
}

// Adds to the gradients of 64 keys: those of the scores [64, kRows], in registers, times rows [kRows, kDim].
template <typename C, u32 kDim>
__device__ __forceinline__ void add_products(float (&d)[kDim / 2], const u32 (&a)[C::kRows / 16][4], u32 rows) {
  // The compiler refuses 128 accumulators of one instruction where a thread has 128 registers before its role begins.
  constexpr u32 kColumns = kDim > 192 ? kDim / 2 : kDim;
#pragma unroll
  for (u32 k = 0; k < C::kRows / 16; ++k) {
#pragma unroll
    for (u32 c = 0; c < kDim; c += kColumns) {
      Wgmma<kColumns>::template rs<Major::kMN>(reinterpret_cast<float (&)[kColumns / 2]>(d[c / 2]), a[k],
                                               descriptor(rows, c / 64 * kChunkBytes + k * 2048), 1);
    }
  }
}

// S, P and dv.
template <typename C>
__device__ __forceinline__ void value_role(const BackwardParams<C>& params, Storage<C>& shared) {
  u32 count = 0;
  while (true) {
    mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
    u32 flags = step_flags(shared, count);
    if (flags & (kExit | kEmpty)) {
      release_to_both(&shared.empty_q[slot_of(count)]);
      mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count) ^ 1);
      if (elect_one()) mbarrier_arrive(&shared.full_p[slot_of(count)]);
      mbarrier_wait(&shared.full_dout[dout_slot_of<C>(count)], dout_parity_of<C>(count));
      release_to_both(&shared.empty_dout[dout_slot_of<C>(count)]);
      if (flags & kExit) break;
      store_zeros<1>(params, shared.steps[count % kSteps]);
      __syncwarp();
      ++count;
      continue;
    }
    float dv[C::kHeadDimV / 2];
    set_zero(dv);
    mbarrier_wait(&shared.full_k, item_parity_of(flags));
    while (true) {
      flags = step_flags(shared, count);
      u32 p[C::kRows / 16][4];
      {
        u32 w[C::kRows / 16][4];
        float s[C::kRows / 2];
        wgmma_fence();
        multiply_keys_rows<C>(s, operand<C>(shared_address(shared.k)),
                              operand<C>(shared_address(shared.q[0]) + slot_of(count) * (C::kChunks * kChunkBytes)));
        wgmma_commit();
        const bool bounded = flags & kBounded;
        u32 rows[2][C::kRows / 32];
        if (bounded) {
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            key_rows(params, shared.steps[count % kSteps], i32(8 * i), reinterpret_cast<u32 (&)[1][C::kRows / 32]>(rows[i]));
          }
        }
        __syncwarp();
        if constexpr (C::kProductsUnderNext) {
          // dV of the block before is done.
          wgmma_wait<1>();
          if (!(flags & kFirst)) release_to_both(&shared.empty_dout[dout_slot_of<C>(count - 1)]);
        }
        wgmma_wait<0>();
        pin(s);
        weigh(params, shared.lse[slot_of(count)], bounded, rows, s, p, w);
        __syncwarp();
        release_to_both(&shared.empty_q[slot_of(count)]);
        mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count) ^ 1);
        store_weights(own_weights(shared, slot_of(count)), w);
      }
      __syncwarp();
      if (elect_one()) mbarrier_arrive(&shared.full_p[slot_of(count)]);
      mbarrier_wait(&shared.full_dout[dout_slot_of<C>(count)], dout_parity_of<C>(count));
      wgmma_fence();
      const u32 dout_rows =
          operand<C>(shared_address(shared.dout[0]) + dout_slot_of<C>(count) * (C::kChunksV * kChunkBytes), kChunkBytes);
      add_products<C, C::kHeadDimV>(dv, p, dout_rows);
      wgmma_commit();
      const bool last = step_flags(shared, count) & kLast;
      ++count;
      if (last) break;
      if constexpr (!C::kProductsUnderNext) {
        wgmma_wait<0>();
        release_to_both(&shared.empty_dout[dout_slot_of<C>(count - 1)]);
      }
      mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
    }
    wgmma_wait<0>();
    release_to_both(&shared.empty_dout[dout_slot_of<C>(count - 1)]);
    pin(dv);
    store_gradient<1>(params, shared.steps[(count - 1) % kSteps], dv, 1.0f);
    __syncwarp();
  }
}

// Hands dS of this warp's 16 keys to the other CTA.
template <typename C>
__device__ __forceinline__ void send_gradients(Storage<C>& shared, u32 slot) {
  const u32 part = threadIdx.x % 128 / 32 * 2048;
  const u32 peer = cluster_rank() ^ 1;
  if (elect_one()) {
    // The other CTA's warp of the same number sends as much.
    mbarrier_arrive_expect(&shared.full_ds[slot], 2048);
    peer_copy(peer_address(shared_address(shared.peer_ds[slot]) + part, peer), shared_address(shared.ds[slot]) + part,
              2048, peer_address(shared_address(&shared.full_ds[slot]), peer));
  }
}

// dP, dS and dk.
//
// Long: the mainloop, whose accumulators and barriers every line shares.
template <typename C>
__device__ __forceinline__ void key_role(const BackwardParams<C>& params, Storage<C>& shared) {
  u32 count = 0;
  while (true) {
    mbarrier_wait(&shared.full_dout[dout_slot_of<C>(count)], dout_parity_of<C>(count));
    u32 flags = step_flags(shared, count);
    if (flags & (kExit | kEmpty)) {
      release_to_both(&shared.empty_dout[dout_slot_of<C>(count)]);
      mbarrier_wait(&shared.full_p[slot_of(count)], parity_of(count));
      if (elect_one()) mbarrier_arrive(&shared.full_ds[slot_of(count)]);
      mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
      release_to_both(&shared.empty_q[slot_of(count)]);
      if (flags & kExit) break;
      store_zeros<0>(params, shared.steps[count % kSteps]);
      __syncwarp();
      ++count;
      continue;
    }
    float dk[C::kHeadDim / 2];
    set_zero(dk);
    mbarrier_wait(&shared.full_v, item_parity_of(flags));
    while (true) {
      flags = step_flags(shared, count);
      u32 ds[C::kRows / 16][4];
      {
        float dp[C::kRows / 2];
        wgmma_fence();
        multiply_keys_rows<C, C::kHeadDimV>(
            dp, operand<C>(shared_address(shared.v)),
            operand<C>(shared_address(shared.dout[0]) + dout_slot_of<C>(count) * (C::kChunksV * kChunkBytes)));
        wgmma_commit();
        __syncwarp();
        if constexpr (C::kProductsUnderNext) {
          // dK of the block before is done.
          wgmma_wait<1>();
          if (!(flags & kFirst)) release_to_both(&shared.empty_q[slot_of(count - 1)]);
        }
        wgmma_wait<0>();
        pin(dp);
        u32 w[C::kRows / 16][4];
        mbarrier_wait(&shared.full_p[slot_of(count)], parity_of(count));
        load_weights(own_weights(shared, slot_of(count)), w);
        // Where dS goes, lanes have read P.
        __syncwarp();
        const u32 ds_rows = own_matrix_row<C>(shared_address(shared.ds[slot_of(count)]));
#pragma unroll
        for (u32 k = 0; k < C::kRows / 16; ++k) {
#pragma unroll
          for (u32 n = 0; n < 2; ++n) {
            const float2 delta = column_values(shared.delta[dout_slot_of<C>(count)], 2 * k + n);
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
              const u32 at = 2 * n + i;
              const float2 weight = unpack_half(w[k][at]);
              const float low = weight.x * (dp[8 * k + 2 * at] - delta.x);
              const float high = weight.y * (dp[8 * k + 2 * at + 1] - delta.y);
              ds[k][at] = pack(low, high);
            }
          }
          store_matrix_x4(ds_rows ^ (k << 5), ds[k]);
        }
      }
      fence_async_proxy();
      __syncwarp();
      send_gradients(shared, slot_of(count));
      release_to_both(&shared.empty_dout[dout_slot_of<C>(count)]);
      mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
      wgmma_fence();
      const u32 q_rows =
          operand<C>(shared_address(shared.q[0]) + slot_of(count) * (C::kChunks * kChunkBytes), kChunkBytes);
      add_products<C, C::kHeadDim>(dk, ds, q_rows);
      wgmma_commit();
      const bool last = step_flags(shared, count) & kLast;
      ++count;
      if (last) break;
      if constexpr (!C::kProductsUnderNext) {
        wgmma_wait<0>();
        release_to_both(&shared.empty_q[slot_of(count - 1)]);
      }
      mbarrier_wait(&shared.full_dout[dout_slot_of<C>(count)], dout_parity_of<C>(count));
    }
    wgmma_wait<0>();
    release_to_both(&shared.empty_q[slot_of(count - 1)]);
    pin(dk);
    store_gradient<0>(params, shared.steps[(count - 1) % kSteps], dk, params.all.scale);
    __syncwarp();
  }
}

}  // namespace backward_pair

}  // namespace counterpoint
