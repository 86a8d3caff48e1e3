// Attention forward for Hopper (sm_90a): one CTA owns a tile of query rows and loops over the runs of its schedule.
//
// In the first warpgroup one thread goes through the schedule and another one feeds shared memory by TMA; each of the
// others, a consumer, owns 64 rows. The blocks of all tiles of a CTA form one stream of steps. In each step a consumer
// starts scores = q k^T of the NEXT step, then acc += weights v of this one, and does the next step's softmax while both
// run; so the matrix units also stay busy from one tile to the next. Consumers alternate at starting products, so that
// one's softmax runs under the other's products.
// (The two-level overlap is FlashAttention 3's, https://arxiv.org/abs/2407.08608; the stream across tiles is not.)
#pragma once

#include "attention/attention_forward_interior.cuh"
#include "attention/attention_forward_load.cuh"
#include "attention/attention_forward_rows.cuh"
#include "attention/attention_forward_scheduler.cuh"
#include "attention/attention_mask.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

// Warps of the first warpgroup.
constexpr u32 kLoaderWarp = 0;
constexpr u32 kSchedulerWarp = 1;

// One consumer warpgroup, with one loop body for all steps (`Loop::kUniform`).
template <typename C>
struct AttentionForwardConsumer {
  const AttentionForwardArguments& arguments;
  AttentionForwardShared<C>& shared;
  const u32 group = uniform(threadIdx.x / 128) - 1;
  const u32 lane = threadIdx.x % 32;
  const AttentionForwardRows<C> rows{arguments, 64 * group + 16 * (threadIdx.x % 128 / 32) + lane / 4, lane};

  // What of the step just taken must outlive the next one's.
  struct Stage {
    u32 item;  // its number
    RowState state;
    float partial_sum[2];  // of the step's sums, not in `state` yet
    bool last;
  };

  float scores[C::kBlock / 2];
  u32 weights[C::kBlock / 4];
  float acc[C::kHeadDimV / 2];
  RowState state;
  ColumnMask<C::kBlock> mask;

  AttentionForwardStep step;  // the last one taken
  u32 items = 0;              // taken so far, that of `step` included
  u32 steps = 0;              // taken so far, `step` included, so that the one before is number steps - 2

  __device__ __forceinline__ u32 slot() const { return (items - 1) % C::kQuerySlots; }

  // Waits for the keys of the next step; false when there is no more work. A negative `settled` would spoil the wait;
  // it is a sum of weights, so it never is. But a compiler that does not know that cannot move the wait before these weights.
  __device__ __forceinline__ bool take_step(float settled = 0.0f) {
    const u32 stage = steps % C::kStages;
    mbarrier_wait(&shared.key_full[stage], ((steps / C::kStages) & 1) ^ (settled < 0.0f ? 1 : 0));
    step = shared.steps[steps % kPlanned];
    step.flags = uniform(step.flags);
    ++steps;
    if (step.flags & kStepFirst) ++items;
    return !(step.flags & kStepNone);
  }

  __device__ __forceinline__ void wait_query() {
    if (step.flags & kStepFirst) {
      mbarrier_wait(&shared.query_full[slot()][group], ((items - 1) / C::kQuerySlots) & 1);
    }
  }
  __device__ __forceinline__ void wait_values(u32 number) {
    mbarrier_wait(&shared.value_full[number % C::kStages], (number / C::kStages) & 1);
  }

