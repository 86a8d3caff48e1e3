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
  // Of k so much before a tile's end when what it is added to is asked for: late enough to stay in a small cache, and early enough for DRAM.
  static constexpr u32 kSoon = 512;

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

  // A part of the fragments of step `kk` of the stage that is multiplied, of kRowTiles parts, in the order in which they are wanted: A's
  // first, all of B, and the rest of A.
  __device__ __forceinline__ void fetch(u32 part, u32 into, u32 kk) {
    constexpr u32 kAll = C::kRowTiles + C::kPairs;
    OperandOfA of_a(0, 0, 0);
    OperandOfB of_b(0, 0, 0);
    of_a.base = left + stage_bytes;
    of_b.base = right + stage_bytes;
#pragma unroll
    for (u32 i = 0; i < kAll; ++i) {
      if (i * C::kRowTiles / kAll != part) continue;
      if (i >= 1 && i <= C::kPairs) {
        of_b.load(b[into][i - 1], i - 1, kk);
      } else {
        const u32 m = i == 0 ? 0 : i - C::kPairs;
        of_a.load(a[into][m], m, kk);
      }
    }
  }

  __device__ __forceinline__ void multiply(u32 m, u32 of) {
#pragma unroll
    for (u32 i = 0; i < C::kPairs; ++i) {
      // Forth and back, so that two products in a row share a fragment.
      const u32 n = m % 2 == 0 ? i : C::kPairs - 1 - i;
      float* to = &acc[m][8 * n];
      mma_m16n8k16(to[0], to[1], to[2], to[3], a[of][m], b[of][n][0], b[of][n][1]);
      mma_m16n8k16(to[4], to[5], to[6], to[7], a[of][m], b[of][n][2], b[of][n][3]);
    }
  }

  __device__ __forceinline__ void next_block() {
    cp_async_wait<C::kStages - 2>();
    __syncthreads();
    stage_bytes = stage_bytes + C::kStageBytes == C::kSharedBytes ? 0 : stage_bytes + C::kStageBytes;
  }

  // Multiplies a block, whose first fragments are there; those of the next block's first step are when it ends. Fragments and copies are
  // asked for between rows of products, a few at a time, so that no queue is full when a warp wants to go on.
  __device__ __forceinline__ void block() {
    const u32 before = stage_bytes == 0 ? C::kSharedBytes - C::kStageBytes : stage_bytes - C::kStageBytes;
    constexpr u32 kParts = C::kRowTiles / 2;
    loads.begin_block(before);
#pragma unroll
    for (u32 kk = 0; kk < C::kSteps; ++kk) {
      if (kk + 1 == C::kSteps) {
        loads.end_block();
        next_block();
      }
#pragma unroll
      for (u32 m = 0; m < C::kRowTiles; ++m) {
        fetch(m, (kk + 1) % 2, (kk + 1) % C::kSteps);
        if (kk + 1 < C::kSteps && m % 2 == 1) loads.copy_part(kk * kParts + m / 2, (C::kSteps - 1) * kParts, before);
        multiply(m, kk % 2);
      }
    }
  }

  __device__ __forceinline__ PortableGemmStore<C> store(u32 index, u32& destination, u32& group) const {
    const GemmTile* of = arguments.tiles + index;
    const uint4 rows = __ldg(reinterpret_cast<const uint4*>(of));
    const uint2 place = __ldg(reinterpret_cast<const uint2*>(&of->column));
    destination = rows.z >> 16;
    group = place.y;
    const u64 width = arguments.wide ? sizeof(float) : sizeof(Element);
    const u64 d = arguments.d[destination] + u64(rows.y) * arguments.d_stride * width;
    return {arguments, place.x, rows.w, d};
  }

  __device__ __forceinline__ void end_tile(u32 index) {
    u32 destination, group;
    const PortableGemmStore<C> end = store(index, destination, group);
    end.store(acc, lane, warp_row(), warp_column());
    if (arguments.counters[destination] == 0) return;
    // What all threads have stored comes before what the first one releases.
    __syncthreads();
    if (threadIdx.x != 0) return;
    u32* counter = reinterpret_cast<u32*>(arguments.counters[destination]) + group;
    if (arguments.counters_of_peers) {
      add_release_system(counter, 1);
    } else {
      add_release(counter, 1);
    }
  }

  // What the tile will be added to.
  __device__ __forceinline__ void prefetch(u32 index) const {
    u32 destination, group;
    store(index, destination, group).prefetch();
  }

  __device__ __forceinline__ void run(u32 shared) {
    begin(shared);
#pragma unroll
    for (u32 s = 0; s + 1 < C::kStages; ++s) loads.copy(s * C::kStageBytes);
    cp_async_wait<C::kStages - 2>();
    __syncthreads();
    const u32 blocks = (arguments.k + C::kBlock - 1) / C::kBlock;
    const u32 soon = arguments.adds ? min(blocks, kSoon / C::kBlock) : 0;
#pragma unroll 1
    for (u32 index = blockIdx.x; index < arguments.tile_count; index += gridDim.x) {
      clear(acc);
      // Again, though the block before has fetched them: so that no registers keep them while a tile is stored.
#pragma unroll
      for (u32 part = 0; part < C::kRowTiles; ++part) fetch(part, 0, 0);
#pragma unroll 1
      for (u32 left = blocks; left > 0; --left) {
        if (left == soon) prefetch(index);
        block();
      }
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
