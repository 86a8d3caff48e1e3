// Warpgroup matrix products (PTX ISA, "wgmma"): D[64 x N] (+)= A[64 x 16] * B[16 x N], f32 accumulators.
//
// A thread's accumulators: d[4 * j + 2 * i + e] is row (warp % 4) * 16 + lane / 4 + 8 * i, column 8 * j + 2 * (lane % 4) + e.
// A from registers: a[0..4] are the pairs (row lane / 4, columns 2 * (lane % 4) + {0, 1}), the same 8 rows below, and the
// same two 8 columns to the right. So accumulators d[8 * kk ..] of one product, packed, are operand A of step kk of the next.
#pragma once

#include "types.cuh"

namespace counterpoint {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of accumulators across this point.
template <u32 kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Whether an operand in shared memory runs along k (a row holds consecutive k) or along m or n.
enum class Major : u32 { kK = 0, kMN = 1 };

// Descriptor of an operand in shared memory whose rows of 64 elements (128 bytes) are swizzled by 128 bytes, as the copy
// engine writes a box 64 elements wide. Its base must be aligned to 1024 bytes.
//  - Major::kK: rows are m or n, 8 rows are 1024 bytes; one step of k (16 elements) is 32 bytes further.
//  - Major::kMN: rows are k, 8 rows are 1024 bytes; the next 64 columns of m or n are `chunk_bytes` further; one step of k
//    (16 rows) is 2048 bytes further.
__device__ __forceinline__ u64 wgmma_descriptor(const void* shared, u32 chunk_bytes = 16) {
  const u32 address = u32(__cvta_generic_to_shared(shared));
  return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64((chunk_bytes >> 4) & 0x3fffu) << 16) |
         u64((address >> 4) & 0x3fffu);
}
// The same of an address in shared memory. Those have 18 bits, so that no field runs into another and nothing is masked. But not in a
// cluster: there the CTA's rank is in bits 24 and up, which would be added to `chunk_bytes`.
__device__ __forceinline__ u64 wgmma_descriptor_at(u32 address, u32 chunk_bytes = 16) {
  return (u64((1u << 30) | (1024 >> 4)) << 32) | ((address >> 4) | ((chunk_bytes >> 4) << 16));
}
// The descriptor `bytes` further.
__device__ __forceinline__ u64 wgmma_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// The first 8 n accumulators, as the text of an instruction names them and as operands under a constraint. Written out, since
// operands of `asm` are numbered by literals, which the preprocessor cannot compute.
#define WGMMA_NAMES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_2 WGMMA_NAMES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_3 WGMMA_NAMES_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_4 WGMMA_NAMES_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_5 WGMMA_NAMES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_6 WGMMA_NAMES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_7 WGMMA_NAMES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_8 WGMMA_NAMES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_9 WGMMA_NAMES_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_10 WGMMA_NAMES_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_11 WGMMA_NAMES_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_12 WGMMA_NAMES_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_13 WGMMA_NAMES_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_14 WGMMA_NAMES_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_15 WGMMA_NAMES_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_16 WGMMA_NAMES_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_EIGHT(constraint, i)                                                                   \
  constraint(d[i]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3]),                \
      constraint(d[i + 4]), constraint(d[i + 5]), constraint(d[i + 6]), constraint(d[i + 7])