  __device__ __forceinline__ void release(u64* barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  }
  // Once the scores of the step just taken are complete: its keys, and after an item's last step its query rows, may
  // go.
  __device__ __forceinline__ void release_scored() {
    release(&shared.key_empty[(steps - 1) % C::kStages]);
    if (step.flags & kStepLast) release(&shared.query_empty[slot()][group]);
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
    const i32 first = item(items - 1).start;
    unmask(shared.bounds[(steps - 1) % kPlanned], first);
    // Few steps have more than one.
    for (u32 b = step.bound_begin + 1; b < step.bound_end; ++b) unmask(load_bound(arguments.bounds + b), first);
  }
  __device__ __forceinline__ void unmask(const TileBound& bound, i32 first) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) mask.unmask(i, bound, first + i32(rows.row(i) / C::kPack), step.start, lane);
  }

  // The new block's scores, complete: transforms and masks them, and takes their maxima.
  __device__ __forceinline__ RowScaling take_scores() {
    if constexpr (C::kScores == Scores::kTransformed) {
      if (arguments.softcap_log2 != 0.0f) {
        cap(scores, arguments.softcap_scale, arguments.softcap_log2);
      } else {
#pragma unroll
        for (u32 i = 0; i < C::kBlock / 2; ++i) scores[i] *= arguments.scale_log2;
      }
    }
    if (step.flags & kStepBounded) mask.apply(scores);
    return update_maximum(scores, state, rows.score_scale());
  }
  template <u32 kFrom, u32 kTo>
  __device__ __forceinline__ void take_weights(const RowScaling& scaling, float (&partial_sum)[2]) {
    exponentiate<kFrom, kTo>(scores, partial_sum, rows.score_scale(), scaling);
  }
  // Sums are made whole for each step, so that they do not depend on where a row's keys were cut into stages.
  __device__ __forceinline__ static void add_sums(Stage& stage) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) stage.state.sum[i] += quad_sum(stage.partial_sum[i]);
  }

  __device__ __forceinline__ void rescale_output(const RowScaling& scaling) {
    if (!scaling.grew) return;
#pragma unroll
    for (u32 j = 0; j < C::kHeadDimV / 2; ++j) acc[j] *= scaling.rescale[(j / 2) % 2];
  }

  __device__ __forceinline__ const AttentionForwardItem& item(u32 number) const {
    return shared.items[number % kItems];
  }

  // The accumulators with which an item begins, once those of the item before are written.
  __device__ __forceinline__ void begin_output(u32 number, const RowScaling& scaling) {
    if (!rows.continues()) return;
    rows.begin_output(item(number), acc);
    rescale_output(scaling);
  }

  // Groups of 8 columns: of a block, and of those whose weights are computed before the product is waited for.
  static constexpr u32 kGroups = C::kBlock / 8;
  static constexpr u32 kEarly = kGroups / 4;

  __device__ __forceinline__ void work() {
    // The last consumer lets the first one begin.
    if (group == C::kConsumers - 1) barrier_arrive(kOrderBarrier, 256);
    if (!take_step()) return;
    rows.begin_state(item(items - 1), state);
    wait_query();
    start_scores();
    build_mask();
    wgmma_wait<0>();
    pin(scores);
    release_scored();
    Stage current = {};
    {
      const RowScaling scaling = take_scores();
      // In the same two parts as below: the order of the sum must not depend on which step is a CTA's first.
      take_weights<0, kEarly>(scaling, current.partial_sum);
      take_weights<kEarly, kGroups>(scaling, current.partial_sum);
      pack_weights();
      begin_output(items - 1, scaling);
      current = Stage{items - 1, state, {current.partial_sum[0], current.partial_sum[1]}, (step.flags & kStepLast) != 0};
    }
    bool accumulate = rows.continues();
    bool more = take_step();
    while (more) {
      wait_query();
      barrier_sync(kOrderBarrier + group, 256);
      start_scores();
      // What needs no product is done before the next one is started: that would not begin earlier.
      build_mask();
      add_sums(current);
      if (current.last) {
        rows.begin_state(item(items - 1), state);
      } else {
        state = current.state;
      }
      const u32 number = steps - 2;
      wait_values(number);
      start_output(number, accumulate);
      barrier_arrive(kOrderBarrier + (group + 1) % C::kConsumers, 256);
      wgmma_wait<1>();
      pin(scores);
      release_scored();
      const RowScaling scaling = take_scores();
      Stage next{items - 1, state, {0.0f, 0.0f}, (step.flags & kStepLast) != 0};
      take_weights<0, kEarly>(scaling, next.partial_sum);
      pin(scores);
      // What follows is waited for here, and needs these weights. The compiler, which knows that sums of weights are not negative, still
      // moves them behind the product where blocks have 176 keys and at head 64, and that is faster (docs/experiments/006-forward-head-64.md).
      // The others are packed as they come: that needs the registers which the product reads.
      more = take_step(next.partial_sum[0] + next.partial_sum[1]);
      wgmma_wait<0>();
      pin(acc);
      release(&shared.value_empty[number % C::kStages]);
      take_weights<kEarly, kGroups>(scaling, next.partial_sum);
      pack_weights();
      if (current.last) {
        rows.write(item(current.item), current.state, acc);
        begin_output(next.item, scaling);
      } else {
        rescale_output(scaling);
      }
      accumulate = rows.continues() || !current.last;
      current = next;
    }
    wait_values(steps - 2);
    start_output(steps - 2, accumulate);
    wgmma_wait<0>();
    pin(acc);
    add_sums(current);
    rows.write(item(current.item), current.state, acc);
  }
};

template <typename C>
__device__ __forceinline__ void attention_forward(const AttentionForwardArguments& arguments) {
  extern __shared__ u8 dynamic[];
  // Swizzled rows must begin at multiples of 1024 bytes.
  const u32 skew = (1024 - shared_address(dynamic) % 1024) % 1024;
  auto& shared = *reinterpret_cast<AttentionForwardShared<C>*>(dynamic + skew);
  let_dependents_start();
  AttentionForwardScheduler<C> scheduler{arguments, shared};
  const u32 warp = uniform(threadIdx.x / 32);
  const bool leads = threadIdx.x % 32 == 0;
  if (warp == kLoaderWarp && leads) {
    shared.initialise();
  } else if (warp == kSchedulerWarp && leads) {
    // What the first copies need is on its way while barriers are made.
    tma_prefetch_map(&arguments.q_map);
    tma_prefetch_map(&arguments.k_map);
    tma_prefetch_map(&arguments.v_map);
    if (arguments.own_rows < arguments.rows_k) {
      tma_prefetch_map(&arguments.arriving_k_map);
      tma_prefetch_map(&arguments.arriving_v_map);
    }
    scheduler.find();
  }
  if constexpr (C::kCtas > 1) {
    // The barriers of every CTA are there before another CTA arrives at them.
    cluster_sync();
  } else {
    __syncthreads();
  }
  wait_for_previous();
  if (warp < 4) {
    registers_decrease<C::kProducerRegisters>();
    if (warp == kLoaderWarp && leads) {
      AttentionForwardLoader<C> loader{arguments, shared};
      loader.work();
    } else if (warp == kSchedulerWarp && leads) {
      scheduler.work();
    }
  } else {
    registers_increase<C::kConsumerRegisters>();
    if constexpr (C::kLoop == Loop::kInterior) {
      AttentionForwardInteriorConsumer<C> consumer{arguments, shared};
      consumer.work();
    } else {
      AttentionForwardConsumer<C> consumer{arguments, shared};
      consumer.work();
    }
  }
  // A CTA stays while another one may write to its shared memory.
  if constexpr (C::kCtas > 1) cluster_sync();
}

}  // namespace counterpoint
