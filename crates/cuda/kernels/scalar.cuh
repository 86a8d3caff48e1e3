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

// Element `e` of those that lie together in these words: whoever takes words apart into narrow elements pays for each of those
// before it is widened.
template <typename T>
__device__ __forceinline__ float widen_from(const u32* words, u32 e);
template <>
__device__ __forceinline__ float widen_from<Bf16>(const u32* words, u32 e) {
  return __uint_as_float(e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xffff0000u);
}
template <>
__device__ __forceinline__ float widen_from<F16>(const u32* words, u32 e) {
  return float_of_f16(u16(words[e / 2] >> e % 2 * 16));
}
template <>
__device__ __forceinline__ float widen_from<F32>(const u32* words, u32 e) {
  return __uint_as_float(words[e]);
}

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

// The same as words.
template <typename T, u32 kCount>
struct alignas(16) PackWords {
  u32 at[kCount * sizeof(T) / 4];
};

template <typename T, u32 kCount>
__device__ __forceinline__ PackWords<T, kCount> load_pack_words(const T* from) {
  return *reinterpret_cast<const PackWords<T, kCount>*>(from);
}

template <typename T, u32 kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}

template <typename T, u32 kCount>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

}  // namespace counterpoint
