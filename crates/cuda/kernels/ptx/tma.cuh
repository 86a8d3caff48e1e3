// The Tensor Memory Accelerator (PTX ISA, "cp.async.bulk.tensor"). Coordinates go from the innermost axis outwards.
#pragma once

#include "ptx/mbarrier.cuh"

namespace counterpoint {

// What cuTensorMapEncodeTiled fills; passed to kernels by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};
static_assert(sizeof(TensorMap) == 128, "a tensor map has 128 bytes");

__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Global to shared; completes `barrier` by the box's bytes. What lies outside the tensor arrives as zeros.
__device__ __forceinline__ void tma_load_3d(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1, i32 c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void tma_load_2d(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}

// Global to the second level cache.
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap* map, i32 c0, i32 c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1) : "memory");
}

// Shared to global; what lies outside the tensor is not written.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* shared, i32 c0, i32 c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(c0), "r"(c1)
               : "memory");
}

// Shared added to global, element by element, in the tensor's type.
__device__ __forceinline__ void tma_reduce_add_2d(const TensorMap* map, const void* shared, i32 c0, i32 c1) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(c0), "r"(c1)
               : "memory");
}

__device__ __forceinline__ void tma_reduce_add_3d(const TensorMap* map, const void* shared, i32 c0, i32 c1, i32 c2) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

// Closes the group of this thread's stores so far.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `kPending` groups still read shared memory.
template <u32 kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most `kPending` groups are incomplete: what they wrote can be seen.
template <u32 kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace counterpoint
