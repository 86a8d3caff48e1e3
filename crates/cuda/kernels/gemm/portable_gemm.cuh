// D (+)= A B (+ bias) on every GPU since Ampere: operands by cp.async, products by mma.sync.
//
// Every warp multiplies a part of each tile. The products of an element are added in the order of k, 16 at a time, whatever the tile's
// shape, the blocks, the order of tiles and the end of a result are, so that no bit depends on them.
//
// Blocks of k go round stages of shared memory. A barrier stands between two blocks: behind it a stage has been read by all, and the
// copies into it begin; and all see what all have copied of the next block, whose first fragments every warp fetches at once, under the
// products of the last.
#pragma once

#include "gemm/portable_gemm_load.cuh"
#include "gemm/portable_gemm_store.cuh"

namespace counterpoint {

template <typename C>
struct PortableGemm {
  const PortableGemmArguments& arguments;
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  PortableGemmLoads<C> loads{arguments};
  u32 stage_bytes = 0;  // before the stage that is multiplied
  u32 left;             // where this lane's part of a warp's first fragments is in the first stage
  u32 right;
  float acc[C::kRowTiles][C::kWarpN / 2];
  u32 a[2][C::kRowTiles][4];
  u32 b[2][C::kPairs][4];

  __device__ __forceinline__ u32 warp_row() const { return warp / C::kWarpsN * C::kWarpM; }
  __device__ __forceinline__ u32 warp_column() const { return warp % C::kWarpsN * C::kWarpN; }

  using OperandOfA = OperandA<typename C::RowsA, C::kLieA>;
  using OperandOfB = OperandB<typename C::RowsB, C::kLieB>;

  __device__ __forceinline__ void begin(u32 shared) {
    left = OperandOfA(shared, warp_row(), lane).base;
    constexpr u32 kUnit = C::kLieB == Lie::kAlong ? 1 : 16;
    right = OperandOfB(shared + C::RowsA::kBytes, warp_column() / kUnit, lane).base;
    // Kept, as what they are made of would be made anew for every step.
    asm volatile("" : "+r"(left), "+r"(right));
    loads.begin(shared);
  }

  // The fragments of step `kk` of the stage that is multiplied.
  __device__ __forceinline__ void fetch(u32 into, u32 kk) {
    OperandOfA of_a(0, 0, 0);
    OperandOfB of_b(0, 0, 0);
    of_a.base = left + stage_bytes;
    of_b.base = right + stage_bytes;
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) of_a.load(a[into][m], m, kk);
#pragma unroll
    for (u32 n = 0; n < C::kPairs; ++n) of_b.load(b[into][n], n, kk);
  }

  __device__ __forceinline__ void multiply(u32 of) {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < C::kPairs; ++i) {
        // Forth and back, so that two products in a row share a fragment.
        const u32 n = m % 2 == 0 ? i : C::kPairs - 1 - i;
        float* to = &acc[m][8 * n];
        mma_m16n8k16(to[0], to[1], to[2], to[3], a[of][m], b[of][n][0], b[of][n][1]);
        mma_m16n8k16(to[4], to[5], to[6], to[7], a[of][m], b[of][n][2], b[of][n][3]);
      }
    }
  }

  __device__ __forceinline__ void next_block() {
    cp_async_wait<C::kStages - 2>();
    __syncthreads();
    stage_bytes = stage_bytes + C::kStageBytes == C::kSharedBytes ? 0 : stage_bytes + C::kStageBytes;
  }

  // Multiplies a block, whose first fragments are there; those of the next block's first step are when it ends.
  __device__ __forceinline__ void block() {
    const u32 before = stage_bytes == 0 ? C::kSharedBytes - C::kStageBytes : stage_bytes - C::kStageBytes;
#pragma unroll
    for (u32 kk = 0; kk < C::kSteps; ++kk) {
      if (kk + 1 == C::kSteps) next_block();
      fetch((kk + 1) % 2, (kk + 1) % C::kSteps);
      if (kk == 0) loads.copy(before);
      multiply(kk % 2);
    }
  }

  __device__ __forceinline__ void end_tile(u32 index) {
    const GemmTile* of = arguments.tiles + index;
    const uint4 rows = __ldg(reinterpret_cast<const uint4*>(of));
    const uint2 place = __ldg(reinterpret_cast<const uint2*>(&of->column));
    const u32 destination = rows.z >> 16;
    const u64 width = arguments.wide ? sizeof(float) : sizeof(Element);
    const u64 d = arguments.d[destination] + u64(rows.y) * arguments.d_stride * width;
    const PortableGemmStore<C> store{arguments, lane, warp_row() + lane / 4, place.x + warp_column(), rows.w, d};
    if (arguments.bias != nullptr) store.add_bias(acc);
    if (arguments.wide) {
      store.floats(acc);
    } else {
      store.elements(acc);
    }
    if (arguments.counters[destination] == 0) return;
    // What all threads have stored comes before what the first one releases.
    __syncthreads();
    if (threadIdx.x != 0) return;
    u32* counter = reinterpret_cast<u32*>(arguments.counters[destination]) + place.y;
    if (arguments.counters_of_peers) {
      add_release_system(counter, 1);
    } else {
      add_release(counter, 1);
    }
  }

  __device__ __forceinline__ void run(u32 shared) {
    begin(shared);
#pragma unroll
    for (u32 s = 0; s + 1 < C::kStages; ++s) loads.copy(s * C::kStageBytes);
    cp_async_wait<C::kStages - 2>();
    __syncthreads();
    fetch(0, 0);
    const u32 blocks = (arguments.k + C::kBlock - 1) / C::kBlock;
#pragma unroll 1
    for (u32 index = blockIdx.x; index < arguments.tile_count; index += gridDim.x) {
      clear(acc);
#pragma unroll 1
      for (u32 left = blocks; left > 0; --left) block();
      end_tile(index);
    }
    cp_async_wait<0>();
  }
};

template <typename C>
__device__ __forceinline__ void portable_gemm(const PortableGemmArguments& arguments) {
  extern __shared__ uint4 portable_gemm_shared[];
  PortableGemm<C> kernel{arguments};
  kernel.run(u32(__cvta_generic_to_shared(portable_gemm_shared)));
}

}  // namespace counterpoint
