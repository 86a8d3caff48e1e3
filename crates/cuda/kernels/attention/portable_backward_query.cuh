// dq of attention backward by itself, for every GPU from sm_80 on: one CTA owns a tile of query rows and loops over the key blocks
// of its schedule, like the forward. It computes the weights a second time, but adds in one order only: a backward that must
// give the same bits twice takes dk and dv from portable_backward.cuh and dq from here.
#pragma once

#include "attention/portable_mask.cuh"

namespace counterpoint {

template <u32 kHeadDimOf, u32 kHeadDimVOf, u32 kWarpsOf, u32 kBlockOf, bool kSoftcapOf>
struct PortableBackwardQueryConfig {
  static constexpr u32 kHeadDim = kHeadDimOf;
  static constexpr u32 kHeadDimV = kHeadDimVOf;
  static constexpr u32 kWarps = kWarpsOf;
  static constexpr u32 kBlock = kBlockOf;
  static constexpr bool kSoftcap = kSoftcapOf;
  static constexpr u32 kThreads = 32 * kWarps;
  // A warp has 16 rows: two patches of scores and the gradient are all that its registers hold.
  static constexpr u32 kTileRows = 16 * kWarps;
  using Queries = SharedRows<kTileRows, kHeadDim>;
  using Outputs = SharedRows<kTileRows, kHeadDimV>;
  using Keys = SharedRows<kBlock, kHeadDim>;
  using Values = SharedRows<kBlock, kHeadDimV>;
  static constexpr u32 kSharedBytes = Queries::kBytes + Outputs::kBytes + Keys::kBytes + Values::kBytes;
};

// The kernel's parameter. Rows are tokens.
struct PortableBackwardQueryArguments {
  const Tile* tiles;  // of query rows
  const TileRun* runs;
  const TileBound* bounds;
  const Element* q;     // [rows_q, heads_q, head_dim]
  const Element* k;     // [rows_k, heads_kv, head_dim]
  const Element* v;     // [rows_k, heads_kv, head_dim_v]
  const Element* dout;  // [rows_q, heads_q, head_dim_v]
  const float* lse;     // [rows_q, heads_q], natural logarithm
  const float* delta;   // [rows_q, heads_q]
  float* dq;            // [rows_q, heads_q, head_dim]
  u32 add;              // 1: dq goes on from what is there; 0: every element is written
  u32 tile_count;
  u32 heads_q;
  u32 heads_kv;
  u32 head_dim;
  u32 head_dim_v;
  i32 rows_k;
  float scale;
  // What makes a score a power of two: scale * log2(e), or softcap * log2(e).
  float scale_log2;
  float softcap_scale;  // scale / softcap
};

template <typename C>
struct PortableBackwardQuery {
  const PortableBackwardQueryArguments& arguments;
  u8* const shared;
  const u32 warp = threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;
  const u32 queries = shared_address(shared);
  const u32 outputs = queries + C::Queries::kBytes;
  const u32 keys = outputs + C::Outputs::kBytes;
  const u32 values = keys + C::Keys::kBytes;

  Tile tile;
  u32 head;
  u32 key_head;
  float dq[1][C::kHeadDim / 2];
  // Of this thread's two rows what makes scores exponents, and delta.
  float offset[2];
  float delta[2];

  using Patch = float[1][C::kBlock / 2];

  // The token of this thread's row `i`, and the place of its head in q, dq and the statistics.
  __device__ __forceinline__ i32 token(u32 i) const { return tile.start + i32(16 * warp + 8 * i + lane / 4); }
  __device__ __forceinline__ u64 place(u32 i) const { return u64(token(i)) * arguments.heads_q + head; }

  __device__ __forceinline__ void load_rows() {
    C::Queries::template load<C::kThreads>(queries, arguments.q + head * arguments.head_dim,
                                           u64(arguments.heads_q) * arguments.head_dim, tile.start, tile.end,
                                           arguments.head_dim);
    C::Outputs::template load<C::kThreads>(outputs, arguments.dout + head * arguments.head_dim_v,
                                           u64(arguments.heads_q) * arguments.head_dim_v, tile.start, tile.end,
                                           arguments.head_dim_v);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const bool owned = token(i) < tile.end;
      const float lse = owned ? arguments.lse[place(i)] : minus_infinity();
      // A row that saw nothing has no weights.
      offset[i] = lse == minus_infinity() ? minus_infinity() : -lse * kLog2E;
      delta[i] = owned ? arguments.delta[place(i)] : 0.0f;
    }
  }

