// A matrix product whose first operand arrives while it runs, tensor by tensor: a stream brings rows by whatever means, and raises a word
// once a tensor is there (signal_raise.cuh). Tiles are begun in the order in which tensors are expected; who loads A's part of a tile waits
// for the word of its tensor, while B's part is on its way.
//
// What raises the words was enqueued before, and this kernel leaves it the multiprocessors that it takes. The last CTA lowers all words, so that a
// replayed graph needs nothing new: what raises them again follows this kernel.
#pragma once

#include "gemm/gemm.cuh"

namespace counterpoint {

// Shared with the host.
struct GemmArrivals {
  u64 words[kGemmSources];  // of each tensor a u32 that is not 0 once it is there, or 0 where it was there before
  u32* ended;               // CTAs that are through
  WaitLimit wait;
};

// The kernel's parameter. Shared with the host.
struct GemmArrivingArguments {
  GemmArguments gemm;
  GemmArrivals arrivals;
};

template <typename C>
struct GemmOfArriving : GemmToMemory<C> {
  static constexpr bool kAwaitsRows = true;
  const GemmArrivals& arrivals;

  __device__ __forceinline__ GemmOfArriving(const GemmArguments& gemm, const GemmArrivals& of)
      : GemmToMemory<C>{gemm}, arrivals(of) {}

  __device__ __forceinline__ u32* word(u32 source) const { return reinterpret_cast<u32*>(arrivals.words[source]); }

  // The thread that loads A, before a tile.
  __device__ __forceinline__ void await_rows(const GemmTile& of) const {
    const u32* arrived = word(of.source);
    if (arrived == nullptr || of.rows == 0) return;
    // After a wait that gave up the result is not used.
    wait_until(
        arrivals.wait, [&] { return load_acquire(arrived) != 0; },
        [&] { report_fault(arrivals.wait, of.source, 0, 0, 1); });
    // What others wrote in the ordinary way is read by TMA.
    fence_async_proxy_all();
  }
  __device__ __forceinline__ u32 copy_row(const GemmTile&) const { return 0; }

  // One thread of every CTA, when all of its cluster are through.
  __device__ __forceinline__ void end() const {
    if (add_acquire_release(arrivals.ended, 1) + 1 != gridDim.x) return;
    for (u32 source = 0; source < kGemmSources; ++source) {
      if (word(source) != nullptr) store_relaxed(word(source), 0);
    }
    store_relaxed(arrivals.ended, 0);
  }
};

template <typename C>
__device__ __forceinline__ void gemm_arriving(const GemmArrivingArguments& arguments) {
  gemm<C>(arguments.gemm, GemmOfArriving<C>{arguments.gemm, arguments.arrivals});
}

}  // namespace counterpoint
