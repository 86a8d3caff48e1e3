// The sums of dq in attention backward: the copy engine adds to them, and once a slab of rows is summed it is rounded to
// elements. CTAs that have run out of work do so while others still work, so that it costs no time of its own.
//
// A slab is kRows rows of a head; blocks may lie across slabs. Of each, a word counts the rows that were added, once for
// every key tile that sees them; the host knows how many will be. Slabs that are summed stand in a list, from which any
// CTA takes them.
#pragma once

#include "attention/backward_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/flag.cuh"

namespace counterpoint {

namespace backward {

__device__ __forceinline__ u64 slab_index(const AttentionBackwardArguments& params, u32 slab, u32 head) {
  return u64(slab) * (params.heads_kv * params.group) + head;
}

// Where row 0 of a slab begins in a tensor like dq, in elements.
__device__ __forceinline__ u64 slab_offset(const AttentionBackwardArguments& params, u32 slab, u32 head) {
  return (u64(slab) * kRows * (params.heads_kv * params.group) + head) * params.head_dim;
}
__device__ __forceinline__ u32 slab_rows(const AttentionBackwardArguments& params, u32 slab) {
  return min(kRows, params.rows_q - slab * kRows);
}

// A warp takes 128 columns at a time: a row, or two rows of short heads.
constexpr u32 kWarpRows = 128 / kHeadDim;

// Counts rows that were added to a slab, and lists it when those were the last. Whoever calls this has seen the additions
// complete, and fenced.
__device__ __forceinline__ void count_added(const AttentionBackwardArguments& params, u32 slab, u32 head, u32 rows) {
  const u64 index = slab_index(params, slab, head);
  if (add_relaxed(params.summed_rows + index, rows) + rows == __ldg(params.coverage + slab)) {
    // What all others added comes before whoever finds it in the list.
    fence_device();
    store_relaxed(params.summed + add_relaxed(params.rounding + 1, 1), 1 + u32(index));
  }
}

// The warp that counts what was added, item by item.
__device__ __forceinline__ void count_role(const AttentionBackwardArguments& params, Storage& shared) {
  if (params.rounded_dq == nullptr) return;
  const u32 lane = threadIdx.x % 32;
  for (u32 count = 0;; ++count) {
    const u32 slot = slot_of(count);
    mbarrier_wait(&shared.full_added[slot], parity_of(count));
    const u32 head = uniform_load(&shared.added[slot].head_kv) * params.group;
    const u32 run_begin = uniform_load(&shared.added[slot].run_begin);
    const u32 run_end = uniform_load(&shared.added[slot].run_end);
    if (lane == 0) mbarrier_arrive(&shared.empty_added[slot]);
    if (run_begin == run_end) break;
    fence_device();
    for (u32 run = run_begin; run < run_end; ++run) {
      const int2 rows = __ldg(reinterpret_cast<const int2*>(params.runs + run));
      const u32 first = u32(rows.x) / kRows;
      const u32 counts = (u32(rows.y - 1) / kRows + 1 - first) * params.group;
      for (u32 i = lane; i < counts; i += 32) {
        const u32 slab = first + i / params.group;
        const u32 added = min(u32(rows.y), (slab + 1) * kRows) - max(u32(rows.x), slab * kRows);
        count_added(params, slab, head + i % params.group, added);
      }
    }
    __syncwarp();
  }
}

// A warp that rounds what is summed, until all is.
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
    const u32 slab = (index - 1) / heads;
    const u32 head = (index - 1) % heads;
    const u64 offset = slab_offset(params, slab, head) + column;
    const float* from = params.dq_rows + offset;
    Element* to = static_cast<Element*>(params.rounded_dq) + offset;
    if (column >= params.head_dim) continue;
    const u32 end = slab_rows(params, slab) * row_stride;
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

// Adds a part of a step's dq, from its buffer.
__device__ __forceinline__ void add_part(const AttentionBackwardArguments& params, Storage& shared, const Step& step,
                                         u32 part, u32 buffer) {
  const u32 column = 64 * (part % kChunks);
  const i32 row = step.row + i32(64 * (part / kChunks));
#pragma unroll 1
  for (u32 box = 0; box < 2; ++box) {
    tma_reduce_add_3d(&params.dq, shared.dq[buffer] + box * (64 * 128), column + 32 * box, step.head_q, row);
  }
}

__device__ __forceinline__ void announce_added(Storage& shared, u32 count, const AddedItem& item) {
  mbarrier_wait(&shared.empty_added[slot_of(count)], parity_of(count) ^ 1);
  shared.added[slot_of(count)] = item;
  mbarrier_arrive(&shared.full_added[slot_of(count)]);
}

// The thread that adds to dq what the query warpgroup leaves in shared memory, whoever else adds when.
__device__ __forceinline__ void add_role(const AttentionBackwardArguments& params, Storage& shared) {
  u32 items = 0;  // that have something to see
  for (u32 count = 0;; ++count) {
    mbarrier_wait(&shared.full_dq[dq_slot_of(count, 0)], dq_parity_of(count, 0));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & kExit) break;
    const bool rows = !(step.flags & kEmpty);
#pragma unroll 1
    for (u32 part = 0; part < kParts; ++part) {
      const u32 buffer = dq_slot_of(count, part);
      if (part > 0) mbarrier_wait(&shared.full_dq[buffer], dq_parity_of(count, part));
      if (rows) add_part(params, shared, step, part, buffer);
      tma_store_commit();
      // The buffer before this one has been read by now.
      tma_store_wait_read<1>();
      if (count > 0 || part > 0) {
        mbarrier_arrive(&shared.empty_dq[buffer > 0 ? buffer - 1 : kDqBuffers - 1]);
      }
    }
    if (rows && step.flags & kLast && params.rounded_dq != nullptr) {
      tma_store_wait<0>();
      announce_added(shared, items++, AddedItem{step.head_kv, step.run_begin, step.run_end});
    }
  }
  tma_store_wait<0>();
  if (params.rounded_dq != nullptr) announce_added(shared, items, AddedItem{0, 0, 0});
}

}  // namespace backward

}  // namespace counterpoint
