// Attention forward for Hopper (sm_90a): one CTA owns a tile of query rows and walks the runs of its schedule.
//
// A producer warpgroup feeds shared memory by the copy engine; each consumer warpgroup owns 64 rows. The blocks of all tiles
// of a CTA form one stream of steps. In each step a consumer starts scores = q k^T of the NEXT step, then
// acc += weights v of this one, and does the next step's softmax while both run; so the matrix units also stay busy
// from one tile to the next. Consumers take turns at starting products, so that one's softmax runs under the other's products.
// (The two-level overlap is FlashAttention 3's, https://arxiv.org/abs/2407.08608; the stream across tiles is not.)
#pragma once

#include "attention/attention_forward_work.cuh"
#include "attention/attention_mask.cuh"
#include "attention/attention_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

// Barriers that name their users: 0 is __syncthreads.
constexpr u32 kTurnBarrier = 1;

// One consumer warpgroup.
template <typename C>
struct AttentionForwardConsumer {
  const AttentionForwardArguments& arguments;
  AttentionForwardShared<C>& shared;
  const u32 group = uniform(threadIdx.x / 128) - 1;
  const u32 thread = threadIdx.x % 128;
  const u32 warp = thread / 32;
  const u32 lane = thread % 32;

  // What of the step just taken must outlive the next one's.
  struct Stage {
    AttentionForwardItem item;
    RowState state;
    u32 number;
    bool last;
  };

  float scores[C::kBlock / 2];
  u32 weights[C::kBlock / 4];
  float acc[C::kHeadDimV / 2];
  RowState state;
  ColumnMask<C::kBlock> mask;

  AttentionForwardItem item;  // whose scores are in flight
  AttentionForwardStep step;  // likewise
  u32 items = 0;              // taken so far, `item` included
  u32 steps = 0;              // taken so far, `step` included

  // The tile's row of this thread's row `i`.
  __device__ __forceinline__ u32 row(u32 i) const { return 64 * group + 16 * warp + lane / 4 + 8 * i; }
  __device__ __forceinline__ u32 slot() const { return (items - 1) % C::kQuerySlots; }

  // Waits for the keys of the next step; false when there is no more work.
  __device__ __forceinline__ bool take_step() {
    const u32 stage = steps % C::kStages;
    mbarrier_wait(&shared.key_full[stage], (steps / C::kStages) & 1);
    step = shared.steps[stage];
    step.flags = uniform(step.flags);
    ++steps;
    if (step.flags & kStepFirst) {
      item = shared.items[stage];
      ++items;
    }
    return !(step.flags & kStepNone);
  }

  __device__ __forceinline__ void wait_query() {
    if (step.flags & kStepFirst) {
      mbarrier_wait(&shared.query_full[slot()], ((items - 1) / C::kQuerySlots) & 1);
    }
  }
  __device__ __forceinline__ void wait_values(u32 number) {
    mbarrier_wait(&shared.value_full[number % C::kStages], (number / C::kStages) & 1);
  }

  __device__ __forceinline__ void release(u64* barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  }
  // Once the scores of the step just taken are complete: its keys, and after an item's last step its query rows, may go.
  __device__ __forceinline__ void release_scored() {
    release(&shared.key_empty[(steps - 1) % C::kStages]);
    if (step.flags & kStepLast) release(&shared.query_empty[slot()]);
  }

  // Starts scores = q k^T of the step just taken.
  __device__ __forceinline__ void start_scores() {
    const u64 query = wgmma_descriptor(shared.queries[slot()] + group * 64 * kRowBytes);
    const u64 key = wgmma_descriptor(shared.keys[(steps - 1) % C::kStages]);
    wgmma_fence();
#pragma unroll
    for (u32 kk = 0; kk < C::kHeadDim / 16; ++kk) {
      const u32 chunk = kk / 4, inner = (kk % 4) * 32;
      Wgmma<C::kBlock>::template ss<>(scores, wgmma_advance(query, chunk * C::kTileRows * kRowBytes + inner),
                                      wgmma_advance(key, chunk * C::kBlock * kRowBytes + inner), kk > 0);
    }
    wgmma_commit();
  }

