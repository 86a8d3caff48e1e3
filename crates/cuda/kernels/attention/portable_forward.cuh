// Attention forward for every GPU from sm_80 on: one CTA owns a tile of query rows and walks the runs of its schedule.
//
// Each warp owns 16 or 32 whole query rows, so that a row's softmax stays inside a warp and weights go from accumulators to
// the next product in registers. Keys and values have one buffer each: values arrive while scores are computed, the next
// block's keys while weights and values are multiplied (FlashAttention 2's order, https://arxiv.org/abs/2307.08691).
// The second CTA of a multiprocessor fills the waits. What a warp's rows see nothing of, that warp skips.
#pragma once

#include "attention/attention_mask.cuh"
#include "attention/attention_softmax.cuh"
#include "attention/portable_tile.cuh"

namespace counterpoint {

// Where a row's state comes from, and what becomes of it.
enum class StateBegin : u32 { kStart, kContinue };
enum class StateEnd : u32 { kState, kResult };

template <u32 kHeadDimOf, u32 kHeadDimVOf, u32 kWarpRowsOf, u32 kWarpsOf, u32 kBlockOf, bool kSoftcapOf,
          StateBegin kBeginOf, StateEnd kEndOf>
struct PortableForwardConfig {
  static constexpr u32 kHeadDim = kHeadDimOf;
  static constexpr u32 kHeadDimV = kHeadDimVOf;
  static constexpr u32 kWarpRows = kWarpRowsOf;
  static constexpr u32 kWarps = kWarpsOf;
  static constexpr u32 kBlock = kBlockOf;
  static constexpr bool kSoftcap = kSoftcapOf;
  static constexpr StateBegin kBegin = kBeginOf;
  static constexpr StateEnd kEnd = kEndOf;
  static constexpr u32 kThreads = 32 * kWarps;
  static constexpr u32 kTileRows = kWarpRows * kWarps;
  static constexpr u32 kRowTiles = kWarpRows / 16;
  using Queries = SharedRows<kTileRows, kHeadDim>;
  using Keys = SharedRows<kBlock, kHeadDim>;
  using Values = SharedRows<kBlock, kHeadDimV>;
  // Results leave through the queries' rows.
  using Results = SharedRows<kTileRows, kHeadDimV>;
  static_assert(kHeadDimV <= kHeadDim && kWarpRows % 16 == 0 && kBlock % 16 == 0, "shapes of mma");
  static constexpr u32 kSharedBytes = Queries::kBytes + Keys::kBytes + Values::kBytes;
};

// The kernel's parameter. Rows are tokens; pointers may be null where the specialisation does not use them.
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
  float* acc;          // state: [rows_q, heads_q, head_dim_v], not divided by the sum
  float* row_max;      // state: [rows_q, heads_q], in the unit of the scores before the scale
  float* row_sum;      // state: [rows_q, heads_q]
  float* partial_out;  // [slots, heads_q, tile rows, head_dim_v]
  float* partial_lse;  // [slots, heads_q, tile rows]
  u32 tile_count;
  u32 heads_q;
  u32 heads_kv;
  u32 heads_per_group;  // heads that are worked on together: their keys and values should stay in L2
  u32 head_dim;
  u32 head_dim_v;
  u32 seqlen_sink;
  i32 rows_k;
  // What makes a score a power of two: scale * log2(e), or softcap * log2(e). Above zero.
  float scale_log2;
  float softcap_scale;  // scale / softcap
  u32 negate;           // 1: the scale is below zero; scale_log2 and softcap_scale are of its opposite
};

template <typename C>
struct PortableForward {
  const PortableForwardArguments& arguments;
  u8* const shared;
  const u32 warp = threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;
  const u32 queries = shared_address(shared);
  const u32 keys = queries + C::Queries::kBytes;
  const u32 values = keys + C::Keys::kBytes;

  Tile tile;
  u32 head;
  u32 key_head;
  float acc[C::kRowTiles][C::kHeadDimV / 2];
  RowState state[C::kRowTiles];

