// Shapes of the portable matrix product, and the parameter of its kernel.
#pragma once

#include "attention/portable_tile.cuh"
#include "gemm/gemm_work.cuh"

namespace counterpoint {

// What a kernel is compiled for: columns of a tile, warps down and across that compute it, how much of k a block has, how many blocks are in
// shared memory, and whether operands lie with k down their rows.
template <u32 kTileNOf, u32 kWarpsMOf, u32 kWarpsNOf, u32 kBlockOf, u32 kStagesOf, Lie kLieAOf, Lie kLieBOf>
struct PortableGemmConfig {
  static constexpr u32 kTileM = kGemmTileM;
  static constexpr u32 kTileN = kTileNOf;
  static constexpr u32 kWarpsN = kWarpsNOf;
  static constexpr u32 kBlock = kBlockOf;
  static constexpr u32 kStages = kStagesOf;
  static constexpr Lie kLieA = kLieAOf;
  static constexpr Lie kLieB = kLieBOf;
  static constexpr u32 kThreads = 32 * kWarpsMOf * kWarpsN;
  static constexpr u32 kWarpM = kTileM / kWarpsMOf;
  static constexpr u32 kWarpN = kTileN / kWarpsN;
  static constexpr u32 kSteps = kBlock / 16;
  static constexpr u32 kRowTiles = kWarpM / 16;
  static constexpr u32 kPairs = kWarpN / 16;
  using RowsA = SharedRows<kLieA == Lie::kAlong ? kTileM : kBlock, kLieA == Lie::kAlong ? kBlock : kTileM>;
  using RowsB = SharedRows<kLieB == Lie::kAlong ? kTileN : kBlock, kLieB == Lie::kAlong ? kBlock : kTileN>;
  static constexpr u32 kStageBytes = RowsA::kBytes + RowsB::kBytes;
  static constexpr u32 kSharedBytes = kStages * kStageBytes;
  static_assert(kWarpN % 32 == 0 && kWarpM % 16 == 0, "a quad stores 32 columns of a row");
  static_assert(kGemmBlockK % kBlock == 0, "blocks lie within those of k_sources");
  static_assert(kStages >= 2, "one block is copied while another one is multiplied");
};

// The kernel's parameter. Shared with the host.
struct PortableGemmArguments {
  const Element* a[kGemmSources];   // [its rows, a_stride]
  const Element* b;                 // [n, b_stride], or [k, b_stride]
  u64 d[kGemmDestinations];         // [its rows, d_stride] each
  u64 counters[kGemmDestinations];  // of groups, u32 each, where the destination's owner has them; 0 for none
  const GemmTile* tiles;            // in the order in which they are begun; all have elements
  const GemmKSource* k_sources;     // of every kGemmBlockK rows of k, or null where A is one tensor from its first row on
  const Element* bias;              // [n], or null
  u32 tile_count;
  u32 n;
  u32 k;
  u32 a_stride;  // elements from one row to the next
  u32 b_stride;
  u32 d_stride;
  u32 wide;  // whether the result is f32
  u32 adds;  // whether it is added to what is there
  u32 counters_of_peers;
};

}  // namespace counterpoint
