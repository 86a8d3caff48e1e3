// Sums of a product whose k is in parts. Each part of a unit is computed by a pair of CTAs of its own, all of one cluster, at
// the same time; then they send each other pieces of what they have, through shared memory, and each adds up and stores some.
//
// A piece is a warpgroup's 64 rows of a chunk's columns. Those of a tile are dealt to the parts one by one. The parts of an
// element are added in an order of their own, so its bits depend on how many there are and on nothing else.
//
// Many rows have tiles for all multiprocessors without that, and pay for each exchange. A pair then computes both of two parts,
// one after the other (serial split-K), with the first one's sums in memory meanwhile: the same bits.
//
// Where whole units are too few for the multiprocessors, but clusters of two pairs find no room on them as pairs do, a pair computes
// the first of two parts and hands its sums over, through memory, to the next pair (stream-K), which adds its own: the same bits again.
//
// Pieces come into stages of the pipeline behind a tile's operands. Who loads waits until these stages have been read, and lets the
// other parts know that there is room. They all take the same stages, because parts have as many blocks of k each.
#pragma once

#include "gemm/gemm_work.cuh"
#include "ptx/flag.cuh"
#include "wait_limit.cuh"

namespace counterpoint {

template <typename C>
struct GemmParts {
  static constexpr u32 kChunks = C::kTileN / C::kChunkColumns;
  static constexpr u32 kPieces = kGemmConsumers * kChunks;
  static constexpr u32 kFloats = C::kChunkColumns / 2;  // of a thread in a piece
  static constexpr u32 kPieceBytes = 128 * kFloats * sizeof(float);
  static constexpr u32 kPiecesInA = C::kBytesA / kPieceBytes;
  static constexpr u32 kPiecesOfStage = kPiecesInA + C::kBytesB / kPieceBytes;
  static_assert(kPiecesInA > 0, "a piece fits a stage");

  u32 splits;  // at most 4, and at most kPieces: a part without pieces would run ahead of the others
  u32 part;
  u32 rank;  // of the pair

  // Stages that pieces come into, the same for all parts.
  __device__ __forceinline__ u32 stages() const {
    const u32 most = (kPieces + splits - 1) / splits * (splits - 1);
    return (most + kPiecesOfStage - 1) / kPiecesOfStage;
  }
  // In the CTA that computes part `of` of the same tile.
  __device__ __forceinline__ u32 address_in(u32 of, const void* at) const {
    return peer_address(shared_address(at), 2 * of + rank);
  }
  __device__ __forceinline__ static u8* place(GemmShared<C>& shared, u32 stage, u32 index) {
    return index < kPiecesInA ? shared.a[stage] + index * kPieceBytes : shared.b[stage] + (index - kPiecesInA) * kPieceBytes;
  }

  // A warpgroup's pieces, chunk after chunk: which part sums one, and how many that part sums before it. Divisions would take
  // longer than the sums.
  struct Piece {
    u32 splits;
    u32 owner;
    u32 before = 0;
    __device__ __forceinline__ void next() {
      owner += kGemmConsumers;
      if (owner >= splits) {
        owner -= splits;
        ++before;
      }
    }
  };
  // Where there are several parts.
  __device__ __forceinline__ Piece first_piece(u32 group) const { return Piece{splits, group}; }
  // The chunks that a warpgroup of this part sums and stores, a bit each.
  __device__ __forceinline__ u32 owned(u32 group) const {
    if (splits == 1) return (1u << kChunks) - 1;
    u32 chunks = 0;
    Piece piece = first_piece(group);
    for (u32 c = 0; c < kChunks; ++c, piece.next()) {
      if (piece.owner == part) chunks |= 1u << c;
    }
    return chunks;
  }
  // Where the piece of part `of` is among those that come to its owner.
  __device__ __forceinline__ u32 slot(const Piece& piece, u32 of) const {
    return piece.before * (splits - 1) + of - (of > piece.owner);
  }
  __device__ __forceinline__ static u32 stage_of(const GemmPipelineState<C>& pipeline, u32 slot) {
    const u32 stage = pipeline.stage + slot / kPiecesOfStage;
    return stage < C::kStages ? stage : stage - C::kStages;
  }

  // The thread that loads, behind a tile's operands.
  __device__ __forceinline__ void make_room(GemmShared<C>& shared, GemmPipelineState<C>& pipeline) const {
    u32 slots = (kPieces - part + splits - 1) / splits * (splits - 1);
    for (u32 e = stages(); e > 0; --e) {
      mbarrier_wait(&shared.empty[pipeline.stage], (pipeline.phase & 1) ^ 1);
      const u32 here = min(slots, kPiecesOfStage);
      mbarrier_arrive_expect(&shared.full[pipeline.stage], here * kPieceBytes);
      slots -= here;
      pipeline.next();
    }
    for (u32 of = 0; of < splits; ++of) {
      if (of != part) peer_arrive(address_in(of, &shared.room));
    }
  }

