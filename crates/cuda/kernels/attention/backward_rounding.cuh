// Rounding of dq to elements, slab by slab as rows are summed, while the kernel goes on.
//
// A slab is kRows rows of a head; blocks may lie across slabs. Of each, a word counts the rows that were added, once for
// every key tile that sees them; the host knows how many will be. Slabs that are summed stand in a list, from which any
// CTA takes them.
//
// The query warpgroup rounds them while it waits for the key warpgroups, soon after the last addition, when the sums are still in the
// second level cache. That slows the others, by less than rounding takes at the end, at memory speed; so what CTAs without work can round
// is left to them.
#pragma once

#include "attention/backward_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/flag.cuh"
#include "wait_limit.cuh"

namespace counterpoint {

namespace backward {

template <typename C>
__device__ __forceinline__ u64 slab_index(const BackwardParams<C>& params, u32 slab, u32 head) {
  return u64(slab) * (params.all.heads_kv * params.all.group) + head;
}

// Where row 0 of a slab begins in a tensor like dq, in elements.
template <typename C>
__device__ __forceinline__ u64 slab_offset(const BackwardParams<C>& params, u32 slab, u32 head) {
  return (u64(slab) * C::kRows * (params.all.heads_kv * params.all.group) + head) * params.all.head_dim;
}
template <typename C>
__device__ __forceinline__ u32 slab_rows(const BackwardParams<C>& params, u32 slab) {
  return min(C::kRows, params.rounding.rows_q - slab * C::kRows);
}

// Counts rows that were added to a slab, and lists it when those were the last. Whoever calls this has seen the additions
// complete, and fenced.
template <typename C>
__device__ __forceinline__ void count_added(const BackwardParams<C>& params, u32 slab, u32 head, u32 rows) {
  const u64 index = slab_index(params, slab, head);
  const BackwardRounding& rounding = params.rounding;
  if (add_relaxed(rounding.summed_rows + index, rows) + rows == __ldg(rounding.coverage + slab)) {
    // What all others added comes before whoever finds it in the list.
    fence_device();
    store_relaxed(rounding.summed + add_relaxed(rounding.progress + 1, 1), 1 + u32(index));
  }
}

// The warp that counts what was added, item by item.
template <typename C>
__device__ __forceinline__ void count_role(const BackwardParams<C>& params, Storage<C>& shared) {
  if (params.rounding.rounded_dq == nullptr) return;
  const u32 lane = threadIdx.x % 32;
  for (u32 count = 0;; ++count) {
    const u32 slot = slot_of(count);
    mbarrier_wait(&shared.full_added[slot], parity_of(count));
    const u32 head = uniform_load(&shared.added[slot].head_q);
    const u32 heads = uniform_load(&shared.added[slot].heads);
    const u32 run_begin = uniform_load(&shared.added[slot].run_begin);
    const u32 run_end = uniform_load(&shared.added[slot].run_end);
    if (lane == 0) mbarrier_arrive(&shared.empty_added[slot]);
    if (run_begin == run_end) break;
    fence_device();
    for (u32 run = run_begin; run < run_end; ++run) {
      const int2 rows = __ldg(reinterpret_cast<const int2*>(params.all.runs + run));
      const u32 first = u32(rows.x) / C::kRows;
      const u32 counts = (u32(rows.y - 1) / C::kRows + 1 - first) * heads;
      for (u32 i = lane; i < counts; i += 32) {
        const u32 slab = first + i / heads;
        const u32 added = min(u32(rows.y), (slab + 1) * C::kRows) - max(u32(rows.x), slab * C::kRows);
        count_added(params, slab, head + i % heads, added);
      }
    }
    __syncwarp();
  }
}

// The next slab of the list, when it is summed; none when all are taken, or the wait for it gave up. For one thread, which makes its
// warp see what was added.
template <typename C>
__device__ __forceinline__ SummedSlab take_summed(const BackwardParams<C>& params) {
  const u32 ticket = add_relaxed(params.rounding.progress, 1);
  if (ticket >= params.rounding.slabs) return SummedSlab{0, 0};
  u32 index = 0;
  const auto came = [&] {
    index = load_relaxed(params.rounding.summed + ticket);
    if (index == 0) pause_nanoseconds<500>();
    return index != 0;
  };
  const auto late = [&] { report_fault(params.all.wait, 0, 0, ticket, params.rounding.slabs); };
  if (!wait_until(params.all.wait, came, late)) return SummedSlab{0, 0};
  fence_device();
  const u32 heads = params.all.heads_kv * params.all.group;
  const u32 slab = (index - 1) / heads;
  return SummedSlab{slab_offset(params, slab, (index - 1) % heads), slab_rows(params, slab)};
}

// Rows of a slab on their way through a warp's registers: every kWarpRows-th from `row` on, kAtOnce of them.
template <typename C, u32 kAtOnce>
struct RowsOfSlab {
  float4 sums[kAtOnce];

  // A warp takes 128 columns at a time: a row, or two rows of short heads.
  static constexpr u32 kWarpRows = 128 / C::kHeadDim;
  static constexpr u32 kRowsAtOnce = kAtOnce * kWarpRows;
  static __device__ __forceinline__ u32 lane_row(u32 row) { return row + 4 * (threadIdx.x % 32) / C::kHeadDim; }
  static __device__ __forceinline__ u32 lane_column() { return 4 * threadIdx.x % C::kHeadDim; }
  static __device__ __forceinline__ u32 row_stride(const BackwardParams<C>& params) {
    return params.all.heads_kv * params.all.group * params.all.head_dim;
  }

