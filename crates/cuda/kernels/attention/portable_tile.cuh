// Rows of a matrix in shared memory as the portable kernels keep them, and how a tile's blocks come.
#pragma once

#include "attention/tile_schedule.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"

namespace counterpoint {

// kRows rows of kColumns elements, in pieces of 16 bytes. The place of a piece in its group is exchanged by its row, so that
// the 8 rows that ldmatrix reads at once lie in 8 different groups of banks, and a copy of 128 bytes stays in one line.
template <u32 kRowsOf, u32 kColumnsOf>
struct SharedRows {
  static constexpr u32 kRows = kRowsOf;
  static constexpr u32 kColumns = kColumnsOf;
  static constexpr u32 kPitch = 2 * kColumns;  // bytes
  static constexpr u32 kBytes = kRows * kPitch;
  // Rows of whole 128-byte lines exchange 8 pieces by row; others, of which two fill whole lines, 4 pieces by pair of rows.
  static constexpr u32 kGroup = kColumns % 64 == 0 ? 8 : 4;
  static_assert(kColumns % 32 == 0 && kBytes % 128 == 0, "whole groups, and arrays that keep their alignment");

  static __device__ __forceinline__ u32 exchange(u32 row) { return kGroup == 8 ? row % 8 : row / 2 % 4; }

  // The byte offset of an element.
  static __device__ __forceinline__ u32 offset(u32 row, u32 column) {
    return row * kPitch + 16 * (column / 8 ^ exchange(row)) + column % 8 * 2;
  }

  // The address `rows` rows and `pieces` pieces from `address`: the first a multiple of 8, the second one whose bits are zero in
  // the number of the piece that `address` stands at.
  static __device__ __forceinline__ u32 move(u32 address, u32 rows, u32 pieces) {
    return (address ^ 16 * (pieces % kGroup)) + rows * kPitch + 16 * (pieces / kGroup * kGroup);
  }

  // Offsets that a lane gives to ldmatrix for the matrices at a corner:
  //  - `lane_by_rows`: matrices 0, 1 below each other, 2, 3 to their right. As A, or transposed as two B whose rows run along k.
  //  - `lane_by_columns`: matrices 0, 1 next to each other, 2, 3 below them. As two B whose rows are columns of the product,
  //    or transposed as A.
  static __device__ __forceinline__ u32 lane_by_rows(u32 row, u32 column, u32 lane) {
    return offset(row + lane % 16, column + lane / 16 * 8);
  }
  static __device__ __forceinline__ u32 lane_by_columns(u32 row, u32 column, u32 lane) {
    return offset(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8);
  }

  // Starts the copy of rows [start, start + kRows) of one head of a tensor [.., pitch] by all kThreads threads. Rows from
  // `end` on and columns from `columns` on become zeros.
  template <u32 kThreads>
  static __device__ __forceinline__ void load(u32 shared, const Element* head, u64 pitch, i32 start, i32 end,
                                              u32 columns) {
    constexpr u32 kPieces = kColumns / 8;
    // A thread keeps its column and steps down, by a multiple of 8 rows where it can: then its addresses differ by constants.
    constexpr u32 kAtOnce = kThreads / kPieces;
    constexpr u32 kStep = kAtOnce >= 8 ? kAtOnce / 8 * 8 : kAtOnce >= 4 ? 4 : kAtOnce;
    static_assert(kRows % kStep == 0, "whole steps");
    const u32 row = threadIdx.x / kPieces, column = threadIdx.x % kPieces * 8;
    if (kStep * kPieces < kThreads && row >= kStep) return;
    const Element* const from = head + (u64(u32(start) + row) * pitch + column);
    const i32 left = column < columns ? end - start - i32(row) : 0;
#pragma unroll
    for (u32 i = 0; i < kRows / kStep; ++i) {
      cp_async_16(shared + offset(row + i * kStep, column), from + i * kStep * pitch, i32(i * kStep) < left);
    }
  }
};

// How an operand of a product lies in shared memory: its rows are rows of A or columns of B (and the product runs along
// them), or its rows are the steps of the product.
enum class Lie : u32 { kAlong, kAcross };

// Operand A of products of one warp, whose rows begin at `row`.
template <typename Rows, Lie kLie>
struct OperandA {
  u32 base;
  __device__ __forceinline__ OperandA(u32 shared, u32 row, u32 lane)
      : base(shared + (kLie == Lie::kAlong ? Rows::lane_by_rows(row, 0, lane) : Rows::lane_by_columns(0, row, lane))) {}
  // Row tile `m`, step `kk`, both of 16.
  __device__ __forceinline__ void load(u32 (&a)[4], u32 m, u32 kk) const {
    if constexpr (kLie == Lie::kAlong) {
      ldmatrix_x4(a, Rows::move(base, 16 * m, 2 * kk));
    } else {
      ldmatrix_x4_transposed(a, Rows::move(base, 16 * kk, 2 * m));
    }
  }
};

// Operand B likewise. Its columns, by 16, are dealt to kWarps warps one by one where rows of the operand lie across.
template <typename Rows, Lie kLie, u32 kWarps = 1>
struct OperandB {
  u32 base;
  // `first` is the first column (kAlong), or the number of the warp among them (kAcross).
  __device__ __forceinline__ OperandB(u32 shared, u32 first, u32 lane)
      : base(shared +
             (kLie == Lie::kAlong ? Rows::lane_by_columns(first, 0, lane) : Rows::lane_by_rows(0, 16 * first, lane))) {
    static_assert(kLie == Lie::kAcross || kWarps == 1, "columns in one piece");
  }
  // Two neighbouring fragments: the warp's columns from 16 * n on, step `kk` of 16.
  __device__ __forceinline__ void load(u32 (&b)[4], u32 n, u32 kk) const {
    if constexpr (kLie == Lie::kAlong) {
      ldmatrix_x4(b, Rows::move(base, 16 * n, 2 * kk));
    } else {
      ldmatrix_x4_transposed(b, Rows::move(base, 16 * kk, 2 * kWarps * n));
    }
  }
};

// Where a warp's patch of a product goes as elements; its corner is at a row and column of `Rows`, both multiples of 16.
template <typename Rows>
struct PatchStore {
  u32 base;
  __device__ __forceinline__ PatchStore(u32 shared, u32 row, u32 column, u32 lane)
#if __CUDA_ARCH__ >= 900
      : base(shared + Rows::lane_by_rows(row, column, lane)) {
#else
      : base(shared + Rows::offset(row + lane / 4, column + 2 * (lane % 4))) {
#endif
  }
  // Row tile `m`, columns from 16 * n on: `d` are the accumulators of two neighbouring D.
  __device__ __forceinline__ void store(const float* d, u32 m, u32 n) const {
    const u32 pairs[4] = {pack(d[0], d[1]), pack(d[2], d[3]), pack(d[4], d[5]), pack(d[6], d[7])};
#if __CUDA_ARCH__ >= 900
    store_matrix_x4(Rows::move(base, 16 * m, 2 * n), pairs);
#else
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(Rows::move(base, 16 * m + w % 2 * 8, 2 * n + w / 2)), "r"(pairs[w])
                   : "memory");
    }
#endif
  }
};