  // One thread's accumulators of a piece, to whom sums it.
  __device__ __forceinline__ void send(GemmShared<C>& shared, const GemmPipelineState<C>& pipeline, const Piece& piece, u32 thread,
                                       const float* from) const {
    const u32 at = slot(piece, part), stage = stage_of(pipeline, at);
    const u32 to = address_in(piece.owner, place(shared, stage, at % kPiecesOfStage)) + 16 * thread;
    const u32 barrier = address_in(piece.owner, &shared.full[stage]);
#pragma unroll
    for (u32 i = 0; i < kFloats / 4; ++i) {
      peer_store(to + i * 128 * 16, make_float4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]), barrier);
    }
  }

  // One thread's accumulators of a piece become the sum over parts, (0 + 1) + (2 + 3): in place, as it does not matter which
  // of two is added to which.
  __device__ __forceinline__ void sum(GemmShared<C>& shared, const GemmPipelineState<C>& pipeline, const Piece& piece, u32 thread,
                                      float* own) const {
    const auto from = [&](u32 of) {
      const u32 at = slot(piece, of);
      return reinterpret_cast<const float4*>(place(shared, stage_of(pipeline, at), at % kPiecesOfStage)) + thread;
    };
    const u32 neighbour = part ^ 1, across = (part ^ 2) & 2;
    if (neighbour < splits) add(own, from(neighbour));
    if (across + 1 < splits) {
      add(own, from(across), from(across + 1));
    } else if (across < splits) {
      add(own, from(across));
    }
  }
  __device__ __forceinline__ static void add(float* own, const float4* one) {
#pragma unroll
    for (u32 i = 0; i < kFloats / 4; ++i) add_four(own + 4 * i, one[i * 128]);
  }
  __device__ __forceinline__ static void add(float* own, const float4* one, const float4* other) {
#pragma unroll
    for (u32 i = 0; i < kFloats / 4; ++i) {
      float4 sum = one[i * 128];
      add_four(&sum.x, other[i * 128]);
      add_four(own + 4 * i, sum);
    }
  }
  __device__ __forceinline__ static void add_four(float* to, const float4& four) {
    to[0] += four.x;
    to[1] += four.y;
    to[2] += four.z;
    to[3] += four.w;
  }
};

// The thread that loads, behind a tile's operands: a stage of the pipeline that is complete once another CTA has handed over its part of the
// tile's k. The warpgroups have no register for a wait with a limit.
template <typename C>
__device__ __forceinline__ void gemm_await_partial_sums(const GemmArguments& arguments, GemmShared<C>& shared, GemmPipelineState<C>& pipeline,
                                                  const GemmScheduler& scheduler) {
  u32* parts_stored = arguments.parts_stored + scheduler.workspace_index();
  mbarrier_wait(&shared.empty[pipeline.stage], (pipeline.phase & 1) ^ 1);
  await_value(parts_stored, 4 * kGemmConsumers, arguments.wait);
  // For the next launch, which begins when this one has ended.
  store_relaxed(parts_stored, 0);
  mbarrier_arrive(&shared.full[pipeline.stage]);
  pipeline.next();
}

// What comes behind a tile's operands, for who loads only B: stages of the pipeline that are none of its business. It waits for them all the
// same, for whoever looks at a stage two phases early takes an old completion for a new one.
template <typename C>
__device__ __forceinline__ void skip_stages(GemmShared<C>& shared, GemmPipelineState<C>& pipeline, u32 stages) {
  for (; stages > 0; --stages) {
    mbarrier_wait(&shared.empty[pipeline.stage], (pipeline.phase & 1) ^ 1);
    pipeline.next();
  }
}

// A thread that loads what kLoads says, or a warp of which it is the first: where `epilogue` has that look out for others. `epilogue` knows
// whether rows of A have come, and what is needed in addition to operands.
template <typename C, u32 kLoads, typename Epilogue>
__device__ __forceinline__ void gemm_load(const GemmArguments& arguments, GemmShared<C>& memory, const Epilogue& epilogue,
                                          GemmScheduler scheduler, GemmTile next) {
  GemmShared<C>& shared = keep_address(memory);
  GemmPipelineState<C> pipeline;
  [[maybe_unused]] bool first = true;
  while (scheduler.more()) {
    GemmTile tile = next;
    const GemmScheduler here = scheduler;
    scheduler.advance();
    // Looked up while this tile's operands are loaded.
    if (scheduler.more()) next = scheduler.look_up();
    // The same thread of the warp each time.
    if (Epilogue::kLoadingThreads == 1 || elect_one()) {
      u32 ahead = 0;
      if constexpr (Epilogue::kAwaitsRows && (kLoads & kLoadsA) != 0) {
        // Who loads B alone waits for nothing.
        if constexpr (kLoads & kLoadsB) {
          if (first) ahead = gemm_load_ahead<C>(arguments, shared, here, tile.column, halves_of_a(arguments, tile));
          first = false;
        }
        epilogue.await_rows(tile);
        tile.source_row += epilogue.copy_row(tile);
      }
      gemm_load_operands<C, kLoads>(arguments, shared, pipeline, here, tile, ahead);
      if (C::kHandedParts > 1 && !here.has_next_part()) {
        if constexpr (kLoads & kLoadsA) {
          gemm_await_partial_sums<C>(arguments, shared, pipeline, here);
        } else {
          skip_stages<C>(shared, pipeline, 1);
        }
      }
      if constexpr (Epilogue::kSumsParts && C::kHalves == 1) {
        if (arguments.splits > 1) {
          const GemmParts<C> parts{arguments.splits, here.part, here.rank};
          if constexpr (kLoads & kLoadsA) {
            parts.make_room(shared, pipeline);
          } else {
            skip_stages<C>(shared, pipeline, parts.stages());
          }
        }
      }
    }
    if constexpr (Epilogue::kLoadingThreads > 1) {
      // The others must not look out for anything while one of them loads: a warp does one or the other.
      __syncwarp();
      if (!here.has_next_part()) epilogue.load_parts(shared, pipeline, tile, here);
      __syncwarp();
    }
  }
}

}  // namespace counterpoint