  // Without a condition, of other rows where there are none: what a load leaves as it was would take registers all the time.
  __device__ __forceinline__ void load(const BackwardParams<C>& params, const SummedSlab& slab, u32 row) {
    const float* from = params.rounding.dq + slab.begin + (lane_column() < params.all.head_dim ? lane_column() : 0);
    const u32 last = slab.rows - 1;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 at = min(lane_row(row) + i * kWarpRows, last) * row_stride(params);
      sums[i] = __ldcg(reinterpret_cast<const float4*>(from + at));
    }
  }

  __device__ __forceinline__ void round(const BackwardParams<C>& params, const SummedSlab& slab, u32 row) const {
    const u64 begin = slab.begin + lane_column();
    const u32 rows = lane_column() < params.all.head_dim ? slab.rows : 0;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 to = lane_row(row) + i * kWarpRows;
      if (to >= rows) continue;
      const u64 at = begin + to * row_stride(params);
      Element* rounded = static_cast<Element*>(params.rounding.rounded_dq) + at;
      store_words(rounded, pack(sums[i].x, sums[i].y), pack(sums[i].z, sums[i].w));
      if (params.rounding.zeroes_sums) store_four_zeros(params.rounding.dq + at);
    }
  }
};

// A warp that has nothing else to do rounds slabs until all are.
template <typename C>
__device__ __forceinline__ void round_role(const BackwardParams<C>& params) {
  if (params.rounding.rounded_dq == nullptr) return;
  while (true) {
    SummedSlab slab{0, 0};
    if (threadIdx.x % 32 == 0) slab = take_summed(params);
    slab.begin = __shfl_sync(0xffffffffu, slab.begin, 0);
    slab.rows = uniform(slab.rows);
    if (slab.rows == 0) break;
    __syncwarp();
    using Rows = RowsOfSlab<C, 16>;
    for (u32 row = 0; row < C::kRows; row += Rows::kRowsAtOnce) {
      Rows rows;
      rows.load(params, slab, row);
      rows.round(params, slab, row);
    }
  }
}

// The thread that finds slabs for the query warpgroup, as long as it is to round any: that slows what runs at the same time.
template <typename C>
__device__ __forceinline__ void find_role(const BackwardParams<C>& params, Storage<C>& shared) {
  if (params.rounding.rounded_dq == nullptr) return;
  for (u32 count = 0;; ++count) {
    SummedSlab slab{0, 0};
    if (load_relaxed(params.rounding.progress) < params.rounding.overlapped) slab = take_summed(params);
    mbarrier_wait(&shared.empty_found[slot_of(count)], parity_of(count) ^ 1);
    shared.found[slot_of(count)] = slab;
    mbarrier_arrive(&shared.full_found[slot_of(count)]);
    if (slab.rows == 0) break;
  }
}

// What a warp of the query warpgroup rounds under its other work: a quarter of each slab that is found, a few rows at a time, whose
// sums travel while it waits.
template <typename C>
struct OverlappedRounding {
  using Rows = RowsOfSlab<C, C::kParts == 1 ? 2 : 4>;
  static constexpr u32 kQuarter = C::kRows / 4;
  static constexpr u32 kSlab = 0x10000;
  u32 place = 0;  // one word, as registers are few: the row of the quarter, and kSlab times the slab's number in four

  __device__ __forceinline__ u32 row() const { return threadIdx.x % 128 / 32 * kQuarter + place % kSlab; }
  __device__ __forceinline__ u32 slot() const { return slot_of(place / kSlab); }
  __device__ __forceinline__ u32 parity() const { return parity_of(place / kSlab); }
  __device__ __forceinline__ bool is_slab(const Storage<C>& shared) const {
    return uniform_load(&shared.found[slot()].rows) != 0;
  }

  // Whether there is something to round now.
  __device__ __forceinline__ bool has_rows(Storage<C>& shared) const {
    return uniform(mbarrier_test_wait(&shared.full_found[slot()], parity())) && is_slab(shared);
  }
  __device__ __forceinline__ void load(const BackwardParams<C>& params, const Storage<C>& shared, Rows& rows) const {
    rows.load(params, shared.found[slot()], row());
  }
  __device__ __forceinline__ void round(const BackwardParams<C>& params, Storage<C>& shared, const Rows& rows) {
    rows.round(params, shared.found[slot()], row());
    place += Rows::kRowsAtOnce;
    if (place % kSlab < kQuarter) return;
    __syncwarp();
    if (elect_one()) mbarrier_arrive(&shared.empty_found[slot()]);
    place = (place / kSlab + 1) % 4 * kSlab;
  }

  // The rest, when there is nothing else to do.
  __device__ __forceinline__ void finish(const BackwardParams<C>& params, Storage<C>& shared) {
    if (params.rounding.rounded_dq == nullptr) return;
    while (true) {
      mbarrier_wait(&shared.full_found[slot()], parity());
      if (!is_slab(shared)) break;
      Rows rows;
      load(params, shared, rows);
      round(params, shared, rows);
    }
  }
};

}  // namespace backward

}  // namespace counterpoint
