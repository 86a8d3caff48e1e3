// Attention forward for every GPU from sm_80 on: one CTA owns a tile of query rows and loops over the runs of its schedule.
//
// Each warp owns 16 or 32 whole query rows, so that a row's softmax stays inside a warp and weights go from accumulators to
// the next product in registers. Keys and values have one buffer each: values arrive while scores are computed, the next
// block's keys while weights and values are multiplied (FlashAttention 2's order, https://arxiv.org/abs/2307.08691).
// The second CTA of a multiprocessor fills the waits. Where heads are long, shared memory is what limits: then a warp holds its
// queries, if registers allow. What a warp's rows see nothing of, that warp skips.
//
// Where blocks are aligned, all that a row has between two of them is what a state holds, and rows begin with the state of the stage
// before: so bits do not depend on where stages are cut. Elsewhere a state is joined at the end, which takes fewer registers.
#pragma once

#include "attention/attention_softmax.cuh"
#include "attention/max_logits.cuh"
#include "attention/portable_forward_config.cuh"

namespace counterpoint {

// How far, in powers of two, a row's maximum may exceed the one in use before its accumulators are rescaled: weights then
// stay below 2^8, far inside the range of f16, and most blocks need no rescaling (FlashAttention 4's idea).
constexpr float kMaxGrowth = 8.0f;

// The offset of a row that has seen nothing: finite, so that no infinity meets another, and larger than any score.
constexpr float kUnseen = 1e30f;

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
  // Of each row what makes its scores exponents: minus the maximum in use, base 2; and this thread's partial sum.
  float offset[C::kRowTiles][2];
  float sum[C::kRowTiles][2];
  // Where the largest scores are wanted, the largest exponent of this thread's rows: the maximum in use may be below it.
  float largest;
  // Operand A of the scores, step by step.
  u32 held[C::kHeldColumns / 16 + 1][C::kRowTiles][4];

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
                                        min(cursor.end, arguments.rows_k), arguments.head_dim);
  }
  __device__ __forceinline__ void load_values(const BlockCursor& cursor) const {
    C::Values::template load<C::kThreads>(values, arguments.v + key_head * arguments.head_dim_v,
                                          u64(arguments.heads_kv) * arguments.head_dim_v, cursor.start,
                                          min(cursor.end, arguments.rows_k), arguments.head_dim_v);
  }

  // A scale below zero is its opposite times the opposite of the queries, which is exact: maxima stay maxima.
  __device__ __forceinline__ void negate_queries() const {
    for (u32 at = 16 * threadIdx.x; at < C::Queries::kBytes; at += 16 * C::kThreads) {
      uint4& bits = *reinterpret_cast<uint4*>(shared + at);
      bits.x ^= 0x80008000u, bits.y ^= 0x80008000u, bits.z ^= 0x80008000u, bits.w ^= 0x80008000u;
    }
  }

  // What this warp's rows see of a block.
  __device__ __forceinline__ Cover cover_of(const BlockCursor& block) const {
    const i32 first = tile.start + i32(warp * C::kWarpRows);
    return cover(arguments.bounds, block, first, min(first + i32(C::kWarpRows), tile.end), block.start,
                 block.start + i32(C::kBlock));
  }

  // Reads one step of this warp's queries as operand A.
  __device__ __forceinline__ void load_step(u32 (&a)[C::kRowTiles][4], u32 kk) const {
    const OperandA<typename C::Queries, Lie::kAlong> rows(queries, warp * C::kWarpRows, lane);
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) rows.load(a[m], m, kk);
  }

  __device__ __forceinline__ void hold_queries() {
    if constexpr (C::kHeldColumns > 0) {
#pragma unroll
      for (u32 kk = 0; kk < C::kHeldColumns / 16; ++kk) load_step(held[kk], kk);
    }
  }

  __device__ __forceinline__ void compute_scores(float (&scores)[C::kRowTiles][C::kBlock / 2]) const {
    clear(scores);
    multiply_by<C::kHeadDim / 16, C::kRowTiles, C::kBlock>(
        scores,
        [&](u32(&a)[C::kRowTiles][4], u32 kk) {
          if constexpr (C::kHeldColumns == 0) {
            load_step(a, kk);
          } else {
#pragma unroll
            for (u32 w = 0; w < 4 * C::kRowTiles; ++w) a[w / 4][w % 4] = held[kk][w / 4][w % 4];
          }
        },
        OperandB<typename C::Keys, Lie::kAlong>(keys, 0, lane), [](u32) {});
  }

  __device__ __forceinline__ void cap_scores(float (&scores)[C::kRowTiles][C::kBlock / 2]) const {
    // tanh(x) = 1 - 2 / (e^2x + 1): its error is absolute, like the score's.
    const float double_log2 = 2.0f * kLog2E * arguments.softcap_scale;
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 j = 0; j < C::kBlock / 2; ++j) {
        scores[m][j] = fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(scores[m][j] * double_log2)), 1.0f);
      }
    }
  }

  // Follows the maxima of a block's scores; the accumulators follow where one moved.
  __device__ __forceinline__ void follow_maxima(const float (&scores)[C::kRowTiles][C::kBlock / 2]) {
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
        const float seen = quad_max(fmaxf(chain[0], chain[1])) * arguments.scale_log2;
        // Rows beyond the tile's end are zeros.
        if (C::kMaxLogits && tile.start + i32(row(m, i)) < tile.end) largest = fmaxf(largest, seen);
        // False for minus infinity, true for the first finite score.
        const bool take = seen + offset[m][i] > kMaxGrowth;
        rescale[m][i] = take ? exp2_fast(-offset[m][i] - seen) : 1.0f;
        offset[m][i] = take ? -seen : offset[m][i];
        grew |= take;
      }
    }
    if (!__any_sync(0xffffffffu, grew)) return;
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
      sum[m][0] *= rescale[m][0];
      sum[m][1] *= rescale[m][1];
