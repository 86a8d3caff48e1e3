// Attention backward for every GPU from sm_80 on: one CTA owns a tile of key rows of one key head, loops over the query blocks
// of its schedule for every query head that reads them, and keeps dk and dv in registers.
//
// Per block: p = exp(s - lse) and ds = p (dp - delta) are computed by warps that own patches of [queries x keys] and pass
// through shared memory, once, to the warps that own patches of dv += p^T dout, dk += ds^T q and dq = ds k. dq is
// added to an f32 accumulator in global memory (FlashAttention 2's division, https://arxiv.org/abs/2307.08691).
#pragma once

#include "attention/portable_mask.cuh"
#include "ptx/reduce.cuh"

namespace counterpoint {

// How a CTA's warps divide a matrix: kDown along rows, kAcross along columns.
template <u32 kDownOf, u32 kAcrossOf>
struct WarpGrid {
  static constexpr u32 kDown = kDownOf;
  static constexpr u32 kAcross = kAcrossOf;
  static __device__ __forceinline__ u32 down(u32 warp) { return warp % kDown; }
  static __device__ __forceinline__ u32 across(u32 warp) { return warp / kDown; }
};

// ScoreWarps divide [queries x keys], KeyWarps [keys x head_dim], QueryWarps [queries x head_dim].
template <u32 kHeadDimOf, u32 kHeadDimVOf, u32 kTileRowsOf, u32 kBlockOf, u32 kStagesOf, typename ScoreWarpsOf,
          typename KeyWarpsOf, typename QueryWarpsOf, bool kSoftcapOf>
struct PortableBackwardConfig {
  static constexpr u32 kHeadDim = kHeadDimOf;
  static constexpr u32 kHeadDimV = kHeadDimVOf;
  static constexpr u32 kTileRows = kTileRowsOf;  // keys
  static constexpr u32 kBlock = kBlockOf;        // queries
  static constexpr u32 kStages = kStagesOf;
  using ScoreWarps = ScoreWarpsOf;
  using KeyWarps = KeyWarpsOf;
  using QueryWarps = QueryWarpsOf;
  static constexpr bool kSoftcap = kSoftcapOf;
  static constexpr u32 kWarps = ScoreWarps::kDown * ScoreWarps::kAcross;
  static constexpr u32 kThreads = 32 * kWarps;
  // A warp's patches.
  static constexpr u32 kScoreRows = kBlock / ScoreWarps::kDown;
  static constexpr u32 kScoreColumns = kTileRows / ScoreWarps::kAcross;
  static constexpr u32 kKeyPatchRows = kTileRows / KeyWarps::kDown;
  static constexpr u32 kKeyPatchColumns = kHeadDim / KeyWarps::kAcross;
  static constexpr u32 kValuePatchColumns = kHeadDimV / KeyWarps::kAcross;
  static constexpr u32 kQueryPatchRows = kBlock / QueryWarps::kDown;
  static constexpr u32 kQueryPatchColumns = kHeadDim / QueryWarps::kAcross;
  using Keys = SharedRows<kTileRows, kHeadDim>;
  using Values = SharedRows<kTileRows, kHeadDimV>;
  using Queries = SharedRows<kBlock, kHeadDim>;
  using Outputs = SharedRows<kBlock, kHeadDimV>;
  using Scores = SharedRows<kBlock, kTileRows>;
  static constexpr u32 kStageBytes = Queries::kBytes + Outputs::kBytes + 8 * kBlock;
  static constexpr u32 kSharedBytes = Keys::kBytes + Values::kBytes + 2 * Scores::kBytes + kStages * kStageBytes;
  static_assert(KeyWarps::kDown * KeyWarps::kAcross == kWarps && QueryWarps::kDown * QueryWarps::kAcross == kWarps,
                "every warp has a patch of each matrix");
  static_assert(kScoreRows % 16 == 0 && kScoreColumns % 16 == 0 && kKeyPatchRows % 16 == 0 &&
                    kKeyPatchColumns % 16 == 0 && kValuePatchColumns % 16 == 0 && kQueryPatchRows % 16 == 0 &&
                    kQueryPatchColumns % 16 == 0,
                "shapes of mma");
  static_assert(2 * kBlock <= kThreads, "a thread a statistic");
};

// The kernel's parameter. Rows are tokens.
struct PortableBackwardArguments {
  const Tile* tiles;  // of key rows
  const TileRun* runs;
  const TileBound* bounds;
  const Element* q;     // [rows_q, heads_q, head_dim]
  const Element* k;     // [rows_k, heads_kv, head_dim]
  const Element* v;     // [rows_k, heads_kv, head_dim_v]
  const Element* dout;  // [rows_q, heads_q, head_dim_v]
  const float* lse;     // [rows_q, heads_q], natural logarithm
  const float* delta;   // [rows_q, heads_q]
  float* dq;            // [rows_q, heads_q, head_dim], added to; null when another pass computes it
  void* dk;             // [rows_k, heads_kv, head_dim]
  void* dv;             // [rows_k, heads_kv, head_dim_v]
  u32 float_gradients;  // 1: dk and dv are f32, because stages or ranks will be summed; 0: elements
  u32 tile_count;
  u32 heads_q;
  u32 heads_kv;
  u32 head_dim;
  u32 head_dim_v;
  i32 rows_q;
  float scale;
  // What makes a score a power of two: scale * log2(e), or softcap * log2(e).
  float scale_log2;
  float softcap_scale;  // scale / softcap
};

// The query blocks of a tile, one head of its key head after another.
struct HeadBlockCursor {
  BlockCursor blocks;
  u32 head;
  u32 last_head;  // one past the key head's query heads

