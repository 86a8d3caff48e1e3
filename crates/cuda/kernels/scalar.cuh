// Element types as C++ types, for the kernels that convert between several of them.
#pragma once

#include "ptx/convert.cuh"

namespace counterpoint {

struct Bf16 {
  u16 bits;
};
struct F16 {
  u16 bits;
};
using F32 = float;

__device__ __forceinline__ float widen(Bf16 value) { return float_of_bf16(value.bits); }
__device__ __forceinline__ float widen(F16 value) { return float_of_f16(value.bits); }
__device__ __forceinline__ float widen(F32 value) { return value; }

// Rounded once, to nearest even.
template <typename T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ Bf16 narrow<Bf16>(float value) {
  return Bf16{bf16_of(value)};
}
template <>
__device__ __forceinline__ F16 narrow<F16>(float value) {
  return F16{f16_of(value)};
}
template <>
__device__ __forceinline__ F32 narrow<F32>(float value) {
  return value;
}

// The value that is left of one after it has been a T.
template <typename T>
__device__ __forceinline__ float through(float value) {
  return widen(narrow<T>(value));
}

// Neighbouring elements that are loaded and stored by one instruction (or few).
template <typename T, u32 kCount>
struct alignas(sizeof(T) * kCount <= 16 ? sizeof(T) * kCount : 16) Pack {
  T at[kCount];
};

template <typename T, u32 kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}

template <typename T, u32 kCount>
__device__ __forceinline__ void add_terms(float (&sums)[kCount], const Pack<T, kCount>& terms) {
#pragma unroll
  for (u32 e = 0; e < kCount; ++e) sums[e] += widen(terms.at[e]);
}

// The halves of a word, of which each is one instruction away from its value: taken one by one, they are two.
template <u32 kCount>
__device__ __forceinline__ void add_terms(float (&sums)[kCount], const Pack<Bf16, kCount>& terms) {
  static_assert(kCount % 2 == 0, "whole words");
  const u32* words = reinterpret_cast<const u32*>(terms.at);
#pragma unroll
  for (u32 w = 0; w < kCount / 2; ++w) {
    sums[2 * w] += __uint_as_float(words[w] << 16);
    sums[2 * w + 1] += __uint_as_float(words[w] & 0xffff0000u);
  }
}

template <typename T, u32 kCount>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

}  // namespace counterpoint
