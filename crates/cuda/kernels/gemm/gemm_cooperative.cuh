// Both warpgroups compute every tile, 64 of its rows each. They synchronise nowhere but at the blocks of operands that both read, and so one
// stores while the other multiplies, for as long as there are stages. k may be in parts.
#pragma once

#include "gemm/gemm_multiply.cuh"

namespace counterpoint {

template <typename C, typename Epilogue>
struct GemmCooperative : GemmMultiplier<C> {
  using Base = GemmMultiplier<C>;
  using Base::acc, Base::group, Base::lane, Base::pipeline, Base::shared, Base::thread, Base::warp, Base::release;
  const GemmArguments& arguments;
  const Epilogue& epilogue;

  __device__ __forceinline__ GemmCooperative(const GemmArguments& of, GemmShared<C>& with, const Epilogue& at)
      : Base{with}, arguments(of), epilogue(at) {}

  // Exchanges pieces of a tile with the CTAs that computed its other parts; those that this one stores become sums. `number`
  // counts tiles.
  __device__ __forceinline__ void sum_parts(const GemmParts<C>& parts, u32 owned, u32 number) {
    constexpr u32 kChunks = GemmParts<C>::kChunks, kFloats = GemmParts<C>::kFloats;
    GemmPipelineState<C> first = pipeline;
    // Who sends nothing must not wait: nobody would wait for it before there is room again.
    if (owned != (1u << kChunks) - 1) mbarrier_wait_cluster(&shared.room, number & 1);
    auto piece = parts.first_piece(group);
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c, piece.next()) {
      if (piece.owner != parts.part) parts.send(shared, first, piece, thread, acc[0] + c * kFloats);
    }
    for (u32 e = parts.stages(); e > 0; --e) {
      mbarrier_wait_cluster(&shared.full[pipeline.stage], pipeline.phase & 1);
      pipeline.next();
    }
    piece = parts.first_piece(group);
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c, piece.next()) {
      if (piece.owner == parts.part) parts.sum(shared, first, piece, thread, acc[0] + c * kFloats);
    }
    // It has been read by all lanes before two of them say so, and TMA writes there next.
    fence_async_proxy();
    __syncwarp();
    for (u32 e = parts.stages(); e > 0; --e) {
      release(first.stage);
      first.next();
    }
  }

  // Where the sums of the first of two parts lie: this CTA's, or those of this one of a unit's.
  __device__ __forceinline__ float4* partial_sums(const GemmScheduler& scheduler) const {
    const u32 cta = C::kHandedParts > 1 ? scheduler.workspace_index() : blockIdx.x;
    return arguments.partial_sums + u64(cta * kGemmConsumers + group) * (C::kTileN / 8) * 128 + thread;
  }
  __device__ __forceinline__ void store_partial_sums(const GemmScheduler& scheduler) const {
    float4* to = partial_sums(scheduler);
#pragma unroll
    for (u32 i = 0; i < C::kTileN / 8; ++i) {
      __stcg(to + i * 128, make_float4(acc[0][4 * i], acc[0][4 * i + 1], acc[0][4 * i + 2], acc[0][4 * i + 3]));
    }
  }
  // What this warp has stored, to the CTA that computes the other part.
  __device__ __forceinline__ void notify_next_part(const GemmScheduler& scheduler) const {
    __syncwarp();
    if (lane == 0) add_release(arguments.parts_stored + scheduler.workspace_index(), 1);
  }
  // What another CTA hands over has a stage of the pipeline, behind the operands: the thread that loads waits for it (gemm_parts.cuh).
  __device__ __forceinline__ void await_partial_sums() {
    mbarrier_wait(&shared.full[pipeline.stage], pipeline.phase & 1);
    release(pipeline.stage);
    pipeline.next();
  }
  __device__ __forceinline__ void add_partial_sums(const GemmScheduler& scheduler) {
    const float4* from = partial_sums(scheduler);
    // Not all loads at once: there are no registers for them.
    constexpr u32 kAtOnce = C::kTileN % 32 == 0 ? 4 : 2;
#pragma unroll
    for (u32 i = 0; i < C::kTileN / 8; i += kAtOnce) {
      float4 fours[kAtOnce];
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) fours[j] = __ldcg(from + (i + j) * 128);
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) GemmParts<C>::add_four(acc[0] + 4 * (i + j), fours[j]);
    }
  }

  // A tile's blocks of k, of which this warpgroup has no rows: the other one has the matrix unit to itself.
  __device__ __forceinline__ void pass_blocks(u32 count) {
#pragma unroll 1
    for (; count > 0; --count) {
      mbarrier_wait(&shared.full[pipeline.stage], pipeline.phase & 1);
      release(pipeline.stage);
      pipeline.next();
    }
  }

  // Tiles of several problems, each with all of its k.
  __device__ __forceinline__ void run_problems() {
    GemmStaging<C> staging{arguments, shared, group, warp, lane, (1u << GemmParts<C>::kChunks) - 1};
    typename Epilogue::Held held;
    for (GemmScheduler scheduler{arguments}; scheduler.more(); scheduler.advance()) {
      const GemmTile tile = scheduler.look_up<true>();
      if (tile.rows <= this->first_row()) {
        pass_blocks(tile.blocks);
        continue;
      }
      this->template multiply<0>(tile.blocks, [](u32) {}, [] {});
      if (tile.column < arguments.n) epilogue.tile(*this, staging, held, tile, scheduler);
    }
    staging.finish();
  }

  __device__ __forceinline__ void run() {
    if constexpr (C::kGrouped) return run_problems();
    GemmScheduler scheduler{arguments};
    const GemmParts<C> parts{arguments.splits, scheduler.part, scheduler.rank};
    GemmStaging<C> staging{arguments, shared, group, warp, lane, parts.owned(group)};
    typename Epilogue::Held held;
    for (u32 number = 0; scheduler.more(); scheduler.advance(), ++number) {
      const GemmTile tile = scheduler.look_up();
      const u32 blocks = (scheduler.k_end() - scheduler.k_begin()) / arguments.serial_parts;
      for (u32 part = 1;; ++part) {
        this->template multiply<Epilogue::Held::kCount>(blocks, [&](u32 chunk) { held.stage(staging, chunk); }, [] {});
        const bool has_next_part = C::kHandedParts > 1 && scheduler.has_next_part();
        if (part == arguments.serial_parts && !has_next_part) break;
        store_partial_sums(scheduler);
        if (has_next_part) break;
      }
      if (C::kHandedParts > 1 && scheduler.has_next_part()) {
        notify_next_part(scheduler);
        continue;
      }
      if (C::kHandedParts > 1) await_partial_sums();
      if (C::kHandedParts > 1 || arguments.serial_parts > 1) add_partial_sums(scheduler);
      if constexpr (Epilogue::kSumsParts) {
        if (arguments.splits > 1) sum_parts(parts, staging.owned, number);
      }
      // A unit at the edge may have a tile without an element.
      if (tile.rows == 0 || tile.column >= arguments.n) {
        epilogue.no_tile(*this, tile);
        continue;
      }
      if (arguments.bias != nullptr) this->add_bias(arguments, tile.column);
      epilogue.tile(*this, staging, held, tile, scheduler);
    }
#pragma unroll
    for (u32 chunk = 0; chunk != Epilogue::Held::kCount; ++chunk) held.stage(staging, chunk);
    staging.finish();
  }
};

}  // namespace counterpoint