  __device__ __forceinline__ HeadBlockCursor(const TileRun* runs, const Tile& tile, u32 first, u32 heads)
      : blocks(runs, tile), head(first), last_head(first + heads) {}
  __device__ __forceinline__ bool done() const { return blocks.done(); }
  __device__ __forceinline__ void advance(i32 block, const TileRun* runs, const Tile& tile) {
    blocks.advance(block, runs);
    if (blocks.done() && ++head < last_head) blocks = BlockCursor(runs, tile);
  }
};

template <typename C>
struct PortableBackward {
  const PortableBackwardArguments& arguments;
  u8* const shared;
  const u32 warp = threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;
  const u32 keys = shared_address(shared);
  const u32 values = keys + C::Keys::kBytes;
  const u32 weights = values + C::Values::kBytes;
  const u32 slopes = weights + C::Scores::kBytes;
  const u32 stages = slopes + C::Scores::kBytes;

  Tile tile;
  u32 key_head;
  float dk[C::kKeyPatchRows / 16][C::kKeyPatchColumns / 2];
  float dv[C::kKeyPatchRows / 16][C::kValuePatchColumns / 2];

  static constexpr u32 kRowTiles = C::kScoreRows / 16;
  using Patch = float[kRowTiles][C::kScoreColumns / 2];

  // Where a stage keeps its queries, and behind them dout, lse and delta.
  __device__ __forceinline__ u32 stage_queries(u32 stage) const { return stages + stage * C::kStageBytes; }
  __device__ __forceinline__ u32 stage_outputs(u32 stage) const { return stage_queries(stage) + C::Queries::kBytes; }
  __device__ __forceinline__ u32 stage_statistics(u32 stage) const { return stage_outputs(stage) + C::Outputs::kBytes; }

  // The end of the rows that a block may read and add to.
  __device__ __forceinline__ i32 block_end(const HeadBlockCursor& cursor) const {
    return min(cursor.blocks.end, arguments.rows_q);
  }

  __device__ __forceinline__ void load_block(const HeadBlockCursor& cursor, u32 stage) const {
    const i32 start = cursor.blocks.start, end = block_end(cursor);
    C::Queries::template load<C::kThreads>(stage_queries(stage), arguments.q + cursor.head * arguments.head_dim,
                                           u64(arguments.heads_q) * arguments.head_dim, start, end, arguments.head_dim);
    C::Outputs::template load<C::kThreads>(stage_outputs(stage), arguments.dout + cursor.head * arguments.head_dim_v,
                                           u64(arguments.heads_q) * arguments.head_dim_v, start, end,
                                           arguments.head_dim_v);
    if (threadIdx.x < 2 * C::kBlock) {
      const float* from = threadIdx.x < C::kBlock ? arguments.lse : arguments.delta;
      const i32 row = start + i32(threadIdx.x % C::kBlock);
      cp_async_4(stage_statistics(stage) + 4 * threadIdx.x,
                 from + (u64(u32(row)) * arguments.heads_q + cursor.head), row < end);
    }
  }

  // The first query and key row of this warp's patch of scores.
  __device__ __forceinline__ i32 patch_query(const BlockCursor& block) const {
    return block.start + i32(C::ScoreWarps::down(warp) * C::kScoreRows);
  }
  __device__ __forceinline__ i32 patch_key() const {
    return tile.start + i32(C::ScoreWarps::across(warp) * C::kScoreColumns);
  }

