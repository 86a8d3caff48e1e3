// Rows that are those of several tensors, piece after piece: what has travelled in groups.
#pragma once

#include "types.cuh"

namespace counterpoint {

constexpr u32 kRowSources = 256;

// Where the tensors begin. Shared with the host.
struct RowSources {
  u64 at[kRowSources];
};

// Rows `begin` to `end` of the whole, which are those from `first` on of a tensor. Shared with the host.
struct RowPiece {
  u32 source;
  u32 first;
  u32 begin;
  u32 end;

  // Where a row of the whole lies, if it is of this piece and rows have so many elements.
  template <typename T>
  __device__ __forceinline__ const T* row(const RowSources& sources, u32 row, u32 columns) const {
    return reinterpret_cast<const T*>(sources.at[source]) + u64(first + row - begin) * columns;
  }
};

}  // namespace counterpoint