  // The tile's row of this thread's row `i` of row tile `m`.
  __device__ __forceinline__ u32 row(u32 m, u32 i) const { return warp * C::kWarpRows + 16 * m + 8 * i + lane / 4; }
  // The place of a token's head in q, out and the statistics.
  __device__ __forceinline__ u64 place(i32 token) const { return u64(token) * arguments.heads_q + head; }

  __device__ __forceinline__ void load_queries() const {
    C::Queries::template load<C::kThreads>(queries, arguments.q + head * arguments.head_dim,
                                           u64(arguments.heads_q) * arguments.head_dim, tile.start, tile.end,
                                           arguments.head_dim);
  }
  // Rows past the run's end belong to nobody; they must not even be read, for 0 * NaN is NaN.
  __device__ __forceinline__ void load_keys(const BlockCursor& cursor) const {
    C::Keys::template load<C::kThreads>(keys, arguments.k + key_head * arguments.head_dim,
                                        u64(arguments.heads_kv) * arguments.head_dim, cursor.start,
                                        min(cursor.current.end, arguments.rows_k), arguments.head_dim);
  }
  __device__ __forceinline__ void load_values(const BlockCursor& cursor) const {
    C::Values::template load<C::kThreads>(values, arguments.v + key_head * arguments.head_dim_v,
                                          u64(arguments.heads_kv) * arguments.head_dim_v, cursor.start,
                                          min(cursor.current.end, arguments.rows_k), arguments.head_dim_v);
  }

  // A scale below zero is its opposite times the opposite of the queries, which is exact: maxima stay maxima.
  __device__ __forceinline__ void negate_queries() const {
    for (u32 at = 16 * threadIdx.x; at < C::Queries::kBytes; at += 16 * C::kThreads) {
      uint4& bits = *reinterpret_cast<uint4*>(shared + at);
      bits.x ^= 0x80008000u, bits.y ^= 0x80008000u, bits.z ^= 0x80008000u, bits.w ^= 0x80008000u;
    }
  }

  // What this warp's rows see of the cursor's block.
  __device__ __forceinline__ Cover cover_of(const BlockCursor& cursor) const {
    if (!cursor.bounded()) return Cover::kAll;
    const i32 first = tile.start + i32(warp * C::kWarpRows), last = min(first + i32(C::kWarpRows), tile.end);
    if (first >= last) return Cover::kNone;
    Cover seen = Cover::kNone;
    for (u32 b = cursor.current.bound_begin; b < cursor.current.bound_end && seen != Cover::kAll; ++b) {
      const Cover one =
          cover(load_bound(arguments.bounds + b), first, last, cursor.start, cursor.start + i32(C::kBlock));
      if (one != Cover::kNone) seen = one;
    }
    return seen;
  }

  __device__ __forceinline__ void compute_scores(float (&scores)[C::kRowTiles][C::kBlock / 2]) const {
    clear(scores);
    multiply<C::kHeadDim / 16, C::kRowTiles, C::kBlock>(
        scores, OperandA<typename C::Queries, Lie::kAlong>(queries, warp * C::kWarpRows, lane),
        OperandB<typename C::Keys, Lie::kAlong>(keys, 0, lane));
  }