#pragma unroll
      for (u32 j = 0; j < C::kHeadDimV / 2; ++j) acc[m][j] *= rescale[m][j / 2 % 2];
    }
  }

  // acc += weights v.
  __device__ __forceinline__ void accumulate(const float (&scores)[C::kRowTiles][C::kBlock / 2]) {
    constexpr u32 kSteps = C::kBlock / 16;
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
          sum[m][j % 2] += low + high;
          weights[kk][m][j] = pack(low, high);
        }
      }
    }
    multiply_by<kSteps, C::kRowTiles, C::kHeadDimV>(
        acc,
        [&](u32(&a)[C::kRowTiles][4], u32 kk) {
#pragma unroll
          for (u32 w = 0; w < 4 * C::kRowTiles; ++w) a[w / 4][w % 4] = weights[kk][w / 4][w % 4];
        },
        OperandB<typename C::Values, Lie::kAcross>(values, 0, lane), [](u32) {});
    if constexpr (C::kAligned) gather_sums();
  }

  // Leaves a row's sum with the first thread of its quad. Partial sums of a block alone would take more registers.
  __device__ __forceinline__ void gather_sums() {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const float total = quad_sum(sum[m][i]);
        sum[m][i] = lane % 4 == 0 ? total : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void begin_rows() {
    clear(acc);
    if constexpr (C::kMaxLogits) largest = minus_infinity();
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        offset[m][i] = kUnseen;
        sum[m][i] = 0.0f;
      }
    }
  }

  // Begins with the state that an earlier stage left, if there is one.
  __device__ __forceinline__ void read_state() {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const i32 token = tile.start + i32(row(m, i));
        if (arguments.begin_acc == nullptr || token >= tile.end) continue;
        offset[m][i] = -arguments.begin_row_max[place(token)];
        // Threads of a quad hold partial sums.
        if (lane % 4 == 0) sum[m][i] = arguments.begin_row_sum[place(token)];
        const float* from = arguments.begin_acc + (place(token) * arguments.head_dim_v + 2 * (lane % 4));
#pragma unroll
        for (u32 n = 0; n < C::kHeadDimV / 8; ++n) {
          if (8 * n >= arguments.head_dim_v) break;
          const float2 pair = *reinterpret_cast<const float2*>(from + 8 * n);
          acc[m][4 * n + 2 * i] = pair.x;
          acc[m][4 * n + 2 * i + 1] = pair.y;
        }
      }
    }
  }

  // Joins the state that an earlier stage left; at the end, since it would take registers that the mainloop needs.
  __device__ __forceinline__ void join_state() {
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const i32 token = tile.start + i32(row(m, i));
        if (token >= tile.end) continue;
        const float before = -arguments.begin_row_max[place(token)];
        const float joined = fminf(before, offset[m][i]);
        const float factor = exp2_fast(joined - offset[m][i]), factor_before = exp2_fast(joined - before);
        offset[m][i] = joined;
        sum[m][i] *= factor;
        // Threads of a quad hold partial sums.
        if (lane % 4 == 0) sum[m][i] += factor_before * arguments.begin_row_sum[place(token)];
        const float* from = arguments.begin_acc + (place(token) * arguments.head_dim_v + 2 * (lane % 4));
#pragma unroll
        for (u32 n = 0; n < C::kHeadDimV / 8; ++n) {
          if (8 * n >= arguments.head_dim_v) break;
          const float2 pair = *reinterpret_cast<const float2*>(from + 8 * n);
          float* to = &acc[m][4 * n + 2 * i];
          to[0] = factor * to[0] + factor_before * pair.x;
          to[1] = factor * to[1] + factor_before * pair.y;
        }
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
        const float total = quad_sum(sum[m][i]);
        const i32 token = tile.start + i32(row(m, i));
        if (token >= tile.end) continue;
        if (lane % 4 == 0) {
          arguments.row_max[place(token)] = -offset[m][i];
          arguments.row_sum[place(token)] = total;
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
#pragma unroll
    for (u32 m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        float total = quad_sum(sum[m][i]);
        float max_log2 = -offset[m][i];
        float factor = 1.0f;
        // A part of a row has no sink; whoever merges the parts adds it.
        if (arguments.seqlen_sink != 0 && !partial) factor = join_sinks(max_log2, total);
        factor = total > 0.0f ? factor / total : 0.0f;
#pragma unroll
        for (u32 n = 0; n < C::kHeadDimV / 8; ++n) {
          acc[m][4 * n + 2 * i] *= factor;
          acc[m][4 * n + 2 * i + 1] *= factor;
        }
        const i32 token = tile.start + i32(row(m, i));
        if (token >= tile.end) continue;
        const u64 slot = (u64(u32(tile.partial)) * C::kTileRows + row(m, i)) * arguments.heads_q + head;
        if (lane % 4 == 0) {
          const float lse = total > 0.0f ? (max_log2 + log2_fast(total)) * kLn2 : minus_infinity();
          (partial ? arguments.partial_lse[slot] : arguments.lse[place(token)]) = lse;
        }
        if (partial) write_row(m, i, arguments.partial_out + slot * arguments.head_dim_v);
      }
    }
    if (!partial) write_elements();
  }

  // Writes the accumulators as elements, through this warp's own query rows so that a thread writes 16 bytes at once.
  __device__ __forceinline__ void write_elements() const {
    u8* const rows = shared + C::Results::kPitch * warp * C::kWarpRows;
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

  // Has the head know the largest score that this warp's rows have seen.
  __device__ __forceinline__ void take_max_logits() const {
    const float seen = warp_max<4>(largest);
    if (lane == 0 && seen != minus_infinity()) atomic_max(arguments.max_logits + head, seen * kLn2);
  }

  __device__ __forceinline__ void mainloop() {
    BlockCursor cursor(arguments.runs, tile);
    // Rows that see nothing keep the state that they have.
    if (cursor.done() && arguments.acc != nullptr && arguments.begin_acc == arguments.acc) return;
    load_queries();
    if (!cursor.done()) load_keys(cursor);
    cp_async_commit();
    begin_rows();
    if constexpr (C::kAligned) read_state();
    if (C::kHeldColumns != 0 || arguments.negate != 0) {
      cp_async_wait<0>();
      __syncthreads();
      if (arguments.negate != 0) {
        negate_queries();
        __syncthreads();
      }
      hold_queries();
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
      cursor.advance(i32(C::kBlock), arguments.runs);
      if (!cursor.done()) load_keys(cursor);
      cp_async_commit();
      if (seen == Cover::kNone) continue;
      if constexpr (C::kSoftcap) cap_scores(scores);
      if (seen == Cover::kSome) {
        overwrite_masked<C::kRowTiles, C::kBlock>(scores, minus_infinity(), arguments.bounds, block,
                                                  tile.start + i32(warp * C::kWarpRows), block.start, lane);
      }
      follow_maxima(scores);
      accumulate(scores);
    }
    // Results pass through the queries' rows: all have arrived, also without a block, and nobody multiplies them any more.
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (C::kMaxLogits) take_max_logits();
    if constexpr (!C::kAligned) {
      if (arguments.begin_acc != nullptr) join_state();
    }
    if (arguments.acc != nullptr) {
      write_state();
    } else {
      write_result();
    }
  }

  // Items are (tile, head), all heads for one tile after another, so that CTAs that run together read keys in step. A grid
  // of as many CTAs as items leaves the queue to the hardware; a smaller one takes every n-th.
  __device__ __forceinline__ void run() {
    const u32 items = arguments.tile_count * arguments.heads_q;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
      tile = arguments.tiles[item / arguments.heads_q];
      head = item % arguments.heads_q;
      key_head = head / (arguments.heads_q / arguments.heads_kv);
      mainloop();
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
