// Partial results of rows in the memories of several GPUs, summed into their owner's rows by few multiprocessors: a
// group-reduce.
//
// Some warps have TMA fetch the operands of each piece, one after the other in the order of their ranks; the
// others add them in that order, so a result has the same bits every time, and the same as `row_reduce` gives.
#pragma once

#include "link_barrier.cuh"
#include "ptx/bulk.cuh"
#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kLinkAdders = 256;  // threads of a team

// What a kernel is compiled for: of what type operands and results are, how many warps fetch, how many teams of threads add a piece
// each, elements of a piece at most, stages and the bytes of each.
template <typename PartialOf, typename ResultOf, u32 kFetchersOf, u32 kTeamsOf, u32 kElementsOf, u32 kStagesOf, u32 kStageBytesOf>
struct LinkReduceConfig {
  using Partial = PartialOf;
  using Result = ResultOf;
  static constexpr u32 kFetchers = kFetchersOf;
  static constexpr u32 kTeams = kTeamsOf;
  static constexpr u32 kElements = kElementsOf;
  static constexpr u32 kStages = kStagesOf;
  static constexpr u32 kStageBytes = kStageBytesOf;
  static constexpr u32 kThreads = 32 * kFetchers + kTeams * kLinkAdders;
  static_assert(kElements * sizeof(Partial) <= kStageBytes && kElements * sizeof(Result) <= kStageBytes,
                "an operand fits a stage");
};

// Elements that lie together and have the same operands.
struct LinkReducePiece {
  u64 to;  // first element
  u32 count;
  u32 divisor;  // 1 for a sum, the number of operands for their mean
  u32 tensor;
  u32 operands;  // the result's own contents among them
};

// What is fetched for a block's pieces, one after the other: an operand, or what the result holds.
struct LinkFetch {
  u64 from;  // bytes into the tensor
  u32 bytes;
  u16 rank;  // kLinkOwn for the result's own contents
  u16 tensor;
};
constexpr u32 kLinkOwn = 0xffff;

// Where a block's lists begin; those of the next block begin where they end.
struct LinkBlock {
  u32 pieces;
  u32 fetches;
};
static_assert(sizeof(LinkReducePiece) == 24 && sizeof(LinkFetch) == 16, "layouts shared with the host");

template <typename C>
struct alignas(128) LinkReduceShared {
  u8 stages[C::kStages][C::kStageBytes];
  u64 full[C::kStages];
  u64 empty[C::kStages];
  u64 tensors[kLinkRanks * kLinkTensors];
  u32 begun;
};

// Which stage comes next, and the parity of its phase.
template <typename C>
struct LinkStage {
  u32 at = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == C::kStages) {
      at = 0;
      parity ^= 1;
    }
  }
  // Those of another team's piece.
  __device__ __forceinline__ void skip(u32 count) {
    for (at += count; at >= C::kStages; at -= C::kStages) parity ^= 1;
  }
};

template <typename Operand, u32 kUnroll, u32 kPack>
__device__ __forceinline__ void link_add_operand(float (&sums)[kUnroll][kPack], const Operand* operand, u32 packs, u32 thread) {
  // All loads before the first sum: each would otherwise wait for the one before. Past the end there is nothing to add.
  PackWords<Operand, kPack> held[kUnroll] = {};
#pragma unroll
  for (u32 u = 0; u < kUnroll; ++u) {
    const u32 pack = thread + u * kLinkAdders;
    if (pack < packs) held[u] = load_pack_words<Operand, kPack>(operand + pack * kPack);
  }
#pragma unroll
  for (u32 u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (u32 e = 0; e < kPack; ++e) sums[u][e] += widen_from<Operand>(held[u].at, e);
  }
}

// `Call` says where the results are: LinkCall or StagedCall. `next`: the first of the pieces.
template <typename C, typename Call>
__device__ __forceinline__ void link_add(const Call& call, LinkReduceShared<C>& shared,
                                         const LinkReducePiece* __restrict__ pieces, LinkReducePiece next, u32 begin,
                                         u32 end, u32 accumulate) {
  using Partial = typename C::Partial;
  using Result = typename C::Result;
  constexpr u32 kPack = 16 / sizeof(Partial);
  constexpr u32 kUnroll = C::kElements / kPack / kLinkAdders;
  const u32 thread = (threadIdx.x - 32 * C::kFetchers) % kLinkAdders;
  const u32 team = uniform((threadIdx.x - 32 * C::kFetchers) / kLinkAdders);
  LinkStage<C> stage;
  for (u32 i = begin; i < end; ++i) {
    const LinkReducePiece piece = next;
    if (i + 1 < end) next = pieces[i + 1];
    if ((i - begin) % C::kTeams != team) {
      stage.skip(piece.operands);
      continue;
    }
    const u32 packs = piece.count / kPack;
    float sums[kUnroll][kPack] = {};
    for (u32 o = 0; o < piece.operands; ++o) {
      mbarrier_wait(&shared.full[stage.at], stage.parity);
      if (accumulate && o == 0) {
        link_add_operand(sums, reinterpret_cast<const Result*>(shared.stages[stage.at]), packs, thread);
      } else {
        link_add_operand(sums, reinterpret_cast<const Partial*>(shared.stages[stage.at]), packs, thread);
      }
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(&shared.empty[stage.at]);
      stage.next();
    }
    Result* result = reinterpret_cast<Result*>(call.own[piece.tensor]) + piece.to;
    // Tested once: a test at each element takes longer than all else that is done with it.
    if (piece.divisor != 1) {
#pragma unroll
      for (u32 u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) sums[u][e] = __fdiv_rn(sums[u][e], float(piece.divisor));
      }
    }
#pragma unroll
    for (u32 u = 0; u < kUnroll; ++u) {
      const u32 pack = thread + u * kLinkAdders;
      if (pack < packs) {
        Pack<Result, kPack> out;
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) out.at[e] = narrow<Result>(sums[u][e]);
        store_pack(result + pack * kPack, out);
      }
    }
  }
}