  __device__ __forceinline__ void mask_scores(float (&scores)[C::kRowTiles][C::kBlock / 2],
                                              const BlockCursor& block) const {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
      ColumnMask<C::kBlock> mask;
      mask.clear();
      for (u32 b = block.current.bound_begin; b < block.current.bound_end; ++b) {
        const TileBound bound = load_bound(arguments.bounds + b);
#pragma unroll
        for (u32 i = 0; i < 2; ++i) mask.unmask(i, bound, tile.start + i32(row(m, i)), block.start, lane);
      }
      mask.apply(scores[m]);
    }
  }

  __device__ __forceinline__ void cap_scores(float (&scores)[C::kRowTiles][C::kBlock / 2]) const {
    // tanh(x) = 1 - 2 / (e^2x + 1): its error is absolute, like the score's.
    const float double_log2 = 2.0f * kLog2E * arguments.softcap_scale;
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 j = 0; j < C::kBlock / 2; ++j) {
        scores[m][j] = 1.0f - __fdividef(2.0f, exp2_fast(scores[m][j] * double_log2) + 1.0f);
      }
    }
  }

  // Follows the maxima of a block's scores: `offset` is what a score times the scale needs to become a weight's exponent.
  __device__ __forceinline__ void follow_maxima(const float (&scores)[C::kRowTiles][C::kBlock / 2],
                                                float (&offset)[C::kRowTiles][2]) {
    float rescale[C::kRowTiles][2];
    bool grew = false;
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        float chain[2] = {scores[m][2 * i], scores[m][2 * i + 1]};
#pragma unroll
        for (u32 j = 1; j < C::kBlock / 8; ++j) {
          chain[0] = fmaxf(chain[0], scores[m][4 * j + 2 * i]);
          chain[1] = fmaxf(chain[1], scores[m][4 * j + 2 * i + 1]);
        }
        const float seen = quad_max(fmaxf(chain[0], chain[1])), previous = state[m].max[i];
        // False for a row that has seen nothing but minus infinities, true for the first finite score.
        const bool take = (seen - previous) * arguments.scale_log2 > kMaxGrowth;
        state[m].max[i] = take ? seen : previous;
        rescale[m][i] = take ? exp2_fast((previous - seen) * arguments.scale_log2) : 1.0f;
        grew |= take;
        offset[m][i] = state[m].max[i] == minus_infinity() ? 0.0f : -state[m].max[i] * arguments.scale_log2;
      }
    }
    if (!__any_sync(0xffffffffu, grew)) return;
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
      state[m].sum[0] *= rescale[m][0];
      state[m].sum[1] *= rescale[m][1];
#pragma unroll
      for (u32 j = 0; j < C::kHeadDimV / 2; ++j) acc[m][j] *= rescale[m][j / 2 % 2];
    }
  }

  // acc += weights v.
  __device__ __forceinline__ void accumulate(const float (&scores)[C::kRowTiles][C::kBlock / 2],
                                             const float (&offset)[C::kRowTiles][2]) {
    constexpr u32 kSteps = C::kBlock / 16, kPairs = C::kHeadDimV / 16;
    u32 weights[kSteps][C::kRowTiles][4];
#pragma unroll
    for (u32 kk = 0; kk < kSteps; ++kk) {
#pragma unroll
      for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const float* pair = &scores[m][8 * kk + 2 * j];
          const float low = exp2_fast(fmaf(pair[0], arguments.scale_log2, offset[m][j % 2]));
          const float high = exp2_fast(fmaf(pair[1], arguments.scale_log2, offset[m][j % 2]));
          state[m].sum[j % 2] += low + high;
          weights[kk][m][j] = pack(low, high);
        }
      }
    }
    const OperandB<typename C::Values, Lie::kAcross> operand(values, 0, lane);
    u32 b[3][4];
    operand.load(b[0], 0, 0);
    operand.load(b[1], 1 % kPairs, 1 / kPairs);
#pragma unroll
    for (u32 index = 0; index < kSteps * kPairs; ++index) {
      // Two fragments ahead, more would not find room beside the accumulators.
      const u32 kk = index / kPairs, n = index % kPairs, now = index % 3, ahead = index + 2;
      if (ahead < kSteps * kPairs) operand.load(b[ahead % 3], ahead % kPairs, ahead / kPairs);
#pragma unroll
      for (u32 m = 0; m < C::kRowTiles; ++m) {
        float* to = &acc[m][8 * n];
        mma_m16n8k16(to[0], to[1], to[2], to[3], weights[kk][m], b[now][0], b[now][1]);
        mma_m16n8k16(to[4], to[5], to[6], to[7], weights[kk][m], b[now][2], b[now][3]);
      }
    }
  }

  __device__ __forceinline__ void begin_state() {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
      state[m].clear();
#pragma unroll
      for (u32 j = 0; j < C::kHeadDimV / 2; ++j) acc[m][j] = 0.0f;
      if constexpr (C::kBegin == StateBegin::kContinue) read_state(m);
    }
  }

  __device__ __forceinline__ void read_state(u32 m) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const i32 token = tile.start + i32(row(m, i));
      if (token >= tile.end) continue;
      state[m].max[i] = arguments.row_max[place(token)];
      // Threads of a quad hold shares of the sum.
      if (lane % 4 == 0) state[m].sum[i] = arguments.row_sum[place(token)];
      const float* from = arguments.acc + place(token) * arguments.head_dim_v;
