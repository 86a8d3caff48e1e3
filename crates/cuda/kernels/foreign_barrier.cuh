// What a kernel of another library does that waits for its peers, one of NCCL's say: every block holds a multiprocessor until the same block of
// every peer has started.
#pragma once

#include "ptx/flag.cuh"

namespace counterpoint {

struct ForeignBarrierCall {
  u64* started;      // [peer][block]: the last phase that it has come to
  u64* missed;       // [peer]: waits that gave up
  u64 nanoseconds;   // of a wait, at most
  u64 phase;         // from 1
  u32 peer;
  u32 peers;
};

__device__ __forceinline__ void foreign_barrier(const ForeignBarrierCall& call) {
  if (threadIdx.x >= call.peers) return;
  const u64* theirs = call.started + u64(threadIdx.x) * gridDim.x + blockIdx.x;
  if (threadIdx.x == call.peer) store_release_system(const_cast<u64*>(theirs), call.phase);
  const u64 begin = global_nanoseconds();
  while (load_acquire_system(theirs) < call.phase) {
    if (global_nanoseconds() - begin > call.nanoseconds) {
      store_relaxed_system(call.missed + call.peer, call.phase);
      return;
    }
  }
}

}  // namespace counterpoint
