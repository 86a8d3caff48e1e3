// The device-side barrier of ranks on GPUs that reach each other's memory: kernels wait for each other without the host.
//
// Every rank has a mailbox with a slot for each rank, which only that rank writes. A call of a collective has two sides: a
// rank *announces* where its tensors are to those that work on them, and once they have announced theirs it *works* on the
// others'. Pulling, a rank announces what it sends and works on what it receives; pushing, the other way round. When all its
// blocks are through it notifies those it has worked on, and its kernel ends once all that it announced to have notified it. So a
// kernel's inputs may be overwritten, and its outputs be read, by what is enqueued behind it.
//
// Counters only grow (a call's number), so nothing is reset while another rank may look, and a replayed graph needs nothing
// new. The call's number is the rank's own: all ranks make the same calls.
//
// What a barrier takes is flights of flags (0.7 us) and fences for all GPUs (as long, and longer behind stores that are on their
// way to one). So an address carries its call's number and needs no fence and no flag that follows it; every block sees by itself
// that it has passed; and nobody fences what needs no fence: what earlier kernels of a stream wrote into this GPU's memory is there for
// all, and so are pieces that have been read. Who writes into another GPU's memory makes the fence itself, behind its last store.
#pragma once

#include "ptx/barrier.cuh"
#include "wait_limit.cuh"

