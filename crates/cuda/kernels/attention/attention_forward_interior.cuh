// A consumer of the forward for long rows: interior steps, which are most of theirs, have a loop body of their own.
//
// The same pipeline as AttentionForwardConsumer's, with fewer instructions for a step (what FlashAttention 3 gains by loops with and
// without masking). Issue slots are what a step is short of (docs/experiments/006-forward-head-64.md), so:
//  - The body of interior steps, which are not bounded and neither begin nor end an item, tests no flags, and accumulates always.
//  - Addresses of barriers and descriptors are numbers of 32 bits from the start of shared memory on; of a step its flags are read.
//  - Maxima are kept scaled and finite, so that nothing asks whether a row has seen a key.
//  - Sums stay a thread's own until an item ends, as FlashAttention's do; stages, whose states hold whole sums, have the other consumer.
#pragma once

#include "attention/attention_forward_rows.cuh"
#include "attention/attention_mask.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

template <typename C>
struct AttentionForwardInteriorConsumer {
  static_assert(C::kSpan == Span::kWhole, "a state's sums are whole after every step");
  static_assert(C::kScores == Scores::kScaled, "products are scaled within the exponent");
  using Shared = AttentionForwardShared<C>;

  const AttentionForwardArguments& arguments;
  Shared& shared;
  const u32 base = shared_address(&shared);
  // What descriptors have room for: in a cluster an address has the CTA's rank above the bits of its shared memory.
  const u32 tensors = C::kCtas > 1 ? base & 0x3ffffu : base;
  const u32 group = uniform(threadIdx.x / 128) - 1;
  const u32 lane = threadIdx.x % 32;
  const AttentionForwardRows<C> rows{arguments, 64 * group + 16 * (threadIdx.x % 128 / 32) + lane / 4, lane};

  float scores[C::kBlock / 2];
  u32 weights[C::kBlock / 4];
  float acc[C::kHeadDimV / 2];
  RowState state;    // maxima of products as they are; sums of this thread's columns
  float scaled[2];   // state.max times the scale, but at least the least finite number
  float rescale[2];  // what earlier sums and accumulators must be multiplied by
  ColumnMask<C::kBlock> mask;

  u32 flags;      // of the last step taken
  u32 items = 0;  // taken so far, that of the last step included
  u32 steps = 0;  // taken so far
  u32 ends;       // kStepLast if the step whose weights are ready is its item's last, else 0

  // Bytes from the start of shared memory.
  template <typename Member>
  __device__ __forceinline__ static u32 offset(Member Shared::* member) {
    return u32(u64(&(static_cast<Shared*>(nullptr)->*member)));
  }
  __device__ __forceinline__ u32 barrier(u64 (Shared::*stages)[C::kStages], u32 number) const {
    return base + offset(stages) + 8 * (number % C::kStages);
  }
  __device__ __forceinline__ u32 barrier(u64 (Shared::*slots)[C::kQuerySlots][C::kConsumers]) const {
    return base + offset(slots) + 8 * (slot() * C::kConsumers + group);
  }
  __device__ __forceinline__ static u32 parity(u32 number) { return (number / C::kStages) & 1; }
  __device__ __forceinline__ u32 slot() const { return (items - 1) % C::kQuerySlots; }
  __device__ __forceinline__ const AttentionForwardItem& item(u32 number) const { return shared.items[number % kItems]; }