// D += A * B over kSteps steps of 16: kRowTiles tiles of 16 rows, kColumns columns. `load_a` fills one step's operand A.
// A is asked for one step ahead, B two fragments ahead: just enough to hide shared memory, with few registers in addition to D.
// `between` is called after each step: what it does runs under the products.
template <u32 kSteps, u32 kRowTiles, u32 kColumns, typename LoadA, typename B, typename Between>
__device__ __forceinline__ void multiply_by(float (&d)[kRowTiles][kColumns / 2], const LoadA& load_a, const B& right,
                                            const Between& between) {
  constexpr u32 kPairs = kColumns / 16, kCount = kSteps * kPairs;
  u32 a[2][kRowTiles][4], b[3][4];
  load_a(a[0], 0);
  right.load(b[0], 0, 0);
  if constexpr (kCount > 1) right.load(b[1], 1 % kPairs, 1 / kPairs);
#pragma unroll
  for (u32 index = 0; index < kCount; ++index) {
    const u32 kk = index / kPairs, n = index % kPairs, ahead = index + 2;
    if (n == 0 && kk + 1 < kSteps) load_a(a[(kk + 1) % 2], kk + 1);
    if (ahead < kCount) right.load(b[ahead % 3], ahead % kPairs, ahead / kPairs);
    const u32(&pair)[4] = b[index % 3];
#pragma unroll
    for (u32 m = 0; m < kRowTiles; ++m) {
      float* to = &d[m][8 * n];
      mma_m16n8k16(to[0], to[1], to[2], to[3], a[kk % 2][m], pair[0], pair[1]);
      mma_m16n8k16(to[4], to[5], to[6], to[7], a[kk % 2][m], pair[2], pair[3]);
    }
    if (n + 1 == kPairs) between(kk);
  }
}

// The same, both operands in shared memory.
template <u32 kSteps, u32 kRowTiles, u32 kColumns, typename A, typename B, typename Between>
__device__ __forceinline__ void multiply(float (&d)[kRowTiles][kColumns / 2], const A& left, const B& right,
                                         const Between& between) {
  multiply_by<kSteps, kRowTiles, kColumns>(
      d,
      [&](u32(&a)[kRowTiles][4], u32 kk) {
#pragma unroll
        for (u32 m = 0; m < kRowTiles; ++m) left.load(a[m], m, kk);
      },
      right, between);
}
template <u32 kSteps, u32 kRowTiles, u32 kColumns, typename A, typename B>
__device__ __forceinline__ void multiply(float (&d)[kRowTiles][kColumns / 2], const A& left, const B& right) {
  multiply<kSteps, kRowTiles, kColumns>(d, left, right, [](u32) {});
}

template <u32 kRowTiles, u32 kCount>
__device__ __forceinline__ void clear(float (&d)[kRowTiles][kCount]) {
#pragma unroll
  for (u32 m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (u32 j = 0; j < kCount; ++j) d[m][j] = 0.0f;
  }
}

// The blocks of a tile's runs, one after another.
struct BlockCursor {
  u32 run;
  u32 last;   // one past the tile's runs
  i32 start;  // of the block
  i32 end;    // of the run
  u32 bound_begin;
  u32 bound_end;

  __device__ __forceinline__ void enter(const TileRun* runs) {
    if (run == last) return;
    const int4 bits = __ldg(reinterpret_cast<const int4*>(runs + run));
    start = bits.x;
    end = bits.y;
    bound_begin = bits.z;
    bound_end = bits.w;
  }
  __device__ __forceinline__ BlockCursor(const TileRun* runs, const Tile& tile)
      : run(tile.run_begin), last(tile.run_end) {
    enter(runs);
  }
  __device__ __forceinline__ bool done() const { return run == last; }
  __device__ __forceinline__ bool bounded() const { return bound_begin != bound_end; }
  __device__ __forceinline__ void advance(i32 block, const TileRun* runs) {
    start += block;
    if (start >= end) {
      ++run;
      enter(runs);
    }
  }
};

}  // namespace counterpoint
