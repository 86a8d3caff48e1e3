// What a user's own kernel is given, and how it signals that a part of its work is done. A translation unit includes this header and
// has one entry point:
//
//   extern "C" __global__ void halve(const __grid_constant__ counterpoint::UserCall call) {
//     for (counterpoint::u32 part = 0; part < call.part_count; ++part) {
//       const float* x = counterpoint::user_tensor<const float>(call, part, 0);
//       float* y = counterpoint::user_tensor<float>(call, part, 1);
//       ... every block computes its part of y ...
//       counterpoint::part_done(call, part);
//     }
//   }
#pragma once

#include "ptx/flag.cuh"

namespace counterpoint {

constexpr u32 kUserParts = 32;
constexpr u32 kUserTensors = 4;

// Shared with the host.
struct UserTensor {
  u64 address;  // a multiple of 16
  u64 elements;
};

// What one part is given: what it reads, then what it writes. Shared with the host.
struct UserPart {
  UserTensor tensors[kUserTensors];
};

// The kernel's parameter. Shared with the host.
struct UserCall {
  UserPart parts[kUserParts];
  u32* counters;  // of each part, or null where nobody waits
  u32 part_count;
  u32 tensor_count;  // of a part
};

template <typename T>
__device__ __forceinline__ T* user_tensor(const UserCall& call, u32 part, u32 tensor) {
  return reinterpret_cast<T*>(call.parts[part].tensors[tensor].address);
}

// Every thread of every block calls it, once it has written its rows of a part. All that the block has written is seen by whoever
// hears of it: its threads synchronise, and one releases for all of them.
__device__ __forceinline__ void part_done(const UserCall& call, u32 part) {
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0 && call.counters != nullptr) {
    add_release(call.counters + part, 1);
  }
}

}  // namespace counterpoint