#pragma unroll
      for (u32 n = 0; n < C::kHeadDimV / 8; ++n) {
        if (8 * n >= arguments.head_dim_v) break;
        const float2 pair = *reinterpret_cast<const float2*>(from + 8 * n + 2 * (lane % 4));
        acc[m][4 * n + 2 * i] = pair.x;
        acc[m][4 * n + 2 * i + 1] = pair.y;
      }
    }
  }

  // Writes the accumulators of row `i` of row tile `m` as f32.
  __device__ __forceinline__ void write_row(u32 m, u32 i, float* to) const {
#pragma unroll
    for (u32 n = 0; n < C::kHeadDimV / 8; ++n) {
      if (8 * n >= arguments.head_dim_v) break;
      *reinterpret_cast<float2*>(to + 8 * n + 2 * (lane % 4)) =
          make_float2(acc[m][4 * n + 2 * i], acc[m][4 * n + 2 * i + 1]);
    }
  }

  __device__ __forceinline__ void write_state() const {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const float sum = quad_sum(state[m].sum[i]);
        const i32 token = tile.start + i32(row(m, i));
        if (token >= tile.end) continue;
        if (lane % 4 == 0) {
          arguments.row_max[place(token)] = state[m].max[i];
          arguments.row_sum[place(token)] = sum;
        }
        write_row(m, i, arguments.acc + place(token) * arguments.head_dim_v);
      }
    }
  }

  // Adds the sinks to a row's maximum and sum, both base 2; returns what the accumulators are to be multiplied by.
  __device__ __forceinline__ float join_sinks(float& max_log2, float& sum) const {
    float joined = max_log2;
    for (u32 t = 0; t < arguments.seqlen_sink; ++t) {
      joined = fmaxf(joined, arguments.sink[u64(t) * arguments.heads_q + head] * kLog2E);
    }
    if (joined == minus_infinity()) return 1.0f;
    const float factor = exp2_fast(max_log2 - joined);
    sum *= factor;
    for (u32 t = 0; t < arguments.seqlen_sink; ++t) {
      sum += exp2_fast(arguments.sink[u64(t) * arguments.heads_q + head] * kLog2E - joined);
    }
    max_log2 = joined;
    return factor;
  }

  // Divides the accumulators by the rows' sums and writes them with the rows' log-sum-exp.
  __device__ __forceinline__ void write_result() {
    const bool partial = tile.partial >= 0;
    const u64 slot = (u64(u32(tile.partial)) * arguments.heads_q + head) * C::kTileRows;
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        float sum = quad_sum(state[m].sum[i]);
        float max_log2 = state[m].max[i] * arguments.scale_log2;
        float factor = 1.0f;
        // A part of a row has no sink; whoever merges the parts adds it.
        if (arguments.seqlen_sink != 0 && !partial) factor = join_sinks(max_log2, sum);
        factor = sum > 0.0f ? factor / sum : 0.0f;
#pragma unroll
        for (u32 n = 0; n < C::kHeadDimV / 8; ++n) {
          acc[m][4 * n + 2 * i] *= factor;
          acc[m][4 * n + 2 * i + 1] *= factor;
        }
        const i32 token = tile.start + i32(row(m, i));
        if (token >= tile.end) continue;
        if (lane % 4 == 0) {
          const float lse = sum > 0.0f ? (max_log2 + __log2f(sum)) * kLn2 : minus_infinity();
          (partial ? arguments.partial_lse[slot + row(m, i)] : arguments.lse[place(token)]) = lse;
        }
        if (partial) write_row(m, i, arguments.partial_out + (slot + row(m, i)) * arguments.head_dim_v);
      }
    }
    if (!partial) write_elements();
  }

  // Writes the accumulators as elements, through this warp's own query rows so that a thread writes 16 bytes at once.
  __device__ __forceinline__ void write_elements() const {
    u8* const rows = shared + C::Results::kPitch * warp * C::kWarpRows;
    // The pitches of queries and results may differ: a warp may not write over rows that another still multiplies.
    if (C::kHeadDimV != C::kHeadDim) __syncthreads();
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
#pragma unroll
        for (u32 n = 0; n < C::kHeadDimV / 8; ++n) {
          *reinterpret_cast<u32*>(rows + C::Results::offset(16 * m + 8 * i + lane / 4, 8 * n + 2 * (lane % 4))) =
              pack(acc[m][4 * n + 2 * i], acc[m][4 * n + 2 * i + 1]);
        }
      }
    }
    __syncwarp();
    constexpr u32 kPieces = C::kHeadDimV / 8;
