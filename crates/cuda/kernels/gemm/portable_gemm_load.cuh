// The portable matrix product's operands on their way to shared memory, block after block of k and tile after tile.
#pragma once

#include "gemm/portable_gemm_config.cuh"
#include "ptx/cp_async_bytes.cuh"

namespace counterpoint {

// What one thread copies of an operand's blocks: one column of pieces of 16 bytes, some rows apart.
template <typename Rows, Lie kLie, u32 kThreads>
struct PortableOperand {
  static constexpr u32 kPieces = Rows::kColumns / 8;
  static constexpr u32 kStep = kThreads / kPieces / 8 * 8;
  static_assert(kStep >= 8, "places differ by constants: rows exchange their pieces in groups of 8");
  static constexpr u32 kCopies = Rows::kRows / kStep;
  static_assert(kStep * kPieces == kThreads && Rows::kRows % kStep == 0, "all threads copy the same number of pieces");

  const Element* from;  // this thread's first piece of the next block
  u32 place;            // of that piece in the first stage
  i32 left;             // rows of the tile from this thread's first on, where rows are the tile's; columns where columns are

  static __device__ __forceinline__ u32 row() { return threadIdx.x / kPieces; }
  static __device__ __forceinline__ u32 column() { return threadIdx.x % kPieces * 8; }

  __device__ __forceinline__ void begin(u32 shared) {
    place = shared + Rows::offset(row(), column());
    // Kept: what it is made of would be made anew for every block.
    asm volatile("" : "+r"(place));
  }
  // `corner` is the first element of the tile's first block, `extent` how many rows or columns the tile has.
  __device__ __forceinline__ void begin_tile(const Element* corner, u32 stride, i32 extent) {
    move_to(corner, stride);
    left = extent - i32(kLie == Lie::kAlong ? row() : column());
  }
  __device__ __forceinline__ void move_to(const Element* corner, u32 stride) {
    from = corner + (u64(row()) * stride + column());
  }
  // Starts copy number `i` of a block that is there as a whole.
  __device__ __forceinline__ void copy(u32 i, u32 stage_bytes, u32 stride) const {
    cp_async_all(place + stage_bytes + i * kStep * Rows::kPitch, from + u64(i * kStep) * stride);
  }
  // All copies of a block that has only so much of k, or of a tile at an edge: the rest are zeros.
  __device__ __forceinline__ void copy_some(u32 stage_bytes, u32 stride, i32 k_left) const {
    const i32 elements = kLie == Lie::kAlong ? k_left - i32(column()) : left;
    const i32 rows = kLie == Lie::kAlong ? left : k_left - i32(row());
    const u32 bytes = u32(min(max(elements, 0), 8)) * u32(sizeof(Element));
    // A loop stays a branch, where straight code would be fetched with every whole block too.
#pragma unroll 1
    for (u32 i = 0; i < kCopies; ++i) {
      cp_async_some(place + stage_bytes + i * kStep * Rows::kPitch, from + u64(i * kStep) * stride,
                    i32(i * kStep) < rows ? bytes : 0);
    }
  }
  // The next block of the same tile.
  __device__ __forceinline__ void advance(u32 stride) {
    from += kLie == Lie::kAlong ? u64(Rows::kColumns) : u64(Rows::kRows) * stride;
  }
};

// The blocks of all of a CTA's tiles, one after the other: the first ones of a tile are on their way while the one before is stored.
// A block is begun, copied in parts, between which there can be products, and ended.
template <typename C>
struct PortableGemmLoads {
  const PortableGemmArguments& arguments;
  PortableOperand<typename C::RowsA, C::kLieA, C::kThreads> a;
  PortableOperand<typename C::RowsB, C::kLieB, C::kThreads> b;
  u32 tile;        // of the next block
  i32 k_left;      // of it and those behind it
  i32 whole;       // blocks with less of k are not whole; of a tile at an edge none are
  u32 source_row;  // of its tile, where A lies along m
  bool in_parts;   // whether the parts are all of the next block: else it was copied when it was begun, or there is none

  __device__ __forceinline__ void begin(u32 shared) {
    a.begin(shared);
    b.begin(shared + C::RowsA::kBytes);
    tile = blockIdx.x;
    begin_tile();
  }
  __device__ __forceinline__ void begin_tile() {
    const GemmTile* of = arguments.tiles + tile;
    const uint4 rows = __ldg(reinterpret_cast<const uint4*>(of));
    const u32 first_column = __ldg(&of->column);
    const i32 columns = i32(arguments.n - first_column);
    k_left = i32(arguments.k);
    whole = rows.w == C::kTileM && columns >= i32(C::kTileN) ? i32(C::kBlock) : 0x7fffffff;
    const u64 a_row = rows.x, column = first_column;
    if constexpr (C::kLieA == Lie::kAlong) {
      a.begin_tile(arguments.a[rows.z & 0xffffu] + a_row * arguments.a_stride, arguments.a_stride, i32(rows.w));
    } else {
      source_row = rows.x;
      a.begin_tile(arguments.a[0] + a_row, arguments.a_stride, i32(rows.w));
      find_k_source();
    }
    b.begin_tile(arguments.b + (C::kLieB == Lie::kAlong ? column * arguments.b_stride : column), arguments.b_stride, columns);
  }
  // Where A's rows, which k goes along, lie in pieces, each kGemmBlockK of them have a place of their own.
  __device__ __forceinline__ void find_k_source() {
    if (arguments.k_sources == nullptr) return;
    const u32 done = arguments.k - u32(k_left);
    if (done % kGemmBlockK != 0) return;
    const uint2 source = __ldg(reinterpret_cast<const uint2*>(arguments.k_sources) + done / kGemmBlockK);
    a.move_to(arguments.a[source.x] + (u64(source.y) * arguments.a_stride + source_row), arguments.a_stride);
  }
  __device__ __forceinline__ void begin_block(u32 stage_bytes) {
    in_parts = tile < arguments.tile_count && k_left >= whole;
    if (in_parts || tile >= arguments.tile_count) return;
    a.copy_some(stage_bytes, arguments.a_stride, k_left);
    b.copy_some(stage_bytes, arguments.b_stride, k_left);
  }
  // Part `part` of so many.
  __device__ __forceinline__ void copy_part(u32 part, u32 parts, u32 stage_bytes) const {
    constexpr u32 kOfA = decltype(a)::kCopies, kAll = kOfA + decltype(b)::kCopies;
    if (!in_parts) return;
#pragma unroll
    for (u32 i = 0; i < kAll; ++i) {
      if (i * parts / kAll != part) continue;
      if (i < kOfA) {
        a.copy(i, stage_bytes, arguments.a_stride);
      } else {
        b.copy(i - kOfA, stage_bytes, arguments.b_stride);
      }
    }
  }
  // Closes the block's group, if there was a block or not.
  __device__ __forceinline__ void end_block() {
    cp_async_commit();
    if (tile >= arguments.tile_count) return;
    k_left -= i32(C::kBlock);
    if (k_left > 0) {
      a.advance(arguments.a_stride);
      b.advance(arguments.b_stride);
      if constexpr (C::kLieA == Lie::kAcross) find_k_source();
    } else {
      tile += gridDim.x;
      if (tile < arguments.tile_count) begin_tile();
    }
  }
  // All of the next block.
  __device__ __forceinline__ void copy(u32 stage_bytes) {
    begin_block(stage_bytes);
    copy_part(0, 1, stage_bytes);
    end_block();
  }
};

}  // namespace counterpoint
