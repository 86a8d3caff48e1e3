// A stream's wait for a counter that a kernel of another stream raises while it runs. What is behind it in its stream may read what
// was stored before the counter rose: the thread acquires it, and the end of a kernel comes before the start of the next.
//
// Counters only grow, and each wait keeps on the device how far it has seen its counter rise: a replayed graph needs nothing new.
#pragma once

#include "wait_limit.cuh"

namespace counterpoint {

// One thread. `waited`: what the counter was waited for to reach so far; in this run it rises by `rise` more. So the wait is for
// their sum, which may have wrapped round.
__device__ __forceinline__ void signal_wait(const u32* counter, u32* waited, u32 rise, const WaitLimit& limit) {
  const u32 wanted = *waited + rise;
  u32 seen = 0;
  const auto came = [&] {
    seen = load_acquire(counter);
    if (i32(seen - wanted) >= 0) return true;
    pause_nanoseconds<200>();
    return false;
  };
  wait_until(limit, came, [&] { report_fault(limit, 0, 0, seen, wanted); });
  *waited = wanted;
}

}  // namespace counterpoint