  // Starts acc (+)= weights v, `v` being the values of step number `number`.
  __device__ __forceinline__ void start_output(u32 number, bool accumulate) {
    const u64 value = wgmma_descriptor(shared.values[number % C::kStages], C::kBlock * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (u32 kk = 0; kk < C::kBlock / 16; ++kk) {
      const u32(&pairs)[4] = *reinterpret_cast<const u32(*)[4]>(&weights[4 * kk]);
      Wgmma<C::kHeadDimV>::template rs<Major::kMN>(acc, pairs, wgmma_advance(value, kk * 16 * kRowBytes),
                                                   accumulate || kk > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (u32 j = 0; j < C::kBlock / 4; ++j) weights[j] = pack(scores[2 * j], scores[2 * j + 1]);
  }

  // Works out the masked columns of `step`; done while its product runs.
  __device__ __forceinline__ void build_mask() {
    if (!(step.flags & kStepBounded)) return;
    mask.clear();
    for (u32 b = step.bound_begin; b < step.bound_end; ++b) {
      const TileBound bound = load_bound(arguments.bounds + b);
#pragma unroll
      for (u32 i = 0; i < 2; ++i) mask.unmask(i, bound, item.start + i32(row(i) / C::kPack), step.start, lane);
    }
  }

  __device__ __forceinline__ RowScaling take_scores() {
    if (step.flags & kStepBounded) mask.apply(scores);
    return update_maximum(scores, state, arguments.scale_log2);
  }
  template <u32 kFrom, u32 kTo>
  __device__ __forceinline__ void take_weights(const RowScaling& scaling) {
    exponentiate<kFrom, kTo>(scores, state, arguments.scale_log2, scaling);
  }

  // Writes the results of the item that `last` completes. No other tile owns its rows, and rows beyond its end are theirs.
  __device__ __forceinline__ void write_result(const Stage& last) {
    const AttentionForwardItem& done = last.item;
    u32 packed[2][C::kHeadDimV / 4];
    Element* rows[2];
    bool owned[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float sum = quad_sum(last.state.sum[i]);
      const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
      const i32 token = done.start + i32(row(i) / C::kPack);
      const u64 place = u64(token) * arguments.heads_q + done.head * C::kPack + row(i) % C::kPack;
      owned[i] = token < done.end;
      rows[i] = arguments.out + place * arguments.head_dim_v + 8 * (lane % 4);
      if (owned[i] && lane % 4 == 0) {
        const float log2_sum = last.state.max[i] * arguments.scale_log2 + log2_fast(sum);
        arguments.lse[place] = sum > 0.0f ? log2_sum * kLn2 : minus_infinity();
      }
#pragma unroll
      for (u32 j = 0; j < C::kHeadDimV / 8; ++j) {
        packed[i][j] = pack(acc[4 * j + 2 * i] * factor, acc[4 * j + 2 * i + 1] * factor);
      }
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 j = 0; j < C::kHeadDimV / 8; j += 4) {
        const uint4 bits = quad_transpose(packed[i][j], packed[i][j + 1], packed[i][j + 2], packed[i][j + 3], lane);
        if (owned[i] && 8 * (j + lane % 4) < arguments.head_dim_v) *reinterpret_cast<uint4*>(rows[i] + 8 * j) = bits;
      }
    }
  }

  // Groups of 8 columns: of a block, and of those whose weights are computed before the product is waited for.
  static constexpr u32 kGroups = C::kBlock / 8;
  static constexpr u32 kEarly = kGroups / 2;

  __device__ __forceinline__ void run() {
    // The last of the ring lets the first one begin.
    if (group == C::kConsumers - 1) barrier_arrive(kTurnBarrier, 256);
    if (!take_step()) return;
    state.clear();
    wait_query();
    start_scores();
    build_mask();
    wgmma_wait<0>();
    pin(scores);
    release_scored();
    take_weights<0, kGroups>(take_scores());
    pack_weights();
    bool accumulate = false;
    Stage current = stage();
    bool more = take_step();
    while (more) {
      if (current.last) state.clear();
      wait_query();
      barrier_sync(kTurnBarrier + group, 256);
      start_scores();
      wait_values(current.number);
      start_output(current.number, accumulate);
      barrier_arrive(kTurnBarrier + (group + 1) % C::kConsumers, 256);
      build_mask();
      wgmma_wait<1>();
      pin(scores);
      release_scored();
      const RowScaling scaling = take_scores();
      take_weights<0, kEarly>(scaling);
      pin(scores);
      Stage next = stage();
      // What follows is waited for here, which also keeps the compiler from moving these weights behind the product. The
      // others are packed as they come: that needs the registers which the product reads.
      more = take_step();
      wgmma_wait<0>();
      pin(acc);
      release(&shared.value_empty[current.number % C::kStages]);
      take_weights<kEarly, kGroups>(scaling);
      next.state = state;
      pack_weights();
      if (current.last) {
        write_result(current);
      } else if (scaling.grew) {
#pragma unroll
        for (u32 j = 0; j < C::kHeadDimV / 2; ++j) acc[j] *= scaling.rescale[(j / 2) % 2];
      }
      accumulate = !current.last;
      current = next;
    }
    wait_values(current.number);
    start_output(current.number, accumulate);
    wgmma_wait<0>();
    pin(acc);
    write_result(current);
  }

  __device__ __forceinline__ Stage stage() const {
    return Stage{item, state, steps - 1, (step.flags & kStepLast) != 0};
  }
};

template <typename C>
__device__ __forceinline__ void attention_forward(const AttentionForwardArguments& arguments) {
  extern __shared__ u8 dynamic[];
  // Swizzled rows must begin at multiples of 1024 bytes.
  const u32 skew = (1024 - shared_address(dynamic) % 1024) % 1024;
  auto& shared = *reinterpret_cast<AttentionForwardShared<C>*>(dynamic + skew);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < C::kQuerySlots; ++i) {
      mbarrier_init(&shared.query_full[i], 1);
      mbarrier_init(&shared.query_empty[i], 4 * C::kConsumers);
    }
    for (u32 i = 0; i < C::kStages; ++i) {
      mbarrier_init(&shared.key_full[i], 1);
      mbarrier_init(&shared.key_empty[i], 4 * C::kConsumers);
      mbarrier_init(&shared.value_full[i], 1);
      mbarrier_init(&shared.value_empty[i], 4 * C::kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    registers_decrease<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce<C>(arguments, shared);
  } else {
    registers_increase<C::kConsumerRegisters>();
    AttentionForwardConsumer<C> consumer{arguments, shared};
    consumer.run();
  }
}

}  // namespace counterpoint