#pragma unroll 4
    for (u32 index = lane; index < C::kWarpRows * kPieces; index += 32) {
      const u32 r = index / kPieces, column = index % kPieces * 8;
      const i32 token = tile.start + i32(warp * C::kWarpRows + r);
      if (token >= tile.end || column >= arguments.head_dim_v) continue;
      *reinterpret_cast<uint4*>(arguments.out + place(token) * arguments.head_dim_v + column) =
          *reinterpret_cast<const uint4*>(rows + C::Results::offset(r, column));
    }
  }

  __device__ __forceinline__ void walk() {
    BlockCursor cursor(arguments.runs, tile);
    // Rows that see nothing keep the state that they have.
    if (C::kBegin == StateBegin::kContinue && C::kEnd == StateEnd::kState && cursor.done()) return;
    load_queries();
    if (!cursor.done()) load_keys(cursor);
    cp_async_commit();
    begin_state();
    if (arguments.negate != 0) {
      cp_async_wait<0>();
      __syncthreads();
      negate_queries();
    }
    while (!cursor.done()) {
      const BlockCursor block = cursor;
      const Cover seen = cover_of(block);
      // Keys are here, and nobody reads the values before any more.
      cp_async_wait<0>();
      __syncthreads();
      load_values(block);
      cp_async_commit();
      float scores[C::kRowTiles][C::kBlock / 2];
      if (seen != Cover::kNone) compute_scores(scores);
      // Values are here, and nobody reads these keys any more.
      cp_async_wait<0>();
      __syncthreads();
      cursor.advance(i32(C::kBlock));
      if (!cursor.done()) load_keys(cursor);
      cp_async_commit();
      if (seen == Cover::kNone) continue;
      if constexpr (C::kSoftcap) cap_scores(scores);
      if (seen == Cover::kSome) mask_scores(scores, block);
      float offset[C::kRowTiles][2];
      follow_maxima(scores, offset);
      accumulate(scores, offset);
    }
    cp_async_wait<0>();
    if constexpr (C::kEnd == StateEnd::kState) {
      write_state();
    } else {
      write_result();
    }
  }

  // Items are (tile, head): heads go by groups; within a group heaviest tiles first, all its heads for one tile after
  // another. A grid of as many CTAs as items leaves the queue to the hardware; a smaller one takes every n-th item.
  __device__ __forceinline__ void run() {
    const u32 items = arguments.tile_count * arguments.heads_q;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
      const u32 per_group = arguments.tile_count * arguments.heads_per_group;
      const u32 first = item / per_group * arguments.heads_per_group;
      const u32 within = item % per_group;
      const u32 width = min(arguments.heads_per_group, arguments.heads_q - first);
      tile = arguments.tiles[within / width];
      head = first + within % width;
      key_head = head / (arguments.heads_q / arguments.heads_kv);
      walk();
      __syncthreads();
    }
  }
};

template <typename C>
__device__ __forceinline__ void portable_forward(const PortableForwardArguments& arguments) {
  extern __shared__ uint4 portable_forward_shared[];
  PortableForward<C> kernel{arguments, reinterpret_cast<u8*>(portable_forward_shared)};
  kernel.run();
}

}  // namespace counterpoint