// What a fetching warp fetches: its entries of the block's list, which it reads 32 at a time and as many ahead.
template <typename C>
struct LinkFetches {
  const LinkFetch* __restrict__ list;
  u32 count;

  // One of several warps, which alternate.
  __device__ __forceinline__ LinkFetches(const LinkFetch* fetches, u32 begin, u32 end, u32 warp)
      : list(fetches + begin + warp), count(end - begin > warp ? (end - begin - warp + C::kFetchers - 1) / C::kFetchers : 0) {}

  // Entry `first` and those behind it, one a lane.
  __device__ __forceinline__ LinkFetch from(u32 first) const {
    const u32 at = first + threadIdx.x % 32;
    return at < count ? list[at * C::kFetchers] : LinkFetch{};
  }
};

// `next`: the first of them.
template <typename C, typename Call>
__device__ __forceinline__ void link_fetch(const Call& call, LinkReduceShared<C>& shared, const LinkFetches<C>& fetches,
                                           LinkFetch next) {
  const u32 lane = threadIdx.x % 32;
  const u32 warp = uniform(threadIdx.x / 32);
  const auto address = [&](u64 from, u32 place) {
    const u32 rank = place >> 16;
    const u32 tensor = place & 0xffffu;
    return (rank == kLinkOwn ? call.own[tensor] : shared.tensors[rank * kLinkTensors + tensor]) + from;
  };
  LinkFetch held = {};
  for (u32 n = 0; n < fetches.count; ++n) {
    if (n % 32 == 0) {
      held = next;
      next = fetches.from(n + 32);
    }
    const u64 from = __shfl_sync(0xffffffffu, held.from, n % 32);
    const u32 bytes = __shfl_sync(0xffffffffu, held.bytes, n % 32);
    const u32 place = __shfl_sync(0xffffffffu, u32(held.rank) << 16 | held.tensor, n % 32);
    if (lane == 0) {
      const u32 fetch = warp + n * C::kFetchers;
      const u32 stage = fetch % C::kStages;
      mbarrier_wait(&shared.empty[stage], fetch / C::kStages % 2 ^ 1);
      mbarrier_arrive_expect(&shared.full[stage], bytes);
      bulk_load(shared.stages[stage], reinterpret_cast<const void*>(address(from, place)), bytes, &shared.full[stage]);
    }
  }
}

// The thread that does so makes what all others see after the next __syncthreads.
template <typename C>
__device__ __forceinline__ void link_stages_init(LinkReduceShared<C>& shared) {
  for (u32 s = 0; s < C::kStages; ++s) {
    mbarrier_init(&shared.full[s], 1);
    mbarrier_init(&shared.empty[s], kLinkAdders / 32);
  }
  fence_mbarrier_init();
}

// Sums are in f32. Every count is a multiple of 8 elements, every tensor aligned to 16 bytes. There is one more entry of
// `blocks` than there are blocks. `accumulate`: the first operand of every piece is what the result holds.
template <typename C>
__device__ __forceinline__ void link_reduce(const LinkCall& call, const LinkReducePiece* __restrict__ pieces,
                                            const LinkFetch* __restrict__ fetches,
                                            const LinkBlock* __restrict__ blocks, u32 accumulate) {
  extern __shared__ __align__(128) u8 shared_bytes[];
  LinkReduceShared<C>& shared = *reinterpret_cast<LinkReduceShared<C>*>(shared_bytes);
  const LinkBlock begin = blocks[blockIdx.x];
  const LinkBlock end = blocks[blockIdx.x + 1];
  if (threadIdx.x == 0) link_stages_init(shared);
  // Lists are on their way while ranks wait for each other.
  const bool adds = threadIdx.x >= 32 * C::kFetchers;
  const LinkFetches<C> mine(fetches, begin.fetches, end.fetches, uniform(threadIdx.x / 32));
  LinkFetch first_fetch = {};
  LinkReducePiece first_piece = {};
  if (adds) {
    if (begin.pieces != end.pieces) first_piece = pieces[begin.pieces];
  } else {
    first_fetch = mine.from(0);
  }
  u64 number = 0;
  if (threadIdx.x < 32) {
    number = link_begin(call, shared.tensors);
    if (threadIdx.x == 0) shared.begun = number != 0;
  }
  __syncthreads();
  if (shared.begun == 0) return;
  if (adds) {
    link_add<C>(call, shared, pieces, first_piece, begin.pieces, end.pieces, accumulate);
  } else {
    link_fetch(call, shared, mine, first_fetch);
  }
  __syncthreads();
  if (threadIdx.x < 32) link_end(call, number);
}

}  // namespace counterpoint