#define WGMMA_D_1(constraint) WGMMA_EIGHT(constraint, 0)
#define WGMMA_D_2(constraint) WGMMA_D_1(constraint), WGMMA_EIGHT(constraint, 8)
#define WGMMA_D_3(constraint) WGMMA_D_2(constraint), WGMMA_EIGHT(constraint, 16)
#define WGMMA_D_4(constraint) WGMMA_D_3(constraint), WGMMA_EIGHT(constraint, 24)
#define WGMMA_D_5(constraint) WGMMA_D_4(constraint), WGMMA_EIGHT(constraint, 32)
#define WGMMA_D_6(constraint) WGMMA_D_5(constraint), WGMMA_EIGHT(constraint, 40)
#define WGMMA_D_7(constraint) WGMMA_D_6(constraint), WGMMA_EIGHT(constraint, 48)
#define WGMMA_D_8(constraint) WGMMA_D_7(constraint), WGMMA_EIGHT(constraint, 56)
#define WGMMA_D_9(constraint) WGMMA_D_8(constraint), WGMMA_EIGHT(constraint, 64)
#define WGMMA_D_10(constraint) WGMMA_D_9(constraint), WGMMA_EIGHT(constraint, 72)
#define WGMMA_D_11(constraint) WGMMA_D_10(constraint), WGMMA_EIGHT(constraint, 80)
#define WGMMA_D_12(constraint) WGMMA_D_11(constraint), WGMMA_EIGHT(constraint, 88)
#define WGMMA_D_13(constraint) WGMMA_D_12(constraint), WGMMA_EIGHT(constraint, 96)
#define WGMMA_D_14(constraint) WGMMA_D_13(constraint), WGMMA_EIGHT(constraint, 104)
#define WGMMA_D_15(constraint) WGMMA_D_14(constraint), WGMMA_EIGHT(constraint, 112)
#define WGMMA_D_16(constraint) WGMMA_D_15(constraint), WGMMA_EIGHT(constraint, 120)

#define WGMMA_TEXT(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ELEMENT_NAME "." ELEMENT_NAME " {"
#define WGMMA_UNLESS_ZERO(operand) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #operand ", 0;\n"

// One step of 16 along k. `accumulate` 0 overwrites D. `ss_first` always does, and the compiler knows it: to `ss` and `rs` it
// gives accumulators that live from before, which costs registers where nothing does.
template <u32 N>
struct Wgmma;

// `eights` is n / 16, since D has n / 2 registers; o0 to o6 are the numbers of the operands that follow them, from n / 2 on.
#define WGMMA(n, eights, o0, o1, o2, o3, o4, o5, o6)                                                              \
  template <>                                                                                                      \
  struct Wgmma<n> {                                                                                                \
    template <Major kA = Major::kK, Major kB = Major::kK>                                                          \
    static __device__ __forceinline__ void ss_first(float (&d)[n / 2], u64 a, u64 b) {                             \
      asm volatile(WGMMA_TEXT(n) WGMMA_NAMES_##eights "}, %" #o0 ", %" #o1 ", 0, 1, 1, %" #o2 ", %" #o3 ";\n"     \
                   : WGMMA_D_##eights("=f")                                                                       \
                   : "l"(a), "l"(b), "n"(u32(kA)), "n"(u32(kB)));                                                  \
    }                                                                                                              \
    template <Major kA = Major::kK, Major kB = Major::kK>                                                          \
    static __device__ __forceinline__ void ss(float (&d)[n / 2], u64 a, u64 b, u32 accumulate) {                   \
      asm volatile(WGMMA_UNLESS_ZERO(o2) WGMMA_TEXT(n) WGMMA_NAMES_##eights                                       \
                   "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";\n}\n"                                      \
                   : WGMMA_D_##eights("+f")                                                                       \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(u32(kA)), "n"(u32(kB)));                                 \
    }                                                                                                              \
    template <Major kB = Major::kK>                                                                                \
    static __device__ __forceinline__ void rs(float (&d)[n / 2], const u32 (&a)[4], u64 b, u32 accumulate) {       \
      asm volatile(WGMMA_UNLESS_ZERO(o5) WGMMA_TEXT(n) WGMMA_NAMES_##eights                                       \
                   "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 ";\n}\n"                \
                   : WGMMA_D_##eights("+f")                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(u32(kB)));           \
    }                                                                                                              \
  };
WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
WGMMA(208, 13, 104, 105, 106, 107, 108, 109, 110)
WGMMA(224, 14, 112, 113, 114, 115, 116, 117, 118)
WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef WGMMA
#undef WGMMA_UNLESS_ZERO
#undef WGMMA_TEXT
#undef WGMMA_EIGHT

}  // namespace counterpoint
