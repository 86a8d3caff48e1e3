// How dq comes to be in attention backward: its rows are cleared by the first CTA that has something to add to them, added
// to by the copy engine, and rounded to elements as soon as they are summed. So neither zeros nor sums make a way of their
// own through memory: what is cleared or rounded is in the second level cache.
//
// dq is kept in stretches of kRows rows of a head, which blocks may lie across. A word of each says whether it is cleared;
// another counts the rows that were added, once for every key tile that sees them, and the host knows how many will be.
// Stretches that are summed stand in a list, from which any CTA may take them.
#pragma once

#include "attention/backward_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/flag.cuh"

namespace counterpoint {

namespace backward {

constexpr u32 kUntouched = 0, kClearing = 1, kCleared = 2;

// The two stretches that a step's rows lie in, at most, and how many of its rows lie in each.
struct Stretches {
  u32 first;    // number of the first
  u32 rows[2];  // of the step, in the first and in the one after it
};
__device__ __forceinline__ Stretches stretches_of(i32 row, i32 row_end) {
  const u32 first = u32(row) / kRows;
  const u32 end = min(u32(row_end), (first + 1) * kRows);
  return Stretches{first, {end - u32(row), u32(row_end) - end}};
}

__device__ __forceinline__ u64 stretch_index(const AttentionBackwardArguments& params, u32 stretch, u32 head) {
  return u64(stretch) * (params.heads_kv * params.group) + head;
}

// Where row 0 of a stretch begins in a tensor like dq, in elements.
__device__ __forceinline__ u64 stretch_offset(const AttentionBackwardArguments& params, u32 stretch, u32 head) {
  return (u64(stretch) * kRows * (params.heads_kv * params.group) + head) * params.head_dim;
}
__device__ __forceinline__ u32 stretch_rows(const AttentionBackwardArguments& params, u32 stretch) {
  return min(kRows, params.rows_q - stretch * kRows);
}

// A warp takes 128 columns at a time: a row, or two rows of short heads.
constexpr u32 kWarpRows = 128 / kHeadDim;

// Clears a stretch, or waits until the CTA that began has. That one is running, and waits for nobody meanwhile.
__device__ __forceinline__ void clear_stretch(const AttentionBackwardArguments& params, u32 stretch, u32 head, u32 lane) {
  u32* word = params.cleared + stretch_index(params, stretch, head);
  u32 seen = 0;
  if (lane == 0) {
    seen = load_acquire(word);
    if (seen == kUntouched) seen = exchange_if(word, kUntouched, kClearing);
    while (seen == kClearing) seen = load_acquire(word);
  }
  if (uniform(seen) == kCleared) return;
  const u32 row_stride = params.heads_kv * params.group * params.head_dim;
  const u32 column = 4 * lane % kHeadDim;
  float* dq = params.dq_rows + stretch_offset(params, stretch, head) + column;
  if (column < params.head_dim) {
    // Offsets in a stretch fit a word.
    const u32 end = stretch_rows(params, stretch) * row_stride;
    for (u32 at = 4 * lane / kHeadDim * row_stride; at < end; at += kWarpRows * row_stride) {
      *reinterpret_cast<float4*>(dq + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  // The copy engine adds to it, here and elsewhere.
  fence_async_proxy_all();
  __syncwarp();
  if (lane == 0) store_release(word, kCleared);
}

// The warp that sees to it that rows are cleared before anything is added to them.
__device__ __forceinline__ void clear_role(const AttentionBackwardArguments& params, Storage& shared) {
  if (params.cleared == nullptr) return;
  const u32 lane = threadIdx.x % 32;
  // What is known to be cleared: blocks go downwards, so the second stretch of one is the first of the one before.
  u32 known_stretch = 0, known_head = 0xffffffffu;
  for (u32 count = 0;; ++count) {
    const u32 slot = count % kSteps;
    mbarrier_wait(&shared.announced[slot], count / kSteps % 2);
    const Step& step = shared.steps[slot];
    const u32 flags = uniform_load(&step.flags);
    if (flags & kExit) break;
    if (!(flags & kEmpty)) {
      const Stretches stretches = stretches_of(uniform_load(&step.row), uniform_load(&step.row_end));
      const u32 head = uniform_load(&step.head_q);
      clear_stretch(params, stretches.first, head, lane);
      if (stretches.rows[1] > 0 && (known_stretch != stretches.first + 1 || known_head != head)) {
        clear_stretch(params, stretches.first + 1, head, lane);
      }
      known_stretch = stretches.first;
      known_head = head;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.ready[slot]);
  }
}

// A warp that rounds what is summed, whoever added last: the CTA that lags behind the others of its head would else have to
// round all that they have added to, and lag the more. While CTAs have work one warp of each does it, whose few registers
// hold `kAtOnce` pieces; as they run out of work, their other warps join.
template <u32 kAtOnce>
__device__ __forceinline__ void round_role(const AttentionBackwardArguments& params) {
  if (params.rounded_dq == nullptr) return;
  const u32 lane = threadIdx.x % 32;
  const u32 heads = params.heads_kv * params.group;
  const u32 row_stride = heads * params.head_dim;
  const u32 column = 4 * lane % kHeadDim;
  while (true) {
    u32 index = 0;
    if (lane == 0) {
      const u32 ticket = add_relaxed(params.rounding, 1);
      while (ticket < params.rounds && index == 0) {
        index = load_relaxed(params.summed + ticket);
        if (index == 0) __nanosleep(500);
      }
    }
    index = uniform(index);
    if (index == 0) break;
    fence_device();
    const u32 stretch = (index - 1) / heads;
    const u32 head = (index - 1) % heads;
    const u64 offset = stretch_offset(params, stretch, head) + column;
    const float* from = params.dq_rows + offset;
    Element* to = static_cast<Element*>(params.rounded_dq) + offset;
    if (column >= params.head_dim) continue;
    const u32 end = stretch_rows(params, stretch) * row_stride;
    for (u32 at = 4 * lane / kHeadDim * row_stride; at < end; at += kAtOnce * kWarpRows * row_stride) {
      float4 sums[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 row = at + i * kWarpRows * row_stride;
        if (row < end) sums[i] = __ldcg(reinterpret_cast<const float4*>(from + row));
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 row = at + i * kWarpRows * row_stride;
        if (row < end) {
          *reinterpret_cast<uint2*>(to + row) =
              make_uint2(pack(sums[i].x, sums[i].y), pack(sums[i].z, sums[i].w));
        }
      }
    }
  }
}

// What the adding thread knows of the sums that it has added to.
struct Sums {
  u32 before[2];  // the counts of the stretches of the last step that was counted, before it was

  // Counts a step whose additions are done, behind a fence. What the counts were is looked at a step later, when they have
  // come.
  __device__ __forceinline__ void count(const AttentionBackwardArguments& params, const Step& step) {
    if (step.flags & kEmpty) return;
    const Stretches added = stretches_of(step.row, step.row_end);
    u32* counts = params.summed_rows + stretch_index(params, added.first, step.head_q);
    before[0] = add_relaxed(counts, added.rows[0]);
    if (added.rows[1] > 0) before[1] = add_relaxed(counts + params.heads_kv * params.group, added.rows[1]);
  }

  // Gives the stretches of which the step counted last was the last to those who round.
  __device__ __forceinline__ void hand_over(const AttentionBackwardArguments& params, const Step& step) const {
    if (step.flags & kEmpty) return;
    const Stretches added = stretches_of(step.row, step.row_end);
    const u32* coverage = params.coverage + added.first;
    if (before[0] + added.rows[0] == __ldg(coverage)) give(params, added.first, step.head_q);
    if (added.rows[1] > 0 && before[1] + added.rows[1] == __ldg(coverage + 1)) give(params, added.first + 1, step.head_q);
  }

  static __device__ __forceinline__ void give(const AttentionBackwardArguments& params, u32 stretch, u32 head) {
    fence_device();
    store_relaxed(params.summed + add_relaxed(params.rounding + 1, 1), 1 + u32(stretch_index(params, stretch, head)));
  }
};

// Polls of a turn before a CTA gives up waiting: seconds. Whoever is waited for has started, so only a fault gets
// there.
constexpr u32 kMostPolls = 1u << 26;

// Waits until `turn` others have added. A wait that does not end is a fault, which the host finds in `fault`.
__device__ __forceinline__ void await_turn(const u32* turns, u32 turn, u32* fault) {
  for (u32 polls = 0; load_acquire(turns) != turn; ++polls) {
    if (polls == kMostPolls) {
      *fault = 1;
      break;
    }
  }
}

// Steps whose additions may still be under way when the next one's begin. Where they take turns, others wait for them.
constexpr u32 kUncounted = kDeterministic ? 0 : 1;

// The thread that adds to dq what the query warpgroup leaves in shared memory.
__device__ __forceinline__ void add_role(const AttentionBackwardArguments& params, Storage& shared) {
  Sums sums;
  u32 count = 0;
  for (;; ++count) {
    mbarrier_wait(&shared.full_dq[dq_slot_of(count, 0)], dq_parity_of(count, 0));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & kExit) break;
    const bool rows = !(step.flags & kEmpty);
    if (params.cleared != nullptr) mbarrier_wait(&shared.ready[count % kSteps], count / kSteps % 2);
    u32* turns = nullptr;
    if (kDeterministic && rows) {
      turns = params.turns + u64(u32(step.row) / kRows) * (params.heads_kv * params.group) + step.head_q;
      await_turn(turns, step.turn, params.fault);
    }
#pragma unroll 1
    for (u32 part = 0; part < kParts; ++part) {
      const u32 buffer = dq_slot_of(count, part);
      if (part > 0) mbarrier_wait(&shared.full_dq[buffer], dq_parity_of(count, part));
      if (rows) {
        const u32 column = 64 * (part % kChunks);
        const i32 row = step.row + i32(64 * (part / kChunks));
#pragma unroll 1
        for (u32 box = 0; box < 2; ++box) {
          tma_reduce_add_3d(&params.dq, shared.dq[buffer] + box * (64 * 128), column + 32 * box, step.head_q, row);
        }
      }
      tma_store_commit();
      // The buffer before this one has been read by now.
      tma_store_wait_read<1>();
      if (count > 0 || part > 0) {
        mbarrier_arrive(&shared.empty_dq[buffer > 0 ? buffer - 1 : kDqBuffers - 1]);
      }
    }
    if (kDeterministic && rows) {
      // The additions are done: it is the next tile's turn.
      tma_store_wait<0>();
      fence_device();
      add_relaxed(turns, 1);
    }
    if (params.rounded_dq != nullptr && count + 1 > kUncounted) {
      // Announcements outlive the two steps after them.
      if (count > kUncounted) sums.hand_over(params, shared.steps[(count - kUncounted - 1) % kSteps]);
      if (kUncounted > 0) {
        tma_store_wait<kParts>();
        fence_device();
      }
      sums.count(params, shared.steps[(count - kUncounted) % kSteps]);
    }
  }
  tma_store_wait<0>();
  if (params.rounded_dq != nullptr) {
    if (count > kUncounted) sums.hand_over(params, shared.steps[(count - kUncounted - 1) % kSteps]);
    if (kUncounted > 0 && count > 0) {
      fence_device();
      sums.count(params, shared.steps[(count - 1) % kSteps]);
      sums.hand_over(params, shared.steps[(count - 1) % kSteps]);
    }
  }
}

}  // namespace backward

}  // namespace counterpoint
