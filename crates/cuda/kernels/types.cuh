// The few types that kernels use. NVRTC alone has no <stdint.h> and no <cuda_bf16.h>, so they are made here.
#pragma once

namespace counterpoint {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "sizes of the basic types");

// The element type of q, k, v, out and their gradients, chosen when a kernel is compiled: 1 for bf16, 0 for f16.
#ifndef ELEMENT_BF16
#define ELEMENT_BF16 1
#endif
#if ELEMENT_BF16
#define ELEMENT_NAME "bf16"
#else
#define ELEMENT_NAME "f16"
#endif

// One element, as bits: arithmetic is done in f32.
using Element = u16;

// Two f32 to one packed pair of elements, round to nearest even; `low` is the one at the lower address.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn." ELEMENT_NAME "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ Element to_element(float value) {
  Element element;
  asm("cvt.rn." ELEMENT_NAME ".f32 %0, %1;" : "=h"(element) : "f"(value));
  return element;
}

__device__ __forceinline__ float to_float(Element element) {
#if ELEMENT_BF16
  return __uint_as_float(u32(element) << 16);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element));
  return value;
#endif
}

// A pair's two halves as f32.
__device__ __forceinline__ float low_float(u32 pair) { return to_float(Element(pair & 0xffffu)); }
__device__ __forceinline__ float high_float(u32 pair) {
#if ELEMENT_BF16
  return __uint_as_float(pair & 0xffff0000u);
#else
  return to_float(Element(pair >> 16));
#endif
}

// Stores two words at once, which the compiler parts where it does not know that it may.
__device__ __forceinline__ void store_words(void* to, u32 first, u32 second) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(first), "r"(second) : "memory");
}

// Stores four zeros at once.
__device__ __forceinline__ void store_four_zeros(float* to) {
  asm volatile("st.global.v4.b32 [%0], {%1, %1, %1, %1};" ::"l"(to), "r"(0) : "memory");
}

// Minus infinity: the score of a masked pair.
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// 2^x by the special function unit; 2^-inf = 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) by the special function unit; log2(0) = -inf.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x by the special function unit.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace counterpoint
