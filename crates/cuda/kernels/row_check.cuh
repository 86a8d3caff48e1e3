// Rows whose every element says whose it is and where it lay, and the count of those that are not where they should be: what
// a benchmark of collectives checks itself by.
#pragma once

#include "scalar.cuh"

namespace counterpoint {

constexpr u32 kRowCheckThreads = 256;

// A whole number from 0 to 15, so that sums of a few are exact in every type.
__device__ __forceinline__ float row_value(u32 rank, u32 tensor, u32 row, u32 column) {
  u32 x = row * 0x9e3779b1u + column * 0x85ebca77u + rank * 0xc2b2ae3du + tensor * 0x27d4eb2fu;
  x ^= x >> 15;
  x *= 0x2c1b3c6du;
  x ^= x >> 12;
  return float(x & 15u);
}

// Makes the rows of a rank's tensor.
template <typename T>
__device__ __forceinline__ void row_fill(T* tensor, u64 rows, u32 row_elements, u32 rank, u32 index) {
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    for (u32 c = threadIdx.x; c < row_elements; c += kRowCheckThreads) {
      tensor[row * row_elements + c] = narrow<T>(row_value(rank, index, u32(row), c));
    }
  }
}

// Where a row comes from.
struct RowOrigin {
  u32 rank;  // ~0: from nobody
  u32 row;
};

// Counts elements that are not what their origin gave; in a sum, in addition to what the row of `own_rank` held before.
template <typename T>
__device__ __forceinline__ void row_check(const T* tensor, const RowOrigin* origins, u64 rows, u32 row_elements,
                                          u32 own_rank, u32 index, u32 is_sum, u64* wrong) {
  u64 found = 0;
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const RowOrigin origin = origins[row];
    if (origin.rank == ~0u && !is_sum) continue;
    for (u32 c = threadIdx.x; c < row_elements; c += kRowCheckThreads) {
      float expected = is_sum ? row_value(own_rank, index, u32(row), c) : 0.0f;
      if (origin.rank != ~0u) expected += row_value(origin.rank, index, origin.row, c);
      found += widen(tensor[row * row_elements + c]) != expected;
    }
  }
  if (found != 0) atomicAdd(wrong, found);
}

}  // namespace counterpoint
