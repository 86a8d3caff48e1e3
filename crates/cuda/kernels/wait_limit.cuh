// The one way in which a kernel waits for what other CTAs, other kernels or other GPUs do: until it is done, a limit has passed, or
// nobody needs to wait any more.
//
// A wait that reaches its limit leaves a record in the host's memory, and has all waits of its rank end: what would be computed behind it
// is wrong.
#pragma once

#include "ptx/flag.cuh"

namespace counterpoint {

// Left for the host by a wait that gave up. Shared with it.
struct WaitFault {
  u64 set;
  u64 awaited;  // a rank, where ranks are waited for
  u64 step;     // what it was to do (LinkStep)
  u64 seen;
  u64 wanted;
  u64 unused[3];
};

// What ends a wait that nothing else ends. Shared with the host.
struct WaitLimit {
  u64 nanoseconds;
  u64* stop;         // in the host's memory: not 0 once a wait of this rank has given up, or the host has called all of them off
  WaitFault* fault;  // likewise: the record of this wait
};
static_assert(sizeof(WaitFault) == 64, "a record");

// About a microsecond. In this unit a time is one register, and wraps after 73 minutes.
__device__ __forceinline__ u32 wait_clock() { return u32(global_nanoseconds() >> 10); }
__device__ __forceinline__ u32 wait_clocks(const WaitLimit& limit) {
  return u32(min(limit.nanoseconds >> 10, u64(0xffffff00u)));
}

// Looks between two at the clock, and between two at the host's word: some milliseconds. Reads of one word over PCIe follow each other, and
// hundreds of threads may wait.
constexpr u32 kLooks = 64;
constexpr u32 kHostLooks = 4096;

// Leaves the record of a wait that gave up.
__device__ __forceinline__ void report_fault(const WaitLimit& limit, u64 awaited, u64 step, u64 seen, u64 wanted) {
  store_relaxed_system(&limit.fault->awaited, awaited);
  store_relaxed_system(&limit.fault->step, step);
  store_relaxed_system(&limit.fault->seen, seen);
  store_relaxed_system(&limit.fault->wanted, wanted);
  store_release_system(&limit.fault->set, 1);
  store_release_system(limit.stop, 1);
}

// Waits until `came()`. False when it gave up: then `late()` was called, if it was this wait that reached the limit. `ended()`: whether
// to give up for another reason than the host's word.
template <typename Came, typename Late, typename Ended>
__device__ __forceinline__ bool wait_until(const WaitLimit& limit, const Came& came, const Late& late, const Ended& ended) {
  if (came()) return true;
  const u32 began = wait_clock();
  for (u32 look = 1;; ++look) {
    if (came()) return true;
    if (look % kLooks != 0) continue;
    if (wait_clock() - began > wait_clocks(limit)) {
      late();
      return false;
    }
    if (ended() || (look % kHostLooks == 0 && load_relaxed_system(limit.stop) != 0)) return false;
  }
}
template <typename Came, typename Late>
__device__ __forceinline__ bool wait_until(const WaitLimit& limit, const Came& came, const Late& late) {
  return wait_until(limit, came, late, [] { return false; });
}

// Waits until a word that other CTAs of the same launch raise is `wanted`; what they wrote before is read after. They have all started, so
// only a fault gets the wait to its limit.
__device__ __forceinline__ bool await_value(const u32* word, u32 wanted, const WaitLimit& limit) {
  return wait_until(
      limit, [&] { return load_acquire(word) == wanted; },
      [&] { report_fault(limit, 0, 0, load_relaxed(word), wanted); });
}

}  // namespace counterpoint