  // Waits for the keys of the next step; false when there is no more work.
  __device__ __forceinline__ bool take_step() {
    mbarrier_wait(barrier(&Shared::key_full, steps), parity(steps));
    const u32 step = base + offset(&Shared::steps) + sizeof(AttentionForwardStep) * (steps % kPlanned);
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(step + u32(u64(&static_cast<AttentionForwardStep*>(nullptr)->flags)))
                 : "memory");
    flags = uniform(value);
    ++steps;
    if (flags & kStepFirst) ++items;
    return !(flags & kStepNone);
  }
  __device__ __forceinline__ void wait_query() const {
    if (flags & kStepFirst) mbarrier_wait(barrier(&Shared::query_full), ((items - 1) / C::kQuerySlots) & 1);
  }
  __device__ __forceinline__ void wait_values(u32 number) const {
    mbarrier_wait(barrier(&Shared::value_full, number), parity(number));
  }

  __device__ __forceinline__ void release(u32 barrier) const { mbarrier_arrive_if(barrier, lane == 0); }
  // Of what the CTAs of a cluster load for each other: lane i signals CTA i.
  const u32 to_peer = C::kCtas > 1 ? peer_address(base, lane % C::kCtas) - base : 0;
  __device__ __forceinline__ void release_loaded(u32 barrier) const {
    if constexpr (C::kCtas == 1) {
      release(barrier);
    } else {
      peer_arrive_if(barrier + to_peer, lane < C::kCtas);
    }
  }
  // Once the scores of the step just taken are complete.
  template <bool kInterior>
  __device__ __forceinline__ void release_scored() const {
    release_loaded(barrier(&Shared::key_empty, steps - 1));
    if (!kInterior && flags & kStepLast) release(barrier(&Shared::query_empty));
  }

  // Where the operands of the next products are; found before the barrier, which is not kept waiting then.
  u64 query_descriptor, key_descriptor, value_descriptor;
  __device__ __forceinline__ void find_scores() {
    query_descriptor = wgmma_descriptor_at(tensors + offset(&Shared::queries) + group * 64 * kRowBytes +
                                           slot() * u32(sizeof(shared.queries[0])));
    key_descriptor =
        wgmma_descriptor_at(tensors + offset(&Shared::keys) + (steps - 1) % C::kStages * u32(sizeof(shared.keys[0])));
  }
  __device__ __forceinline__ void find_output(u32 number) {
    value_descriptor = wgmma_descriptor_at(
        tensors + offset(&Shared::values) + number % C::kStages * u32(sizeof(shared.values[0])), C::kBlock * kRowBytes);
  }

  // Starts scores = q k^T of the step just taken.
  __device__ __forceinline__ void start_scores() {
    wgmma_fence();
#pragma unroll
    for (u32 kk = 0; kk < C::kHeadDim / 16; ++kk) {
      const u32 chunk = kk / 4, inner = (kk % 4) * 32;
      Wgmma<C::kBlock>::template ss<>(scores, wgmma_advance(query_descriptor, chunk * C::kTileRows * kRowBytes + inner),
                                      wgmma_advance(key_descriptor, chunk * C::kBlock * kRowBytes + inner), kk > 0);
    }
    wgmma_commit();
  }

  // Starts acc += weights v.
  __device__ __forceinline__ void start_output() {
    wgmma_fence();
#pragma unroll
    for (u32 kk = 0; kk < C::kBlock / 16; ++kk) {
      const u32(&pairs)[4] = *reinterpret_cast<const u32(*)[4]>(&weights[4 * kk]);
      Wgmma<C::kHeadDimV>::template rs<Major::kMN>(acc, pairs, wgmma_advance(value_descriptor, kk * 16 * kRowBytes), 1);
    }
    wgmma_commit();
  }

  // Works out the masked columns of the step just taken; done while its product runs.
  __device__ __forceinline__ void build_mask() {
    if (!(flags & kStepBounded)) return;
    mask.clear();
    const AttentionForwardStep& step = shared.steps[(steps - 1) % kPlanned];
    const i32 first = item(items - 1).start;
    unmask(shared.bounds[(steps - 1) % kPlanned], first, step.start);
    // Few steps have more than one.
    for (u32 b = step.bound_begin + 1; b < step.bound_end; ++b) unmask(load_bound(arguments.bounds + b), first, step.start);
  }
  __device__ __forceinline__ void unmask(const TileBound& bound, i32 first, i32 start) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) mask.unmask(i, bound, first + i32(rows.row(i) / C::kPack), start, lane);
  }

  // state.max scaled. With the least finite number instead of minus infinity the weights of a row that has seen nothing are
  // exp2(-infinity), which is 0, and it is rescaled by exp2(0) until it sees something.
  __device__ __forceinline__ float scaled_maximum(u32 i) const {
    return fmaxf(state.max[i] * rows.score_scale(), __uint_as_float(0xff7fffffu));
  }
  __device__ __forceinline__ void begin_state() {
    state.clear();
#pragma unroll
    for (u32 i = 0; i < 2; ++i) scaled[i] = scaled_maximum(i);
  }

  // Masks the new block's scores and takes their maxima; whether one of the warp's rows has a new one. Maxima never lag, as in the
  // other consumer (`update_maximum` says why).
  template <bool kInterior>
  __device__ __forceinline__ bool take_scores() {
    if (!kInterior && flags & kStepBounded) mask.apply(scores);
    // Chains side by side hide the latency of the instruction.
    constexpr u32 kChains = 4;
    float chain[2][kChains];
#pragma unroll
    for (u32 place = 0; place < C::kBlock / 2; ++place) {
      float& top = chain[place / 2 % 2][place / 4 % 2 * 2 + place % 2];
      top = place < 4 * kChains / 2 ? scores[place] : fmaxf(top, scores[place]);
    }
    bool grew = false;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float seen = quad_max(fmaxf(fmaxf(chain[i][0], chain[i][1]), fmaxf(chain[i][2], chain[i][3])));
      grew |= seen > state.max[i];
      state.max[i] = fmaxf(seen, state.max[i]);
      const float top = scaled_maximum(i);
      rescale[i] = exp2_fast(scaled[i] - top);
      scaled[i] = top;
    }
    return __any_sync(0xffffffffu, grew);
  }

  // Makes scores into weights, packed, and adds them to this thread's sums.
  __device__ __forceinline__ void take_weights() {
    const float scale = rows.score_scale();
    float chain[2][2];
#pragma unroll
    for (u32 place = 0; place < C::kBlock / 2; ++place) {
      const u32 i = place / 2 % 2;
      scores[place] = exp2_fast(fmaf(scores[place], scale, -scaled[i]));
      float& sum = chain[i][place % 2];
      sum = place < 4 ? scores[place] : sum + scores[place];
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) state.sum[i] = fmaf(state.sum[i], rescale[i], chain[i][0] + chain[i][1]);
#pragma unroll
    for (u32 j = 0; j < C::kBlock / 4; ++j) weights[j] = pack(scores[2 * j], scores[2 * j + 1]);
  }

  __device__ __forceinline__ void rescale_output() {
#pragma unroll
    for (u32 j = 0; j < C::kHeadDimV / 2; ++j) acc[j] *= rescale[(j / 2) % 2];
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (u32 j = 0; j < C::kHeadDimV / 2; ++j) acc[j] = 0.0f;
  }

  // Writes an item's results; `ended` becomes the state of whole rows.
  __device__ __forceinline__ void write(u32 number, RowState& ended) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) ended.sum[i] = quad_sum(ended.sum[i]);
    rows.write(item(number), ended, acc);
  }

  // Starts the scores of the step just taken and the output of the one before, takes the former's weights and the next step. Interior:
  // the former has no flags, and the latter is not its item's last.
  template <bool kInterior>
  __device__ __forceinline__ bool pass() {
    if (!kInterior) wait_query();
    const u32 number = steps - 2;
    find_scores();
    find_output(number);
    barrier_sync(kOrderBarrier + group, 256);
    start_scores();
    if (!kInterior) build_mask();
    wait_values(number);
    start_output();
    barrier_arrive(kOrderBarrier + (group + 1) % C::kConsumers, 256);
    const u32 ended_item = items - 2;
    RowState ended;
    if (!kInterior && ends) {
      ended = state;
      begin_state();
    }
    wgmma_wait<1>();
    pin(scores);
    release_scored<kInterior>();
    const bool grew = take_scores<kInterior>();
    const u32 taken_ends = flags & kStepLast;
    const bool more = take_step();
    wgmma_wait<0>();
    pin(acc);
    release_loaded(barrier(&Shared::value_empty, number));
    take_weights();
    if (!kInterior && ends) {
      write(ended_item, ended);
      clear_output();
    } else if (grew) {
      rescale_output();
    }
    if (!kInterior) ends = taken_ends;
    return more;
  }

  __device__ __forceinline__ void work() {
    // The last consumer lets the first one begin.
    if (group == C::kConsumers - 1) barrier_arrive(kOrderBarrier, 256);
    if (!take_step()) return;
    begin_state();
    clear_output();
    wait_query();
    find_scores();
    start_scores();
    build_mask();
    wgmma_wait<0>();
    pin(scores);
    release_scored<false>();
    take_scores<false>();
    take_weights();
    ends = flags & kStepLast;
    bool more = take_step();
    while (more) more = (flags | ends) == 0 ? pass<true>() : pass<false>();
    const u32 number = steps - 2;
    wait_values(number);
    find_output(number);
    start_output();
    wgmma_wait<0>();
    pin(acc);
    write(items - 1, state);
  }
};

}  // namespace counterpoint
