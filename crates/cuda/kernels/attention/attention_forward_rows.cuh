// What a thread's two rows of the forward begin with and what becomes of them: where they lie in global memory.
#pragma once

#include "attention/attention_forward_work.cuh"
#include "attention/attention_softmax.cuh"
#include "attention/max_logits.cuh"
#include "ptx/cluster.cuh"

namespace counterpoint {

template <typename C>
struct AttentionForwardRows {
  using Accumulators = float[C::kHeadDimV / 2];

  const AttentionForwardArguments& arguments;
  const u32 first;  // the tile's row of this thread's row 0
  const u32 lane;

  // The tile's row of this thread's row `i`.
  __device__ __forceinline__ u32 row(u32 i) const { return first + 8 * i; }

  // What makes a score a power of two.
  __device__ __forceinline__ float score_scale() const {
    return C::kScores == Scores::kScaled ? arguments.scale_log2 : 1.0f;
  }

  // Where row `i` of an item lies in tensors of [rows_q, heads_q].
  struct Place {
    u64 index;
    bool owned;  // rows beyond the tile's end belong to another tile
  };
  __device__ __forceinline__ Place place(const AttentionForwardItem& item, u32 i) const {
    const i32 token = item.start + i32(row(i) / C::kPack);
    return Place{u64(token) * arguments.heads_q + head(item, i), token < item.end};
  }
  __device__ __forceinline__ u32 head(const AttentionForwardItem& item, u32 i) const {
    return item.head * C::kPack + row(i) % C::kPack;
  }

  // Whether items go on from a state that an earlier stage wrote.
  __device__ __forceinline__ bool continues() const {
    return C::kSpan == Span::kStaged && arguments.begin_acc != nullptr;
  }

  // Maxima and sums with which an item begins.
  __device__ __forceinline__ void begin_state(const AttentionForwardItem& item, RowState& state) const {
    state.clear();
    if (!continues()) return;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const Place at = place(item, i);
      if (!at.owned) continue;
      state.max[i] = arguments.begin_max[at.index];
      state.sum[i] = arguments.begin_sum[at.index];
    }
  }

  // Accumulators with which an item begins that continues.
  __device__ __forceinline__ void begin_output(const AttentionForwardItem& item, Accumulators& acc) const {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const Place at = place(item, i);
      const float* from = arguments.begin_acc + at.index * arguments.head_dim_v + 2 * (lane % 4);
#pragma unroll
      for (u32 j = 0; j < C::kHeadDimV / 8; ++j) {
        float2 pair = {0.0f, 0.0f};
        if (at.owned && 8 * j < arguments.head_dim_v) pair = *reinterpret_cast<const float2*>(from + 8 * j);
        acc[4 * j + 2 * i] = pair.x;
        acc[4 * j + 2 * i + 1] = pair.y;
      }
    }
  }

  // Writes what an item's last step completed.
  __device__ __forceinline__ void write(const AttentionForwardItem& item, const RowState& state,
                                        const Accumulators& acc) const {
    if constexpr (C::kMaxLogits) take_max_logits(item, state);
    if (C::kSpan == Span::kStaged && arguments.end_acc != nullptr) {
      write_state(item, state, acc);
    } else if (item.partial >= 0) {
      write_partial(item, state, acc);
    } else {
      write_result(item, state, acc);
    }
  }

  // Has the heads of this warp's rows know the largest score that these have seen.
  __device__ __forceinline__ void take_max_logits(const AttentionForwardItem& item, const RowState& state) const {
    static_assert(8 % C::kPack == 0, "a thread's two rows are of one head");
    float largest = minus_infinity();
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      if (place(item, i).owned) largest = fmaxf(largest, state.max[i]);
    }
    largest = warp_max<4 * C::kPack>(largest);
    if (lane % 4 != 0 || lane >= 4 * C::kPack || largest == minus_infinity()) return;
    atomic_max(arguments.max_logits + head(item, 0), largest * score_scale() * kLn2);
  }

  // Accumulators of row `i`, times `factor`, to f32.
  __device__ __forceinline__ void write_floats(const Accumulators& acc, float* to, u32 i, float factor) const {
#pragma unroll
    for (u32 j = 0; j < C::kHeadDimV / 8; ++j) {
      if (8 * j >= arguments.head_dim_v) break;
      *reinterpret_cast<float2*>(to + 8 * j + 2 * (lane % 4)) =
          float2{acc[4 * j + 2 * i] * factor, acc[4 * j + 2 * i + 1] * factor};
    }
  }

  __device__ __forceinline__ void write_state(const AttentionForwardItem& item, const RowState& state,
                                              const Accumulators& acc) const {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const Place at = place(item, i);
      if (!at.owned) continue;
      write_floats(acc, arguments.end_acc + at.index * arguments.head_dim_v, i, 1.0f);
      if (lane % 4 == 0) {
        arguments.end_max[at.index] = state.max[i];
        arguments.end_sum[at.index] = state.sum[i];
      }
    }
  }

  __device__ __forceinline__ void write_partial(const AttentionForwardItem& item, const RowState& state,
                                                const Accumulators& acc) const {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const Place at = place(item, i);
      if (!at.owned) continue;
      const RowEnd end = row_end(state.max[i] * score_scale(), state.sum[i]);
      const u32 before = C::kCtas > 1 ? cluster_rank() * C::kTokens : 0;
      const u64 slot_row = u64(u32(item.partial)) * C::kTileTokens + before + row(i) / C::kPack;
      const u64 index = slot_row * arguments.heads_q + head(item, i);
      write_floats(acc, arguments.partial_out + index * arguments.head_dim_v, i, end.factor);
      if (lane % 4 == 0) arguments.partial_lse[index] = end.lse;
    }
  }

  __device__ __forceinline__ void write_result(const AttentionForwardItem& item, const RowState& state,
                                               const Accumulators& acc) const {
    RowEnd ends[2];
    if (arguments.sink_rows == 0) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) ends[i] = row_end(state.max[i] * score_scale(), state.sum[i]);
    } else {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        ends[i] = row_end(state.max[i] * score_scale(), state.sum[i], arguments.sink + head(item, i),
                          arguments.sink_rows, arguments.heads_q);
      }
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const Place at = place(item, i);
      if (at.owned && lane % 4 == 0) arguments.lse[at.index] = ends[i].lse;
      Element* to = arguments.out + at.index * arguments.head_dim_v + 8 * (lane % 2) + 4 * (lane % 4 / 2);
#pragma unroll
      for (u32 j = 0; j < C::kHeadDimV / 8; j += 2) {
        const auto pair = [&](u32 group) {
          const u32 place = 4 * group + 2 * i;
          return pack(acc[place] * ends[i].factor, acc[place + 1] * ends[i].factor);
        };
        const uint2 bits = pair_transpose(pair(j), pair(j + 1), lane);
        if (at.owned && 8 * (j + lane % 2) < arguments.head_dim_v) *reinterpret_cast<uint2*>(to + 8 * j) = bits;
      }
    }
  }
};

}  // namespace counterpoint
