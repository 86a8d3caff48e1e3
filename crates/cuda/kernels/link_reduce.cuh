// Partial results of rows in the memories of several GPUs, summed into their owner's rows by few multiprocessors: a
// group-reduce.
//
// One warp has the copy engine fetch the operands of each piece, one after the other in the order of their ranks; the other
// warps add them in that order, so a result has the same bits every time, and the same as `row_reduce` gives.
#pragma once

#include "link_meeting.cuh"
#include "ptx/bulk.cuh"
#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kLinkReduceThreads = 288;
constexpr u32 kLinkAdders = 256;
// Elements of a piece at most.
constexpr u32 kLinkElements = 4096;
constexpr u32 kLinkOperandBytes = 196608;

// Elements that lie together and have the same operands.
struct LinkReducePiece {
  u64 to;  // first element
  u32 count;
  u32 operand_begin;
  u32 operand_end;
  u32 divisor;  // 1 for a sum, the number of operands for their mean
  u32 tensor;
  u32 reserved;
};

struct LinkOperand {
  u64 from;  // first element
  u32 rank;
  u32 reserved;
};
static_assert(sizeof(LinkReducePiece) == 32 && sizeof(LinkOperand) == 16, "layouts shared with the host");

template <typename Partial>
struct alignas(128) LinkReduceShared {
  static constexpr u32 kStages = kLinkOperandBytes / (kLinkElements * sizeof(Partial));
  Partial stages[kStages][kLinkElements];
  u64 full[kStages];
  u64 empty[kStages];
  u64 tensors[kLinkRanks * kLinkTensors];
  u32 begun;
};

// Which stage comes next, and the parity of its phase.
template <u32 kStages>
struct LinkStage {
  u32 at = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == kStages) {
      at = 0;
      parity ^= 1;
    }
  }
};

template <typename Partial, typename Result>
__device__ __forceinline__ void link_add(const LinkCall& call, LinkReduceShared<Partial>& shared,
                                         const LinkReducePiece* __restrict__ pieces, u32 count, u32 accumulate) {
  constexpr u32 kPack = 16 / sizeof(Partial);
  constexpr u32 kTurns = kLinkElements / kPack / kLinkAdders;
  const u32 thread = threadIdx.x - 32;
  LinkStage<LinkReduceShared<Partial>::kStages> stage;
  for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
    const LinkReducePiece piece = pieces[i];
    Result* result = reinterpret_cast<Result*>(call.own[piece.tensor]) + piece.to;
    const u32 packs = piece.count / kPack;
    float sums[kTurns][kPack] = {};
#pragma unroll
    for (u32 u = 0; u < kTurns; ++u) {
      const u32 pack = thread + u * kLinkAdders;
      if (accumulate && pack < packs) {
        const Pack<Result, kPack> own = load_pack<Result, kPack>(result + pack * kPack);
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) sums[u][e] = widen(own.at[e]);
      }
    }
    for (u32 o = piece.operand_begin; o < piece.operand_end; ++o) {
      mbarrier_wait(&shared.full[stage.at], stage.parity);
      const Partial* terms = shared.stages[stage.at];
#pragma unroll
      for (u32 u = 0; u < kTurns; ++u) {
        const u32 pack = thread + u * kLinkAdders;
        if (pack < packs) {
          const Pack<Partial, kPack> term = load_pack<Partial, kPack>(terms + pack * kPack);
#pragma unroll
          for (u32 e = 0; e < kPack; ++e) sums[u][e] += widen(term.at[e]);
        }
      }
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(&shared.empty[stage.at]);
      stage.next();
    }
#pragma unroll
    for (u32 u = 0; u < kTurns; ++u) {
      const u32 pack = thread + u * kLinkAdders;
      if (pack < packs) {
        Pack<Result, kPack> out;
#pragma unroll
        for (u32 e = 0; e < kPack; ++e) {
          float sum = sums[u][e];
          if (piece.divisor != 1) sum = __fdiv_rn(sum, float(piece.divisor));
          out.at[e] = narrow<Result>(sum);
        }
        store_pack(result + pack * kPack, out);
      }
    }
  }
}

template <typename Partial>
__device__ __forceinline__ void link_fetch(const LinkCall& call, LinkReduceShared<Partial>& shared,
                                           const LinkReducePiece* __restrict__ pieces,
                                           const LinkOperand* __restrict__ operands, u32 count) {
  LinkStage<LinkReduceShared<Partial>::kStages> stage;
  for (u32 i = blockIdx.x; i < count; i += gridDim.x) {
    const LinkReducePiece piece = pieces[i];
    const u32 bytes = piece.count * u32(sizeof(Partial));
    for (u32 o = piece.operand_begin; o < piece.operand_end; ++o) {
      const LinkOperand operand = operands[o];
      const u64 tensor = shared.tensors[operand.rank * kLinkTensors + piece.tensor];
      mbarrier_wait(&shared.empty[stage.at], stage.parity ^ 1);
      mbarrier_arrive_expect(&shared.full[stage.at], bytes);
      bulk_load(shared.stages[stage.at], reinterpret_cast<const Partial*>(tensor) + operand.from, bytes,
                &shared.full[stage.at]);
      stage.next();
    }
  }
}

// Sums are in f32. Every count is a multiple of 16 bytes of `Partial`, every tensor aligned to 16 bytes.
template <typename Partial, typename Result>
__device__ __forceinline__ void link_reduce(const LinkCall& call, const LinkReducePiece* __restrict__ pieces,
                                            const LinkOperand* __restrict__ operands, u32 count, u32 accumulate) {
  using Shared = LinkReduceShared<Partial>;
  extern __shared__ __align__(128) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < Shared::kStages; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], kLinkAdders / 32);
    }
    fence_mbarrier_init();
  }
  u64 number = 0;
  if (threadIdx.x < 32) {
    number = link_begin(call, shared.tensors);
    if (threadIdx.x == 0) shared.begun = number != 0;
  }
  __syncthreads();
  if (shared.begun == 0) return;
  if (threadIdx.x >= 32) {
    link_add<Partial, Result>(call, shared, pieces, count, accumulate);
  } else if (threadIdx.x == 0) {
    link_fetch<Partial>(call, shared, pieces, operands, count);
  }
  __syncthreads();
  if (threadIdx.x < 32) link_end(call, number);
}

}  // namespace counterpoint