namespace counterpoint {

constexpr u32 kLinkRanks = 16;
constexpr u32 kLinkTensors = 13;
constexpr u32 kLinkParts = 8;

// The flags that one rank sets for another.
struct LinkSlot {
  u64 announced;              // the call that it has begun, by kernels that announce no tensors
  u64 passed;                 // grows with each call in which it was through with what was announced to it (kLinkPasses)
  u64 delivered;              // parts of its rows that are there; who takes them as they come leaves 0
  u64 tensors[kLinkTensors];  // where its tensors are in the call that it has begun (link_place)
};

// An address that is a multiple of 16, divided by that, and below it the last bits of the call's number. Who announces a call has
// been notified of the one before that the other has passed it, so an older flag is of the call before and of none as long ago.
constexpr u32 kLinkStampBits = 16;
__device__ __forceinline__ u64 link_place(u64 address, u64 number) {
  return address >> 4 << kLinkStampBits | (number & ((1 << kLinkStampBits) - 1));
}
__device__ __forceinline__ u64 link_address(u64 place) { return place >> kLinkStampBits << 4; }
// The last call up to `number` that a place may be of.
__device__ __forceinline__ u64 link_call_of(u64 place, u64 number) {
  return number - ((number - place) & ((1 << kLinkStampBits) - 1));
}

// What is added to `passed` in a call, by all blocks of the launch that ends it together, however many these are.
constexpr u64 kLinkPasses = 1 << 10;

// What a rank keeps of one collective from call to call.
struct LinkState {
  u64 calls;    // that have ended
  u32 arrived;  // blocks that are through
  u32 faults;   // waits that have given up
  u64 taken;    // entries of a list that blocks have taken in this call, where the list is dealt out as they go
  u32 parts[kLinkParts];  // blocks that are through with each part
};

// What ranks wait for in each other: to begin a call, to be through with it, to send a piece of its rows
// or a part of them.
enum LinkStep : u32 { kLinkBegin = 0, kLinkPass = 1, kLinkSend = 2, kLinkDeliver = 3 };

// What of a call one launch does: all of it, or one after the other its begin by one block, its work, and its end by one block.
enum LinkPhases : u32 { kLinkWorks = 0, kLinkBegins = 1, kLinkEnds = 2, kLinkWhole = 3 };

// One call of one rank.
struct LinkCall {
  LinkSlot* slots[kLinkRanks];  // this rank's slot in the mailbox of every rank
  u64 announced[kLinkTensors];  // the tensors that others work on
  u64 own[kLinkTensors];        // those on this side of what it works on
  // What is added to an announced address for each rank, [rank][tensor], where ranks are processes, each of which reaches the
  // tensors by addresses of its own; null where they share one address space.
  const u64* shifts;
  const LinkSlot* mailbox;
  LinkState* state;
  WaitLimit limit;
  u32 tensors;
  u32 announce_to;  // ranks, a bit each
  u32 work_on;
};
static_assert(sizeof(LinkSlot) == 128 && sizeof(LinkState) == 56, "layouts shared with the host");

// Rows that others send while a kernel runs which takes them as they come. That it waits for them is safe: the kernels that send
// them are on other GPUs, and this rank's, without which nobody sends to it, has begun.
struct LinkArrivals {
  LinkSlot* mailbox;  // null: all rows are there
  LinkState* state;   // this and the next as in LinkCall
  WaitLimit limit;
  u32 senders;  // ranks, a bit each
  u32 parts;
  i32 ends[kLinkParts];  // the row at which each part ends
};

// Waits until what `look` gives has come to `wanted`; false when it gave up. `Call` is LinkCall or LinkArrivals.
template <typename Call, typename Look>
__device__ __forceinline__ bool link_wait_until(const Call& call, const Look& look_at, u64 wanted, u32 rank, LinkStep step) {
  u64 seen = 0;
  const auto came = [&] { return (seen = look_at()) >= wanted; };
  const auto late = [&] {
    if (atomicAdd(&call.state->faults, 1u) == 0) report_fault(call.limit, rank, step, seen, wanted);
  };
  // Once a wait has given up, those at the same time and launches behind it must not each wait as long again.
  const auto ended = [&] { return *reinterpret_cast<volatile u32*>(&call.state->faults) != 0; };
  return wait_until(call.limit, came, late, ended);
}

// The same for a flag of another rank's; what was written before it, is read after.
template <typename Call>
__device__ __forceinline__ bool link_wait(const Call& call, const u64* flag, u64 wanted, u32 rank, LinkStep step) {
  return link_wait_until(call, [&] { return load_acquire_system(flag); }, wanted, rank, step);
}

// The first warp of every block, before anything else: announces to those that work on them where this rank's tensors are. Gives the
// call's number. What this kernel itself has written there is fenced before.
__device__ __forceinline__ u64 link_announce(const LinkCall& call) {
  const u32 lane = threadIdx.x % 32;
  const u64 number = call.state->calls + 1;
  if (blockIdx.x == 0 && (call.announce_to >> lane & 1) != 0) {
    LinkSlot* slot = call.slots[lane];
    for (u32 t = 0; t < call.tensors; ++t) {
      const u64 shift = call.shifts == nullptr ? 0 : call.shifts[lane * kLinkTensors + t];
      store_relaxed_system(&slot->tensors[t], link_place(call.announced[t] + shift, number));
    }
  }
  return number;
}

// The first warp of every block, before it works on what others announce: waits for them, and copies where their tensors are to
// `tensors` in shared memory, [rank][tensor]. False when a wait gave up: the block must leave then.
__device__ __forceinline__ bool link_await(const LinkCall& call, u64 number, u64* tensors) {
  const u32 lane = threadIdx.x % 32;
  bool came = true;
  if ((call.work_on >> lane & 1) != 0) {
    const LinkSlot* slot = call.mailbox + lane;
    for (u32 t = 0; t < call.tensors && came; ++t) {
      u64 place = 0;
      const auto look = [&] { return link_call_of(place = load_acquire_system(&slot->tensors[t]), number); };
      came = link_wait_until(call, look, number, lane, kLinkBegin);
      tensors[lane * kLinkTensors + t] = link_address(place);
    }
  }
  // What the others wrote in the ordinary way before they announced is read by TMA.
  fence_async_proxy_global();
  return __all_sync(0xffffffffu, came);
}

// Both, one after the other: the call's number, or 0 when a wait gave up.
__device__ __forceinline__ u64 link_begin(const LinkCall& call, u64* tensors) {
  const u64 number = link_announce(call);
  return link_await(call, number, tensors) ? number : 0;
}

// What `link_begin` gave in an earlier launch of the same call.
__device__ __forceinline__ u64 link_resume(const LinkCall& call, u64* tensors) {
  const u32 lane = threadIdx.x % 32;
  if ((call.work_on >> lane & 1) != 0) {
    for (u32 t = 0; t < call.tensors; ++t) {
      tensors[lane * kLinkTensors + t] = link_address(load_relaxed_system(&call.mailbox[lane].tensors[t]));
    }
  }
  const bool given_up = *reinterpret_cast<volatile u32*>(&call.state->faults) != 0;
  return given_up ? 0 : call.state->calls + 1;
}

// The first warp of every block, after all that its threads load has arrived. Where they have written into a peer's memory, each lane
// has made a fence for all GPUs behind it: that a bulk store is complete says no more than that it has left.
__device__ __forceinline__ void link_end(const LinkCall& call, u64 number) {
  const u32 lane = threadIdx.x % 32;
  if ((call.work_on >> lane & 1) != 0) {
    add_relaxed_system(&call.slots[lane]->passed, blockIdx.x == 0 ? kLinkPasses - (gridDim.x - 1) : 1);
  }
  u32 before = 0;
  if (lane == 0) before = add_acquire_release(&call.state->arrived, 1);
  before = __shfl_sync(0xffffffffu, before, 0);
  if (before + 1 != gridDim.x) return;
  bool passed = true;
  if ((call.announce_to >> lane & 1) != 0) {
    const u64* flag = &call.mailbox[lane].passed;
    passed = link_wait_until(call, [&] { return load_acquire_system(flag) / kLinkPasses; }, number, lane, kLinkPass);
  }
  passed = __all_sync(0xffffffffu, passed);
  if (lane == 0) {
    call.state->arrived = 0;
    call.state->taken = 0;
    if (passed) call.state->calls = number;
  }
}

// One thread of every block, once its stores of a part's rows are complete. The last one notifies those to whom they went.
__device__ __forceinline__ void link_deliver(const LinkCall& call, u32 part) {
  fence_async_proxy_all();
  fence_system();
  if (add_acquire_release(&call.state->parts[part], 1) + 1 != gridDim.x) return;
  call.state->parts[part] = 0;
  for (u32 ranks = call.work_on; ranks != 0; ranks &= ranks - 1) {
    store_release_system(&call.slots[__ffs(i32(ranks)) - 1]->delivered, part + 1);
  }
}

// Whether all rows are there. Says nothing of other memory.
__device__ __forceinline__ bool link_all_delivered(const LinkArrivals& arrivals) {
  bool all = true;
  for (u32 ranks = arrivals.senders; ranks != 0; ranks &= ranks - 1) {
    all = all && load_relaxed_system(&arrivals.mailbox[__ffs(i32(ranks)) - 1].delivered) >= arrivals.parts;
  }
  return all;
}

// Waits until a part's rows are there. What TMA reads of them for this thread after, it finds.
__device__ __forceinline__ void link_await_part(const LinkArrivals& arrivals, u32 part) {
  for (u32 ranks = arrivals.senders; ranks != 0; ranks &= ranks - 1) {
    const u32 rank = __ffs(i32(ranks)) - 1;
    // What is read when the wait gives up, nobody looks at.
    link_wait(arrivals, &arrivals.mailbox[rank].delivered, part + 1, rank, kLinkDeliver);
  }
  fence_async_proxy_all();
}

// One thread of the kernel that took the rows, at its end. Nobody sends again before this rank's next call.
__device__ __forceinline__ void link_take_back(const LinkArrivals& arrivals) {
  for (u32 ranks = arrivals.senders; ranks != 0; ranks &= ranks - 1) {
    store_relaxed_system(&arrivals.mailbox[__ffs(i32(ranks)) - 1].delivered, 0);
  }
}

}  // namespace counterpoint
