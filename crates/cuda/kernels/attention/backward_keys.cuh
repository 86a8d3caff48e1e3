// The warpgroups of attention backward that own keys: S, P, dP, dS of each block, and the sums dk and dv.
#pragma once

#include "attention/backward_half_heads.cuh"
#include "attention/backward_sums.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

namespace backward {

// Which of a thread's rows are unmasked for its keys from `offset` on, each 8 further than the last: bit 8 (j % 4) + e of a
// key's word j / 4 is column 8 j + 2 (lane % 4) + e. Both keys at once take half the loads, where there are registers for it.
template <u32 kOfKeys, typename C>
__device__ __forceinline__ void key_rows(const BackwardParams<C>& params, const Step& step, i32 offset,
                                         u32 (&words)[kOfKeys][C::kRows / 32]) {
  const i32 key = uniform_load(&step.key) + own_key<C>() + offset;
  const i32 key_end = uniform_load(&step.key_end);
  const i32 row = uniform_load(&step.row);
  const i32 limit = uniform_load(&step.row_end) - row;
  const u32 bound_begin = uniform_load(&step.bound_begin);
  const u32 bound_end = uniform_load(&step.bound_end);
  const bool whole = bound_begin == bound_end;
#pragma unroll
  for (u32 i = 0; i < kOfKeys; ++i) {
#pragma unroll
    for (u32 w = 0; w < C::kRows / 32; ++w) words[i][w] = whole && key + i32(8 * i) < key_end ? 0xffffffffu : 0;
  }
  if (whole) return;
  for (u32 b = bound_begin; b < bound_end; ++b) {
    const int4* bound = reinterpret_cast<const int4*>(params.all.bounds + b);
    const int4 box = __ldg(bound);
    const int2 diagonals = __ldg(reinterpret_cast<const int2*>(bound + 1));
#pragma unroll
    for (u32 i = 0; i < kOfKeys; ++i) {
      // A bound has no keys beyond the tile's end.
      const i32 own = key + i32(8 * i);
      const bool seen = own >= box.z && own < box.w;
      const i32 low = max(box.x, own - diagonals.y) - row;
      const i32 high = seen ? min(min(box.y, own - diagonals.x + 1) - row, limit) : 0;
#pragma unroll
      for (u32 w = 0; w < C::kRows / 32; ++w) {
        const i32 first = min(max(low - i32(32 * w), 0), 32);
        const i32 end = min(max(high - i32(32 * w), 0), 32);
        words[i][w] |= bit_mask(u32(first), u32(max(end - first, 0)));
      }
    }
  }
#pragma unroll
  for (u32 i = 0; i < kOfKeys; ++i) {
#pragma unroll
    for (u32 w = 0; w < C::kRows / 32; ++w) words[i][w] >>= 2 * (threadIdx.x % 4);
  }
}

// Where a key's row of dk (tensor 0) or dv (1) goes: to `out`, or straight to the memory of the GPU that owns the key. Nobody is notified
// before this kernel has ended.
template <u32 kTensor, typename C>
__device__ __forceinline__ typename C::Gradient* gradient_row(void* out, const BackwardParams<C>& params, i32 row,
                                                              u32 head, u32 head_dim) {
  using Gradient = typename C::Gradient;
  Gradient* to = static_cast<Gradient*>(out) + u64(u32(row)) * (params.all.heads_kv * head_dim);
  if (row >= params.all.owner_rows_from) {
    to = reinterpret_cast<Gradient*>(__ldg(params.all.owner_rows + 2 * u32(row - params.all.owner_rows_from) + kTensor));
  }
  return to + head * head_dim;
}

// The last that a thread does which stores such rows: those that leave are there once this kernel has ended, and who notifies of it need
// not make a fence for what others wrote.
template <typename C>
__device__ __forceinline__ void gradients_arrive(const BackwardParams<C>& params) {
  if (params.all.owner_rows != nullptr) fence_system();
}

// Where such a row goes as elements: of a tile that is alone, to `out`.
template <u32 kTensor, typename C>
__device__ __forceinline__ void* rounded_row(void* out, const BackwardParams<C>& params, i32 row, u32 head,
                                             u32 head_dim) {
  if (!C::kPartialSums) return gradient_row<kTensor>(out, params, row, head, head_dim);
  return static_cast<Element*>(out) + (u64(u32(row)) * params.all.heads_kv + head) * head_dim;
}

// Stores the accumulators of a warpgroup, 64 keys x a head, times `factor`: as elements.
template <u32 kTensor, u32 kCount, typename C>
__device__ __forceinline__ void store_rounded(void* out, u32 head_dim, const BackwardParams<C>& params,
                                              const Step& step, const float (&d)[kCount], float factor) {
  const i32 key = uniform_load(&step.key) + own_key<C>();
  const i32 key_end = uniform_load(&step.key_end);
  const u32 head = uniform_load(&step.head_kv);
  const u32 c = threadIdx.x % 4;
  const bool odd = c & 1;
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    // Neighbours swap pairs, so that a thread writes 8 bytes and four threads a whole sector.
    Element* to = nullptr;
    if (row < key_end) to = static_cast<Element*>(rounded_row<kTensor>(out, params, row, head, head_dim));
#pragma unroll
    for (u32 j = 0; j < kCount / 4; j += 2) {
      const u32 even_tile = pack(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
      const u32 odd_tile = pack(d[4 * j + 4 + 2 * i] * factor, d[4 * j + 5 + 2 * i] * factor);
      const u32 other = __shfl_xor_sync(0xffffffffu, odd ? even_tile : odd_tile, 1);
      const u32 column = 8 * (j + (odd ? 1 : 0)) + 2 * (c & ~1u);
      if (row < key_end && column < head_dim) {
        *reinterpret_cast<uint2*>(to + column) = make_uint2(odd ? other : even_tile, odd ? odd_tile : other);
      }
    }
  }
}

// Likewise, as what its tensor is of.
template <u32 kTensor, u32 kCount, typename C>
__device__ __forceinline__ void store_gradient(const BackwardParams<C>& params, const Step& step,
                                               const float (&d)[kCount], float factor) {
  void* out = kTensor == 0 ? params.all.dk : params.all.dv;
  const u32 head_dim = kTensor == 0 ? params.all.head_dim : params.all.head_dim_v;
  if (!C::kPartialSums || (C::kAlone && uniform_load(&step.flags) & kAlone)) {
    if constexpr (C::kAlone) out = kTensor == 0 ? params.alone.dk : params.alone.dv;
    store_rounded<kTensor>(out, head_dim, params, step, d, factor);
    return;
  }
  const i32 key = uniform_load(&step.key) + own_key<C>();
  const i32 key_end = uniform_load(&step.key_end);
  const u32 head = uniform_load(&step.head_kv);
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    if (row >= key_end) continue;
    auto* to = gradient_row<kTensor>(out, params, row, head, head_dim) + 2 * (threadIdx.x % 4);
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
      if (8 * j + 2 * (threadIdx.x % 4) >= head_dim) continue;
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
    }
  }
}

