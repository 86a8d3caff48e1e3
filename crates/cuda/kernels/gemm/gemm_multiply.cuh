// The products of a warpgroup: 64 rows of a tile, or all of its 128, block of k after block of k.
//
// The products of an element are added in the order of k whatever the tile's shape and whoever computes it.
#pragma once

#include "gemm/gemm_store.cuh"

namespace counterpoint {

template <typename C>
struct GemmMultiplier {
  GemmShared<C>& shared;
  const u32 group = uniform(threadIdx.x / 128) - 1;
  const u32 thread = threadIdx.x % 128;
  const u32 warp = thread / 32;
  const u32 lane = thread % 32;
  const u32 pair = cluster_rank() / 2 * 2;  // its first CTA
  GemmPipelineState<C> pipeline;
  float acc[C::kHalves][C::kTileN / 2];

  // The first of this warpgroup's rows of a tile.
  __device__ __forceinline__ u32 first_row() const { return C::kHalves == 1 ? group * 64 : 0; }

  // This warp has read a stage: the loads of both CTAs of the pair wait for that.
  __device__ __forceinline__ void release(u32 of) {
    if (lane < 2) peer_arrive(peer_address(shared_address(&shared.empty[of]), pair + lane));
  }

  template <bool kFirst>
  __device__ __forceinline__ void multiply_block() {
    const u32 stage = C::kHandedParts > 1 ? uniform(pipeline.stage) : pipeline.stage;
    mbarrier_wait(&shared.full[stage], pipeline.phase & 1);
    const u64 a = wgmma_descriptor(shared.a[stage] + first_row() * kGemmRowBytes);
    const u64 b = wgmma_descriptor(shared.b[stage], C::kMajorB == Major::kMN ? kGemmBlockK * kGemmRowBytes : 16);
    constexpr u32 kStepA = C::kMajorA == Major::kK ? 32 : 16 * kGemmRowBytes;
    constexpr u32 kStepB = C::kMajorB == Major::kK ? 32 : 16 * kGemmRowBytes;
    wgmma_fence();
#pragma unroll
    for (u32 kk = 0; kk < kGemmBlockK / 16; ++kk) {
#pragma unroll
      for (u32 half = 0; half < C::kHalves; ++half) {
        // Wherever A lies, 64 of its rows are 8 KB.
        const u64 rows = wgmma_advance(a, kk * kStepA + half * 64 * kGemmRowBytes);
        if (kFirst && kk == 0) {
          Wgmma<C::kTileN>::template ss_first<C::kMajorA, C::kMajorB>(acc[half], rows, b);
        } else {
          Wgmma<C::kTileN>::template ss<C::kMajorA, C::kMajorB>(acc[half], rows, wgmma_advance(b, kk * kStepB), 1);
        }
      }
    }
    wgmma_commit();
  }

  // acc = the product over `count` blocks, at least one. `stop` is called kStops times meanwhile, `started` when all blocks have come.
  template <u32 kStops, typename Stop, typename Started>
  __device__ __forceinline__ void multiply(u32 count, Stop stop, Started started) {
    multiply_block<true>();
    u32 before = pipeline.stage;
    pipeline.next();
    u32 i = 1;
#pragma unroll
    for (u32 s = 0; s <= kStops; ++s) {
      const u32 end = s == kStops ? count : count * (s + 1) / (kStops + 1);
#pragma unroll 1
      for (; i < end; ++i) {
        multiply_block<false>();
        wgmma_wait<1>();
        release(before);
        before = pipeline.stage;
        pipeline.next();
      }
      if (s != kStops) stop(s);
    }
    started();
    wgmma_wait<0>();
#pragma unroll
    for (u32 half = 0; half < C::kHalves; ++half) pin(acc[half]);
    release(before);
  }

  __device__ __forceinline__ void add_bias(const GemmArguments& arguments, u32 first_column) {
    const u32 column = first_column + 2 * (lane % 4);
#pragma unroll
    for (u32 j = 0; j < C::kTileN / 8; ++j) {
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        const u32 of = column + 8 * j + e;
        const float bias = of < arguments.n ? to_float(__ldg(arguments.bias + of)) : 0.0f;
#pragma unroll
        for (u32 half = 0; half < C::kHalves; ++half) {
          acc[half][4 * j + e] += bias;
          acc[half][4 * j + 2 + e] += bias;
        }
      }
    }
  }

  // Stages this warpgroup's rows of a tile of f32 or of elements.
  template <bool kWide>
  __device__ __forceinline__ void stage_tile(GemmStaging<C>& staging, const GemmTile& of) const {
#pragma unroll
    for (u32 half = 0; half < C::kHalves; ++half) {
      staging.template rows<kWide>(acc[half], first_row() + 64 * half, of);
    }
  }
};

}  // namespace counterpoint