  // What is unmasked of this warp's patch of scores.
  __device__ __forceinline__ Cover cover_of(const BlockCursor& block) const {
    const i32 q_start = patch_query(block), k_start = patch_key();
    return cover(arguments.bounds, block, q_start, min(q_start + i32(C::kScoreRows), block.end), k_start,
                 min(k_start + i32(C::kScoreColumns), tile.end));
  }

  // Writes a patch of scores as elements.
  __device__ __forceinline__ void store_patch(u32 to, const Patch& patch) const {
    const PatchStore<typename C::Scores> place(to, C::ScoreWarps::down(warp) * C::kScoreRows,
                                               C::ScoreWarps::across(warp) * C::kScoreColumns, lane);
#pragma unroll
    for (u32 m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (u32 n = 0; n < C::kScoreColumns / 16; ++n) place.store(&patch[m][8 * n], m, n);
    }
  }

  // A statistic of this thread's row `i` of row tile `m`: 0 is lse, 1 delta.
  __device__ __forceinline__ float statistic(u32 stage, u32 which, u32 m, u32 i) const {
    const u32 row = C::ScoreWarps::down(warp) * C::kScoreRows + 16 * m + 8 * i + lane / 4;
    return *reinterpret_cast<const float*>(shared + (stage_statistics(stage) - keys) + 4 * (which * C::kBlock + row));
  }

  // A score's weight; `offset` is minus its row's log-sum-exp, base 2.
  __device__ __forceinline__ float weight(float score, float offset) const {
    return exp2_fast(fmaf(score, arguments.scale_log2, offset));
  }
  // tanh(x) = 1 - 2 / (1 + e^2x): its error is absolute, like the score's.
  __device__ __forceinline__ float cap(float score) const {
    const float double_log2 = 2.0f * kLog2E * arguments.softcap_scale;
    return fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(score * double_log2)), 1.0f);
  }

  // Computes this warp's patch of the weights and of their gradients and leaves both in shared memory.
  __device__ __forceinline__ void differentiate(const BlockCursor& block, u32 stage) const {
    const u32 q_row = C::ScoreWarps::down(warp) * C::kScoreRows;
    const u32 k_row = C::ScoreWarps::across(warp) * C::kScoreColumns;
    Patch p, ds;
    clear(p);
    clear(ds);
    const Cover seen = cover_of(block);
    if (seen == Cover::kNone) {
      store_patch(weights, p);
      store_patch(slopes, ds);
      return;
    }
    multiply<C::kHeadDim / 16, kRowTiles, C::kScoreColumns>(
        p, OperandA<typename C::Queries, Lie::kAlong>(stage_queries(stage), q_row, lane),
        OperandB<typename C::Keys, Lie::kAlong>(keys, k_row, lane));
    float offset[kRowTiles][2];
#pragma unroll
    for (u32 m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        // Infinite for a row that saw nothing, all of whose weights are masked below.
        offset[m][i] = -kLog2E * statistic(stage, 0, m, i);
      }
    }
    // Exponentials run under the second product, some after each of its steps. With a softcap they are those of tanh.
    constexpr u32 kSteps = C::kHeadDimV / 16, kColumnValues = C::kScoreColumns / 2, kValues = kRowTiles * kColumnValues;
    const auto exponentiate = [&](u32 step) {
#pragma unroll
      for (u32 value = step * kValues / kSteps; value < (step + 1) * kValues / kSteps; ++value) {
        const u32 m = value / kColumnValues, at = value % kColumnValues;
        p[m][at] = C::kSoftcap ? cap(p[m][at]) : weight(p[m][at], offset[m][at / 2 % 2]);
      }
    };
    multiply<kSteps, kRowTiles, C::kScoreColumns>(
        ds, OperandA<typename C::Outputs, Lie::kAlong>(stage_outputs(stage), q_row, lane),
        OperandB<typename C::Values, Lie::kAlong>(values, k_row, lane), exponentiate);
#pragma unroll
    for (u32 m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const float delta = statistic(stage, 1, m, i);
#pragma unroll
        for (u32 j = 0; j < C::kScoreColumns / 4; ++j) {
          const u32 at = j / 2 * 4 + 2 * i + j % 2;
          ds[m][at] -= delta;
          if constexpr (C::kSoftcap) {
            ds[m][at] *= 1.0f - p[m][at] * p[m][at];
            p[m][at] = weight(p[m][at], offset[m][i]);
          }
        }
      }
    }
    if (seen == Cover::kSome) {
      overwrite_masked<kRowTiles, C::kScoreColumns>(p, 0.0f, arguments.bounds, block, patch_query(block), patch_key(),
                                                    lane);
    }
    store_patch(weights, p);