// Zeros for keys that nobody sees.
template <u32 kTensor, typename C>
__device__ __forceinline__ void store_zeros(const BackwardParams<C>& params, const Step& step) {
  const i32 key = uniform_load(&step.key) + own_key<C>();
  const i32 key_end = uniform_load(&step.key_end);
  const u32 head = uniform_load(&step.head_kv);
  const u32 head_dim = kTensor == 0 ? params.all.head_dim : params.all.head_dim_v;
  const bool alone = C::kAlone && uniform_load(&step.flags) & kAlone;
  void* out = kTensor == 0 ? params.all.dk : params.all.dv;
  if constexpr (C::kAlone) {
    if (alone) out = kTensor == 0 ? params.alone.dk : params.alone.dv;
  }
  const u32 size = C::kPartialSums && !alone ? 4 : 2;
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    if (row >= key_end) continue;
    void* of_row = nullptr;
    if (alone) {
      of_row = rounded_row<kTensor>(out, params, row, head, head_dim);
    } else {
      of_row = gradient_row<kTensor>(out, params, row, head, head_dim);
    }
    u8* to = static_cast<u8*>(of_row);
    for (u32 x = 16 * (threadIdx.x % 4); x < head_dim * size; x += 64) {
      *reinterpret_cast<uint4*>(to + x) = make_uint4(0, 0, 0, 0);
    }
  }
}

// S^T or dP^T of 64 keys: keys [64, kDim] times rows [kRows, kDim].
template <typename C, u32 kDim = C::kHeadDim>
__device__ __forceinline__ void multiply_keys_rows(float (&d)[C::kRows / 2], u32 keys, u32 rows) {
  Wgmma<C::kRows>::template ss_first<Major::kK, Major::kK>(d, descriptor(keys, 0), descriptor(rows, 0));
#pragma unroll
  for (u32 k = 1; k < kDim / 16; ++k) {
    Wgmma<C::kRows>::template ss<Major::kK, Major::kK>(d, descriptor(keys, (k / 4) * (C::kOwnKeys * 128) + (k % 4) * 32),
                                                       descriptor(rows, (k / 4) * (C::kRows * 128) + (k % 4) * 32), 1);
  }
}

