// A grouped GEMM: the products of several problems as one launch, whose tile scheduler goes through the tiles of all of them.
//
// Problems have the layout, n and the types in common, and each its own rows. Where A lies along k, a problem is rows of A and rows of B, a
// tensor of all problems' matrices one below the other: experts with their weights. Where A lies along m, a problem is blocks of k, of
// which a table says where A's and B's are; the last one of a problem, which may have fewer rows than a block, lies in a tensor of its own
// with zeros behind them: gradients of experts' weights.
//
// A problem's rows lie together in A: loading them by boxes of few rows takes 1.7 to 21 times as long (docs/experiments/033-scattered-rows.md).
// Rows of a tile that do not lie together in D are stored by boxes of 64, 32, 16, 8, 4, 2 and 1 rows. So are the last rows of a problem, which
// are followed in D by the first of the next, another CTA's. How rows are swizzled follows from shared memory's addresses, of which a row of
// a chunk is 128 bytes, so any of them may begin a box.
#pragma once

#include "gemm/gemm.cuh"

namespace counterpoint {

// Rows of 64 of a tile that follow those of the box before it, and lie together. Shared with the host.
struct GemmBox {
  u32 row;
  u32 map;  // of D's, and so how many
};

// That a tile is stored by listed boxes, in its `destination`.
constexpr u32 kBoxesOfD = 1;

// The kernel's parameter. Of `gemm`, the maps of D are of the same tensor, with boxes of 64, 32, 16, 8, 4, 2 and 1 rows. Shared with the host.
struct GemmGroupedArguments {
  GemmArguments gemm;
  TensorMap b_ends;  // B of the last blocks of problems, where A lies along m
  // Lists of 64 rows each. Of a tile by boxes, those of its first 64 rows are from `destination_row` on, the others' from `group` on.
  const GemmBox* boxes;
  u64 unused[7];
};

// Operands from where problems have them, results to one tensor.
template <typename C>
struct GemmOfProblems {
  static_assert(C::kGrouped && C::kHandedParts == 1 && C::kTileN % 64 == 0, "whole problems, rows of chunks of 128 bytes");
  static constexpr u32 kProducerRegisters = 40;
  static constexpr u32 kConsumerRegisters = 232;
  static constexpr u32 kLoaders = 2;
  static constexpr u32 kLoadingThreads = 1;
  static constexpr bool kAwaitsRows = false;
  static constexpr bool kSumsParts = false;
  using Held = GemmNothingHeld<C>;
  const GemmArguments& arguments;
  const TensorMap* b_ends;
  const GemmBox* boxes;

  // The operands of kLoads of a tile, block by block of k. Who loads A speaks for both.
  template <u32 kLoads>
  __device__ __forceinline__ void load_tile(GemmShared<C>& shared, GemmPipelineState<C>& pipeline, const GemmScheduler& scheduler,
                                            const GemmTile& tile) const {
    constexpr bool kAlongM = C::kMajorA == Major::kMN;
    const bool pairs_columns = arguments.pairs_columns != 0;
    const u32 halves = halves_of_a(arguments, tile);
    // The next block's place is looked up while this one's stage is waited for.
    uint2 source = make_uint2(tile.source, 0);
    const auto look_up = [&](u32 block) {
      if constexpr (kAlongM) {
        if (block < tile.blocks) {
          const u32 at = 2 * (tile.first + block) + (kLoads == kLoadsB ? 1 : 0);
          source = __ldg(reinterpret_cast<const uint2*>(arguments.k_sources) + at);
        }
      } else {
        source.y = block * kGemmBlockK + (kLoads == kLoadsB && C::kMajorB == Major::kMN ? tile.first : 0);
      }
    };
    look_up(0);
#pragma unroll 1
    for (u32 block = 0; block < tile.blocks; ++block) {
      const u32 stage = pipeline.stage;
      mbarrier_wait(&shared.empty[stage], (pipeline.phase & 1) ^ 1);
      if constexpr (kLoads == kLoadsA) {
        mbarrier_arrive_expect(&shared.full[stage], C::kBytesA / 2 * halves + C::kBytesB);
        load_operand<kGemmTileM, C::kMajorA>(shared.a[stage], &arguments.a_maps[source.x], &shared.full[stage], i32(source.y),
                                             tile.source_row, pairs_columns, scheduler, halves);
      } else {
        const TensorMap* map = kAlongM && source.x != 0 ? b_ends : &arguments.b_map;
        const u32 row = tile.column + (C::kMajorB == Major::kK ? tile.first : 0);
        load_operand<C::kTileN, C::kMajorB>(shared.b[stage], map, &shared.full[stage], i32(source.y), row, !pairs_columns, scheduler);
      }
      look_up(block + 1);
      pipeline.next();
    }
  }

