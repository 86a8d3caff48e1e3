// A stream's wait for a counter that a kernel of another stream raises while it runs. What is behind it in its stream may read what
// was stored before the counter rose: the thread acquires it, and the end of a kernel comes before the start of the next.
//
// Counters only grow, and each wait keeps on the device how far it has seen its counter rise: a replayed graph needs nothing new.
#pragma once

#include "ptx/flag.cuh"

namespace counterpoint {

// Told to the host, in its memory, once a wait has given up. Shared with it.
struct SignalFault {
  u64 set;
  u64 seen;
  u64 wanted;
};

// One thread. `waited`: what the counter was waited for to reach so far; in this run it rises by `rise` more. So the wait is for
// their sum, which may have wrapped round. `limit` in nanoseconds.
__device__ __forceinline__ void signal_wait(const u32* counter, u32* waited, u32 rise, u64 limit, SignalFault* fault) {
  const u32 wanted = *waited + rise;
  u32 seen = load_acquire(counter);
  const u64 began = global_nanoseconds();
  while (i32(seen - wanted) < 0) {
    if (global_nanoseconds() - began > limit) {
      store_relaxed_system(&fault->seen, seen);
      store_relaxed_system(&fault->wanted, wanted);
      store_release_system(&fault->set, 1);
      break;
    }
    pause_nanoseconds<200>();
    seen = load_acquire(counter);
  }
  *waited = wanted;
}

}  // namespace counterpoint