  __device__ __forceinline__ void load_block(const BlockCursor& cursor) const {
    const i32 end = min(cursor.end, arguments.rows_k);
    C::Keys::template load<C::kThreads>(keys, arguments.k + key_head * arguments.head_dim,
                                        u64(arguments.heads_kv) * arguments.head_dim, cursor.start, end,
                                        arguments.head_dim);
    C::Values::template load<C::kThreads>(values, arguments.v + key_head * arguments.head_dim_v,
                                          u64(arguments.heads_kv) * arguments.head_dim_v, cursor.start, end,
                                          arguments.head_dim_v);
  }

  __device__ __forceinline__ void add_block(const BlockCursor& block) {
    const i32 first = tile.start + i32(16 * warp);
    const Cover seen = cover(arguments.bounds, block, first, min(first + 16, tile.end), block.start,
                             block.start + i32(C::kBlock));
    if (seen == Cover::kNone) return;
    Patch p, ds;
    clear(p);
    clear(ds);
    multiply<C::kHeadDim / 16, 1, C::kBlock>(p, OperandA<typename C::Queries, Lie::kAlong>(queries, 16 * warp, lane),
                                             OperandB<typename C::Keys, Lie::kAlong>(keys, 0, lane));
    multiply<C::kHeadDimV / 16, 1, C::kBlock>(ds, OperandA<typename C::Outputs, Lie::kAlong>(outputs, 16 * warp, lane),
                                              OperandB<typename C::Values, Lie::kAlong>(values, 0, lane));
#pragma unroll
    for (u32 j = 0; j < C::kBlock / 2; ++j) {
      const u32 i = j / 2 % 2;
      float score = p[0][j];
      ds[0][j] -= delta[i];
      if constexpr (C::kSoftcap) {
        // tanh(x) = 1 - 2 / (1 + e^2x): its error is absolute, like the score's.
        const float double_log2 = 2.0f * kLog2E * arguments.softcap_scale;
        score = fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(score * double_log2)), 1.0f);
        ds[0][j] *= 1.0f - score * score;
      }
      p[0][j] = exp2_fast(fmaf(score, arguments.scale_log2, offset[i]));
    }
    if (seen == Cover::kSome) {
      overwrite_masked<1, C::kBlock>(p, 0.0f, arguments.bounds, block, first, block.start, lane);
    }
#pragma unroll
    for (u32 j = 0; j < C::kBlock / 2; ++j) ds[0][j] *= p[0][j];
    multiply_by<C::kBlock / 16, 1, C::kHeadDim>(
        dq,
        [&](u32(&a)[1][4], u32 kk) {
#pragma unroll
          for (u32 w = 0; w < 4; ++w) a[0][w] = pack(ds[0][8 * kk + 2 * w], ds[0][8 * kk + 2 * w + 1]);
        },
        OperandB<typename C::Keys, Lie::kAcross>(keys, 0, lane), [](u32) {});
  }

  __device__ __forceinline__ void write_gradient() const {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      if (token(i) >= tile.end) continue;
      float* const to = arguments.dq + (place(i) * arguments.head_dim + 2 * (lane % 4));
#pragma unroll
      for (u32 n = 0; n < C::kHeadDim / 8; ++n) {
        if (8 * n >= arguments.head_dim) break;
        float2 pair = make_float2(arguments.scale * dq[0][4 * n + 2 * i], arguments.scale * dq[0][4 * n + 2 * i + 1]);
        float2* const at = reinterpret_cast<float2*>(to + 8 * n);
        if (arguments.add != 0) {
          const float2 before = *at;
          pair = make_float2(before.x + pair.x, before.y + pair.y);
        }
        *at = pair;
      }
    }
  }

  __device__ __forceinline__ void mainloop() {
    BlockCursor cursor(arguments.runs, tile);
    if (cursor.done() && arguments.add != 0) return;
    load_rows();
    clear(dq);
    while (!cursor.done()) {
      load_block(cursor);
      cp_async_commit();
      const BlockCursor block = cursor;
      cursor.advance(i32(C::kBlock), arguments.runs);
      cp_async_wait<0>();
      __syncthreads();
      add_block(block);
      __syncthreads();
    }
    write_gradient();
  }

  // Items are (tile, head), in the order of the portable forward's.
  __device__ __forceinline__ void run() {
    const u32 items = arguments.tile_count * arguments.heads_q;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
      tile = arguments.tiles[item / arguments.heads_q];
      head = item % arguments.heads_q;
      key_head = head / (arguments.heads_q / arguments.heads_kv);
      mainloop();
      cp_async_wait<0>();
      __syncthreads();
    }
  }
};

template <typename C>
__device__ __forceinline__ void portable_backward_query(const PortableBackwardQueryArguments& arguments) {
  extern __shared__ uint4 portable_backward_query_shared[];
  PortableBackwardQuery<C> kernel{arguments, reinterpret_cast<u8*>(portable_backward_query_shared)};
  kernel.run();
}

}  // namespace counterpoint