template <u32 kCount>
__device__ __forceinline__ void set_zero(float (&d)[kCount]) {
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) d[i] = 0.0f;
}

// Two f32 to a pair of f16 and back, whatever the elements are.
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 unpack_half(u32 pair) {
  float2 values;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}

// Where this lane's row of a stored dS^T matrix lies in a buffer: 128 bytes a key, 16-byte pieces swizzled by the key.
// Asked for again at every block, like own_key.
template <typename C>
__device__ __forceinline__ u32 own_matrix_row(u32 buffer) {
  const u32 thread = threadIdx.x % (2 * C::kOwnKeys);
  const u32 key = 16 * (thread / 32) + thread % 16;
  return buffer + key * 128 + (((thread % 32 / 16) ^ (key % 8)) << 4);
}

// tanh(x / (2 log2(e))), to an absolute error of 2^-22: the instruction for it is good to 2^-11 only.
__device__ __forceinline__ float tanh_of(float x) { return fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(x)), 1.0f); }

// What a row of queries has: the value of the columns 8 j + 2 (lane % 4) + {0, 1} of an accumulator.
__device__ __forceinline__ float2 column_values(const float* columns, u32 j) {
  return *reinterpret_cast<const float2*>(columns + 2 * (threadIdx.x % 4) + 8 * j);
}

// P of a block from its scores, as operand A of dv: `p`. And `w`: P (times the softcap's slope) for dS, in f16 whatever
// the elements are: it is at most one, so that f16 has it three bits better than bf16, and dS is as good as if P had
// stayed in f32. `row_lse` is of the block's rows; `rows` says which are unmasked, where the block is `bounded`.
template <typename C>
__device__ __forceinline__ void weigh(const BackwardParams<C>& params, const float* row_lse, bool bounded,
                                      const u32 (&rows)[2][C::kRows / 32], float (&s)[C::kRows / 2],
                                      u32 (&p)[C::kRows / 16][4], u32 (&w)[C::kRows / 16][4]) {
  // The scores in powers of two, less the row's denominator; with a softcap only its tanh, as yet.
#pragma unroll
  for (u32 j = 0; j < C::kRows / 8; ++j) {
    const float2 lse = column_values(row_lse, j);
#pragma unroll
    for (u32 m = 0; m < 4; ++m) {
      float& score = s[4 * j + m];
      if (C::kSoftcap) {
        score = tanh_of(score * params.all.scale_log2);
      } else {
        score = fmaf(score, params.all.scale_log2, m % 2 ? lse.y : lse.x);
      }
    }
  }
  if (bounded) {
#pragma unroll
    for (u32 j = 0; j < C::kRows / 8; ++j) {
#pragma unroll
      for (u32 m = 0; m < 4; ++m) {
        if (!(rows[m / 2][j / 4] & (1u << (8 * (j % 4) + m % 2)))) s[4 * j + m] = minus_infinity();
      }
    }
  }
#pragma unroll
  for (u32 j = 0; j < C::kRows / 8; ++j) {
    const float2 lse = column_values(row_lse, j);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      float low = s[4 * j + 2 * i];
      float high = s[4 * j + 2 * i + 1];
      const u32 at = 2 * (j % 2) + i;
      if constexpr (C::kSoftcap) {
        const float slope_low = fmaxf(1.0f - low * low, 0.0f);
        const float slope_high = fmaxf(1.0f - high * high, 0.0f);
        low = exp2_fast(fmaf(low, params.all.cap_log2, lse.x));
        high = exp2_fast(fmaf(high, params.all.cap_log2, lse.y));
        w[j / 2][at] = pack_half(low * slope_low, high * slope_high);
      } else {
        low = exp2_fast(low);
        high = exp2_fast(high);
        w[j / 2][at] = pack_half(low, high);
      }
      p[j / 2][at] = pack(low, high);
    }
  }
}