  // The thread that loads what kLoads says.
  template <u32 kLoads>
  __device__ __forceinline__ void load(GemmShared<C>& memory, GemmScheduler scheduler, GemmTile next) const {
    GemmShared<C>& shared = keep_address(memory);
    GemmPipelineState<C> pipeline;
    while (scheduler.more()) {
      const GemmTile tile = next;
      scheduler.advance();
      // Looked up while this tile's operands are loaded.
      if (scheduler.more()) next = scheduler.look_up<true>();
      load_tile<kLoads>(shared, pipeline, scheduler, tile);
    }
  }

  // Some rows of a chunk, as many as one of D's maps says.
  __device__ __forceinline__ void store_box(const u8* from, u32 map, i32 column, i32 row) const {
    if (arguments.adds) {
      tma_reduce_add_2d(&arguments.d_maps[map], from, column, row);
    } else {
      tma_store_2d(&arguments.d_maps[map], from, column, row);
    }
  }

  // The one thread that stores what warpgroup `group` computes.
  __device__ __forceinline__ void store(GemmShared<C>& shared, u32 group) const {
    for (u32 number = 0;; ++number) {
      const u32 buffer = number % 2;
      mbarrier_wait(&shared.chunk_full[group][buffer], (number / 2) & 1);
      const GemmChunk chunk = shared.chunks[group][buffer];
      if (chunk.flags & kChunkNone) break;
      // The second warpgroup's rows may lie below all of the tile's.
      const u32 rows = u32(chunk.column) < arguments.n ? chunk.rows : 0;
      const u8* from = shared.staging[group][buffer];
      u32 map = 0;
#pragma unroll 1
      for (u32 row = 0; row < rows; ++map) {
        GemmBox box{u32(chunk.row) + row, map};
        if (chunk.destination & kBoxesOfD) {
          const uint2 listed = __ldg(reinterpret_cast<const uint2*>(boxes + chunk.row) + map);
          box = GemmBox{listed.x, listed.y};
        } else if ((rows & (64u >> map)) == 0) {
          continue;
        }
        store_box(from + row * kGemmRowBytes, box.map, chunk.column, i32(box.row));
        row += 64u >> box.map;
      }
      tma_store_commit();
      // Both buffers are read at once: the chunk before this one is, when only this one's group is not.
      tma_store_wait_read<1>();
      if (number > 0) mbarrier_arrive(&shared.chunk_empty[group][buffer ^ 1]);
    }
    // Not complete: what comes after this kernel waits for that.
    tma_store_wait_read<0>();
  }

  template <typename Consumer>
  __device__ __forceinline__ void tile(Consumer& consumer, GemmStaging<C>& staging, Held&, const GemmTile& of,
                                       const GemmScheduler&) const {
    if (arguments.wide) {
      consumer.template stage_tile<true>(staging, of);
    } else {
      consumer.template stage_tile<false>(staging, of);
    }
  }
  template <typename Consumer>
  __device__ __forceinline__ void no_tile(Consumer&, const GemmTile&) const {}
  __device__ __forceinline__ void end() const {}
};

template <typename C>
__device__ __forceinline__ void gemm_grouped(const GemmGroupedArguments& arguments) {
  gemm<C>(arguments.gemm, GemmOfProblems<C>{arguments.gemm, &arguments.b_ends, arguments.boxes});
}

}  // namespace counterpoint
