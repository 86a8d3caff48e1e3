// Shapes of the portable attention forward, and the parameter of its kernel.
#pragma once

#include "attention/portable_mask.cuh"

namespace counterpoint {

template <u32 kHeadDimOf, u32 kHeadDimVOf, u32 kWarpRowsOf, u32 kWarpsOf, u32 kBlockOf, u32 kHeldColumnsOf,
          bool kSoftcapOf, bool kAlignedOf, bool kMaxLogitsOf>
struct PortableForwardConfig {
  static constexpr u32 kHeadDim = kHeadDimOf;
  static constexpr u32 kHeadDimV = kHeadDimVOf;
  static constexpr u32 kWarpRows = kWarpRowsOf;
  static constexpr u32 kWarps = kWarpsOf;
  static constexpr u32 kBlock = kBlockOf;
  // 0, or kHeadDim: columns of its queries that a warp keeps in registers instead of reading them for every block.
  static constexpr u32 kHeldColumns = kHeldColumnsOf;
  static constexpr bool kSoftcap = kSoftcapOf;
  // Blocks begin at multiples of their size.
  static constexpr bool kAligned = kAlignedOf;
  // Whether the largest scores are wanted.
  static constexpr bool kMaxLogits = kMaxLogitsOf;
  static constexpr u32 kThreads = 32 * kWarps;
  static constexpr u32 kTileRows = kWarpRows * kWarps;
  static constexpr u32 kRowTiles = kWarpRows / 16;
  using Queries = SharedRows<kTileRows, kHeadDim>;
  using Keys = SharedRows<kBlock, kHeadDim>;
  using Values = SharedRows<kBlock, kHeadDimV>;
  // Results leave through the queries' rows.
  using Results = SharedRows<kTileRows, kHeadDimV>;
  static_assert(kHeadDimV <= kHeadDim && kWarpRows % 16 == 0 && kBlock % 16 == 0, "shapes of mma");
  static_assert(kHeldColumns == 0 || kHeldColumns == kHeadDim, "whole rows");
  static constexpr u32 kSharedBytes = Queries::kBytes + Keys::kBytes + Values::kBytes;
};

// The kernel's parameter. Rows are tokens.
struct PortableForwardArguments {
  const Tile* tiles;
  const TileRun* runs;
  const TileBound* bounds;
  const Element* q;    // [rows_q, heads_q, head_dim]
  const Element* k;    // [rows_k, heads_kv, head_dim]
  const Element* v;    // [rows_k, heads_kv, head_dim_v]
  const float* sink;   // [seqlen_sink, heads_q], or null
  Element* out;        // [rows_q, heads_q, head_dim_v]
  float* lse;          // [rows_q, heads_q]
  // The state that is continued, or null; and the one that is left, or null when out and lse are. They may be the same.
  const float* begin_acc;      // [rows_q, heads_q, head_dim_v], not divided by the sum
  const float* begin_row_max;  // [rows_q, heads_q], base 2
  const float* begin_row_sum;  // [rows_q, heads_q]
  float* acc;
  float* row_max;
  float* row_sum;
  float* partial_out;  // [slots, tile rows, heads_q, head_dim_v]
  float* partial_lse;  // [slots, tile rows, heads_q]
  float* max_logits;   // [heads_q], of natural logarithms
  u32 tile_count;
  u32 heads_q;
  u32 heads_kv;
  u32 head_dim;
  u32 head_dim_v;
  u32 seqlen_sink;
  i32 rows_k;
  // What makes a score a power of two: scale * log2(e), or softcap * log2(e). Above zero.
  float scale_log2;
  float softcap_scale;  // scale / softcap
  u32 negate;           // 1: the scale is below zero; scale_log2 and softcap_scale are of its opposite
};

}  // namespace counterpoint