// The two warpgroups that own keys.
//
// Long: the mainloop, whose accumulators and barriers every line shares; as functions of their own the parts would pass them all.
template <typename C>
__device__ __forceinline__ void key_role(const BackwardParams<C>& params, Storage<C>& shared, u32 warpgroup) {
  const u32 keys_k = operand<C>(shared_address(shared.k) + warpgroup * 64 * 128);
  const u32 keys_v = operand<C>(shared_address(shared.v) + warpgroup * 64 * 128);

  u32 count = 0;
  while (true) {
    mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
    u32 flags = step_flags(shared, count);
    if (flags & (kExit | kEmpty)) {
      mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count) ^ 1);
      if (elect_one()) {
        mbarrier_arrive(&shared.full_ds[slot_of(count)]);
        mbarrier_arrive(&shared.empty[slot_of(count)]);
      }
      if (flags & kExit) break;
      const Step& step = shared.steps[count % kSteps];
      store_zeros<0>(params, step);
      store_zeros<1>(params, step);
      __syncwarp();
      ++count;
      continue;
    }
    float dk[C::kHeadDim / 2], dv[C::kHeadDim / 2];
    set_zero(dk);
    set_zero(dv);
    mbarrier_wait(&shared.full_k, item_parity_of(flags));
    while (true) {
      flags = step_flags(shared, count);
      u32 p[C::kRows / 16][4], ds[C::kRows / 16][4];
      u32 w[C::kRows / 16][4];
      {
        float s[C::kRows / 2];
        wgmma_fence();
        multiply_keys_rows<C>(s, keys_k, operand<C>(shared_address(shared.q[0]) + slot_of(count) * C::kRowBytes));
        wgmma_commit();
        const bool bounded = flags & kBounded;
        u32 rows[2][C::kRows / 32];
        if (bounded) key_rows(params, shared.steps[count % kSteps], 0, rows);
        __syncwarp();
        if (flags & kFirst) mbarrier_wait(&shared.full_v, item_parity_of(flags));
        wgmma_wait<0>();
        pin(s);
        weigh(params, shared.lse[slot_of(count)], bounded, rows, s, p, w);
      }
      {
        float dp[C::kRows / 2];
        mbarrier_wait(&shared.full_dout[slot_of(count)], parity_of(count));
        wgmma_fence();
        multiply_keys_rows<C>(dp, keys_v, operand<C>(shared_address(shared.dout[0]) + slot_of(count) * C::kRowBytes));
        wgmma_commit();
        const u32 dout_rows = operand<C>(shared_address(shared.dout[0]) + slot_of(count) * C::kRowBytes, C::kRows * 128);
#pragma unroll
        for (u32 k = 0; k < C::kRows / 16; ++k) {
          Wgmma<C::kHeadDim>::template rs<Major::kMN>(dv, p[k], descriptor(dout_rows, k * 2048), 1);
        }
        wgmma_commit();
        mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count) ^ 1);
        wgmma_wait<1>();
        pin(dp);
        const u32 ds_buffer = own_matrix_row<C>(shared_address(shared.ds[0])) + slot_of(count) * C::kDsBytes;
#pragma unroll
        for (u32 k = 0; k < C::kRows / 16; ++k) {
#pragma unroll
          for (u32 n = 0; n < 2; ++n) {
            const float2 delta = column_values(shared.delta[slot_of(count)], 2 * k + n);
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
              const u32 at = 2 * n + i;
              const float2 weight = unpack_half(w[k][at]);
              const float low = weight.x * (dp[8 * k + 2 * at] - delta.x);
              const float high = weight.y * (dp[8 * k + 2 * at + 1] - delta.y);
              ds[k][at] = pack(low, high);
            }
          }
          store_matrix_x4((ds_buffer ^ ((k % 4) << 5)) + (k / 4) * (C::kKeys * 128), ds[k]);
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (elect_one()) mbarrier_arrive(&shared.full_ds[slot_of(count)]);
      wgmma_fence();
      const u32 q_rows = operand<C>(shared_address(shared.q[0]) + slot_of(count) * C::kRowBytes, C::kRows * 128);
#pragma unroll
      for (u32 k = 0; k < C::kRows / 16; ++k) {
        Wgmma<C::kHeadDim>::template rs<Major::kMN>(dk, ds[k], descriptor(q_rows, k * 2048), 1);
      }
      wgmma_commit();
      // Asked for again, which saves a register.
      const bool last = step_flags(shared, count) & kLast;
      ++count;
      // The rows of the block may go.
      wgmma_wait<0>();
      if (elect_one()) mbarrier_arrive(&shared.empty[slot_of(count - 1)]);
      if (last) break;
      mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
    }
    pin(dk);
    pin(dv);
    const Step& step = shared.steps[(count - 1) % kSteps];
    if constexpr (C::kHalfHeads) {
      if (uniform_load(&step.flags) & kHalf && !is_whole(params, step, dk, dv)) continue;
    }
    if constexpr (C::kSums) {
      if (!has_sums(params, shared, warpgroup, step, dk, dv)) continue;
    }
    store_gradient<1>(params, step, dv, 1.0f);
    store_gradient<0>(params, step, dk, params.all.scale);
    __syncwarp();
  }
}

}  // namespace backward

}  // namespace counterpoint