#pragma unroll
    for (u32 m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (u32 j = 0; j < C::kScoreColumns / 2; ++j) ds[m][j] *= p[m][j];
    }
    store_patch(slopes, ds);
  }

  static constexpr u32 kQueryRowTiles = C::kQueryPatchRows / 16;
  using QueryPatch = float[kQueryRowTiles][C::kQueryPatchColumns / 2];

  // A patch of dq += ds k.
  __device__ __forceinline__ void compute_query_gradient(QueryPatch& dq) const {
    multiply<C::kTileRows / 16, kQueryRowTiles, C::kQueryPatchColumns>(
        dq,
        OperandA<typename C::Scores, Lie::kAlong>(slopes, C::QueryWarps::down(warp) * C::kQueryPatchRows, lane),
        OperandB<typename C::Keys, Lie::kAcross, C::QueryWarps::kAcross>(keys, C::QueryWarps::across(warp), lane));
  }

  // Where a patch of dq goes: its rows and columns from this thread's first on, as far as there are any.
  struct QueryPlace {
    float* to;
    u32 step;  // from a row to the 8th after it
    i32 rows;
    i32 columns;
  };

  __device__ __forceinline__ QueryPlace query_place(const HeadBlockCursor& cursor) const {
    const u32 token = cursor.blocks.start + C::QueryWarps::down(warp) * C::kQueryPatchRows + lane / 4;
    const u32 column = 16 * C::QueryWarps::across(warp) + 8 * (lane % 2) + 4 * (lane / 2 % 2);
    const u64 place = u64(token) * arguments.heads_q + cursor.head;
    return {arguments.dq + (place * arguments.head_dim + column), 8 * arguments.heads_q * arguments.head_dim,
            block_end(cursor) - i32(token), i32(arguments.head_dim) - i32(column)};
  }

  // Adds one part of 8 rows and 16 columns of a patch to global memory. Threads exchange pairs first: an even one takes the four
  // columns that it shares with its neighbour in the left half, an odd one those in the right half.
  static constexpr u32 kParts = kQueryRowTiles * 2 * (C::kQueryPatchColumns / 16);
  __device__ __forceinline__ void add_part(const QueryPatch& dq, const QueryPlace& place, u32 part) const {
    constexpr u32 kAcross = C::kQueryPatchColumns / 16;
    const u32 n = part % kAcross, i = part / kAcross % 2, m = part / kAcross / 2;
    const bool odd = lane % 2;
    const float* left = &dq[m][8 * n + 2 * i];
    const float* right = left + 4;
    const float sent[2] = {odd ? left[0] : right[0], odd ? left[1] : right[1]};
    const float kept[2] = {odd ? right[0] : left[0], odd ? right[1] : left[1]};
    const float first = arguments.scale * __shfl_xor_sync(0xffffffffu, sent[0], 1);
    const float second = arguments.scale * __shfl_xor_sync(0xffffffffu, sent[1], 1);
    const float own[2] = {arguments.scale * kept[0], arguments.scale * kept[1]};
    const u32 row = 16 * m + 8 * i, column = 16 * n * C::QueryWarps::kAcross;
    if (i32(row) >= place.rows || i32(column) >= place.columns) return;
    reduce_add(place.to + (u64(row / 8) * place.step + column),
               odd ? make_float4(first, second, own[0], own[1]) : make_float4(own[0], own[1], first, second));
  }

  // Adds this block's partial sums to dq (in global memory), dv += p^T dout and dk += ds^T q. dq is added in parts between the other
  // products' steps: all at once would stop the warp until memory has taken them.
  __device__ __forceinline__ void add_gradients(const HeadBlockCursor& cursor, u32 stage) {
    QueryPatch dq;
    clear(dq);
    QueryPlace place = query_place(cursor);
    if (arguments.dq != nullptr) {
      compute_query_gradient(dq);
    } else {
      place.rows = 0;
    }
    constexpr u32 kSteps = C::kBlock / 16;
    const auto add_parts = [&](u32 step) {
#pragma unroll
      for (u32 part = step * kParts / (2 * kSteps); part < (step + 1) * kParts / (2 * kSteps); ++part) {
        add_part(dq, place, part);
      }
    };
    const u32 row = C::KeyWarps::down(warp) * C::kKeyPatchRows, warp_across = C::KeyWarps::across(warp);
    multiply<kSteps, C::kKeyPatchRows / 16, C::kValuePatchColumns>(
        dv, OperandA<typename C::Scores, Lie::kAcross>(weights, row, lane),
        OperandB<typename C::Outputs, Lie::kAcross, C::KeyWarps::kAcross>(stage_outputs(stage), warp_across, lane),
        add_parts);
    multiply<kSteps, C::kKeyPatchRows / 16, C::kKeyPatchColumns>(
        dk, OperandA<typename C::Scores, Lie::kAcross>(slopes, row, lane),
        OperandB<typename C::Queries, Lie::kAcross, C::KeyWarps::kAcross>(stage_queries(stage), warp_across, lane),
        [&](u32 step) { add_parts(kSteps + step); });
  }

  // Writes this warp's patch of dk or dv.
  template <u32 kColumns>
  __device__ __forceinline__ void write_gradient(void* to, u32 head_dim, float factor,
                                                 const float (&patch)[C::kKeyPatchRows / 16][kColumns / 2]) const {
#pragma unroll
    for (u32 m = 0; m < C::kKeyPatchRows / 16; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const i32 token = tile.start + i32(C::KeyWarps::down(warp) * C::kKeyPatchRows + 16 * m + 8 * i + lane / 4);
        if (token >= tile.end) continue;
        const u64 place = (u64(token) * arguments.heads_kv + key_head) * head_dim;
#pragma unroll
        for (u32 n = 0; n < kColumns / 8; ++n) {
          const u32 warp_across = n / 2 * C::KeyWarps::kAcross + C::KeyWarps::across(warp);
          const u32 column = 16 * warp_across + 8 * (n % 2) + 2 * (lane % 4);
          if (column >= head_dim) break;
          const float low = factor * patch[m][4 * n + 2 * i], high = factor * patch[m][4 * n + 2 * i + 1];
          if (arguments.float_gradients != 0) {
            *reinterpret_cast<float2*>(static_cast<float*>(to) + place + column) = make_float2(low, high);
          } else {
            *reinterpret_cast<u32*>(static_cast<Element*>(to) + place + column) = pack(low, high);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void mainloop() {
    const u32 heads = arguments.heads_q / arguments.heads_kv;
    HeadBlockCursor cursor(arguments.runs, tile, key_head * heads, heads);
    clear(dk);
    clear(dv);
    if (!cursor.done()) {
      C::Keys::template load<C::kThreads>(keys, arguments.k + key_head * arguments.head_dim,
                                          u64(arguments.heads_kv) * arguments.head_dim, tile.start, tile.end,
                                          arguments.head_dim);
      C::Values::template load<C::kThreads>(values, arguments.v + key_head * arguments.head_dim_v,
                                            u64(arguments.heads_kv) * arguments.head_dim_v, tile.start, tile.end,
                                            arguments.head_dim_v);
      load_block(cursor, 0);
      cp_async_commit();
    }
    u32 stage = 0;
    while (!cursor.done()) {
      const HeadBlockCursor current = cursor;
      cursor.advance(i32(C::kBlock), arguments.runs, tile);
      // This block is here, and nobody reads the one before, its weights and their gradients any more.
      cp_async_wait<0>();
      __syncthreads();
      const u32 next = (stage + 1) % C::kStages;
      if constexpr (C::kStages > 1) {
        if (!cursor.done()) load_block(cursor, next);
        cp_async_commit();
      }
      differentiate(current.blocks, stage);
      __syncthreads();
      add_gradients(current, stage);
      if constexpr (C::kStages == 1) {
        __syncthreads();
        if (!cursor.done()) load_block(cursor, next);
        cp_async_commit();
      }
      stage = next;
    }
    write_gradient<C::kKeyPatchColumns>(arguments.dk, arguments.head_dim, arguments.scale, dk);
    write_gradient<C::kValuePatchColumns>(arguments.dv, arguments.head_dim_v, 1.0f, dv);
  }

  // Items are (tile, key head), all heads for one tile after another, so that CTAs that run together read the same rows of
  // several heads in step. A grid of as many CTAs as items leaves the queue to the hardware; a smaller one takes every n-th.
  __device__ __forceinline__ void run() {
    const u32 items = arguments.tile_count * arguments.heads_kv;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
      tile = arguments.tiles[item / arguments.heads_kv];
      key_head = item % arguments.heads_kv;
      mainloop();
      __syncthreads();
    }
  }
};

template <typename C>
__device__ __forceinline__ void portable_backward(const PortableBackwardArguments& arguments) {
  extern __shared__ uint4 portable_backward_shared[];
  PortableBackward<C> kernel{arguments, reinterpret_cast<u8*>(portable_backward_shared)};
  kernel.run();
}

}  // namespace counterpoint
