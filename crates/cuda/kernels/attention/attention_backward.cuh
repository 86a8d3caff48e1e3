// Attention backward for Hopper: dk, dv of the keys that a CTA owns, and its share of dq.
//
// A CTA takes items (a tile of 128 keys, a key head) from a queue. It holds K and V in shared memory and walks the blocks of
// query rows that see the tile, for every query head of the key head, so dk and dv stay in registers until the item ends.
//
// Four warpgroups:
//  - two "key" warpgroups own 64 keys each. All their products have keys as rows: S^T = K Q^T, dP^T = V dO^T, and then P^T
//    and dS^T are in registers just as operand A of dV += P^T dO and dK += dS^T Q wants them.
//  - a "query" warpgroup computes dQ^T = K^T dS^T of each block from the dS^T that the key warpgroups leave in shared memory.
//    So the key warpgroups wait for nobody's dq, have no registers for it, and are free to drift apart: one's exponentials
//    run under the other's products.
//  - one has a warp that loads, and a thread that adds dq to global memory by the copy engine.
//
// The order in a key warpgroup, block after block: S; P; dP and dV are issued together, and dS is computed as soon as dP is
// there; dK. P is packed before dP begins, because registers do not hold S, dP, dK and dV at a time.
#pragma once

#include "attention/tile_schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bits.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/flag.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace counterpoint {

// What the launcher chooses when it compiles.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef OUTPUT_F32
#define OUTPUT_F32 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif

namespace backward {

constexpr u32 kHeadDim = HEAD_DIM;             // of the tile; the tensors' may be smaller, the rest reads as zeros
constexpr u32 kKeys = 128;                     // keys of a tile
constexpr u32 kRows = HEAD_DIM <= 64 && !SOFTCAP ? 128 : 64;  // query rows of a block
constexpr u32 kStages = 2;
constexpr u32 kChunks = (kHeadDim + 63) / 64;  // operands lie in shared memory as columns of 64 elements (128 bytes)
constexpr u32 kThreads = 512;
constexpr u32 kKeyRegisters = 208;
constexpr u32 kQueryRegisters = 64;
constexpr u32 kLoadRegisters = 32;
constexpr u32 kItemClasses = 16;
constexpr bool kSoftcap = SOFTCAP != 0;
constexpr bool kDeterministic = DETERMINISTIC != 0;
constexpr bool kOutputF32 = OUTPUT_F32 != 0;
static_assert(kHeadDim == 64 || kHeadDim == 128, "head sizes that the accumulators of two warpgroups hold");

// A block of query rows, as the query warpgroup announces it to the key warpgroups.
struct Step {
  i32 row, row_end;            // its rows, in the tensor of queries; those from row_end on belong to others
  u32 bound_begin, bound_end;  // equal: nothing of it is masked, but for keys beyond the tile's end
  i32 key, key_end;            // the tile
  u32 head_kv;
  u32 flags;
  u32 head_q;
  u32 turn;  // how many add to these rows before, where turns are taken
};
constexpr u32 kFirst = 1, kLast = 2, kEmpty = 4, kExit = 8, kBounded = 16;
constexpr u32 kOdd = 32;  // the parity of the item among those that are not empty, for the barriers of K and V
constexpr u32 kSteps = 8;  // announcements in flight; more than stages, because the query warpgroup reads them late

constexpr u32 kKeyBytes = kChunks * kKeys * 128;
constexpr u32 kRowBytes = kChunks * kRows * 128;
constexpr u32 kDsBytes = kKeys * kRows * 2;
constexpr u32 kPartBytes = 64 * 64 * 4;  // dq leaves in parts of 64 rows x 64 columns
constexpr u32 kParts = kChunks * kRows / 64;
constexpr u32 kDqBuffers = 2 * kParts;  // so that the additions of a block have the time of a block

}  // namespace backward

// The one parameter of the kernel. Row strides of the tensors are in the tensor maps.
struct AttentionBackwardArguments {
  TensorMap q, dout;  // elements [rows_q, heads_q, head_dim], box 64 x 1 x kRows, swizzle 128
  TensorMap k, v;     // elements [rows_k, heads_kv, head_dim], box 64 x 1 x 128, swizzle 128
  TensorMap dq;       // f32 [rows_q, heads_q, head_dim], box 32 x 1 x 64, swizzle 128
  void* dk;           // [rows_k, heads_kv, head_dim], f32 or elements
  void* dv;           // [rows_k, heads_kv, head_dim_v], likewise
  const float* row_lse;    // [heads_q, rows_q]: -lse * log2(e) (attention_backward_rows.cuh)
  const float* row_delta;  // [heads_q, rows_q]
  const Tile* tiles;
  const TileRun* runs;
  const TileBound* bounds;
  u32* cursors;                // [heads_kv]: rows, see Walk
  u32* queue;                  // two words, zero before the first launch; each launch leaves them zero
  const TurnSpan* turn_spans;  // with DETERMINISTIC: who adds to dq when
  const u32* turn_begins;      // into turn_spans, for each block of kRows rows
  u32* turns;                  // [blocks of rows, heads_q], zero before each launch: how many have added
  u32* fault;                  // set to 1 when a turn never came
  u32 num_tiles;
  u32 rows_q;
  u32 heads_kv;
  u32 group;  // query heads of a key head
  u32 head_dim;
  u32 head_dim_v;
  u32 stretch;                            // blocks, see Walk
  u32 classes;                            // of tiles, see Walk
  u32 class_end[backward::kItemClasses];  // tiles up to which each class goes
  float scale;
  float scale_log2;  // scale * log2(e); with SOFTCAP: 2 * log2(e) * scale / softcap
  float cap_log2;    // softcap * log2(e)
};

namespace backward {

// The low word of wgmma_descriptor; the high word is the same for all operands. Words are half the registers.
__device__ __forceinline__ u32 operand(u32 address, u32 chunk_bytes = 16) {
  return (address >> 4) | ((chunk_bytes >> 4) << 16);
}
__device__ __forceinline__ u64 descriptor(u32 operand, u32 bytes) { return (u64(0x40000040u) << 32) | (operand + (bytes >> 4)); }

// Which of two buffers step `count` uses, and the parity of the round in which it does.
__device__ __forceinline__ u32 slot_of(u32 count) { return count % 2; }
__device__ __forceinline__ u32 parity_of(u32 count) { return count / 2 % 2; }

// How many others add to the block of rows from `row` on before the tile of this number does.
__device__ __forceinline__ u32 turn_of(const AttentionBackwardArguments& params, i32 row, u32 tile) {
  const u32 block = u32(row) / kRows;
  const u32 end = __ldg(params.turn_begins + block + 1);
  for (u32 i = __ldg(params.turn_begins + block); i < end; ++i) {
    const uint4 span = __ldg(reinterpret_cast<const uint4*>(params.turn_spans + i));
    if (tile < span.y) return span.z + tile - span.x;
  }
  return 0;
}

// The walk over items and blocks. Only the loading thread uses it; it lies in shared memory because that thread's warpgroup
// has few registers.
//
// Tiles come in classes of similar work, the heaviest first. Within a class the queue goes head by head, so that CTAs that run
// together read the same rows; and class by class, so that the last items are short ones and CTAs finish together.
//
// Blocks are walked from the last to the first: under causal masks all tiles of a sequence see its last rows, so tiles that
// start together read the same rows at the same time, from the second level cache. For the same reason the query heads of a
// key head take turns after a stretch of blocks.
//
// An item that starts later than its neighbours starts where they are, and goes round: the rows that they read are in the
// cache, and those of the end no longer. `cursors` says of each key head where the last stretch began; it is a hint, and
// whatever it says, every block is walked once.
struct Walk {
  static constexpr i32 kFirstRow = -1;
  static constexpr u32 kMostRunsBack = 4;
  Step next;               // what the next call of advance() announces
  u32 ticket;              // the item after this one, asked for early because the queue is far away
  u32 run;                 // runs are walked backwards
  u32 run_begin, run_end;  // of the item
  u32 last_run;            // where the item's last block is: at last_row of this run,
  i32 last_row;            // or, where that is kFirstRow, at the run's first block
  i32 rows_begin, rows_end;  // of the run
  u32 tile;                // number of the item's tile, where turns are taken
  u32 stretch_run, stretch_left;  // blocks that one head walks before the next head walks the same
  i32 stretch_row;
  u32 count;               // steps announced
  u32 items;               // items opened that have something to see

  __device__ __forceinline__ void begin(const AttentionBackwardArguments& params) {
    count = items = 0;
    ticket = atomicAdd(params.queue, 1u);
    open_item(params);
  }

  // Opens the last block of the run before `run`.
  __device__ __forceinline__ void open_run(const AttentionBackwardArguments& params) {
    const int4 words = __ldg(reinterpret_cast<const int4*>(params.runs + --run));
    rows_begin = words.x;
    rows_end = words.y;
    next.row = words.x + (words.y - 1 - words.x) / i32(kRows) * i32(kRows);
    next.bound_begin = u32(words.z);
    next.bound_end = u32(words.w);
  }

  // Opens the block where the others of this key head are now, if the item has it among its last runs, or else its last block.
  // The walk goes round from there.
  __device__ __forceinline__ void open_first_run(const AttentionBackwardArguments& params) {
    last_run = run_begin;
    last_row = kFirstRow;
    open_run(params);
    if (kDeterministic) return;  // turns are taken in one order
    const i32 cursor = i32(load_relaxed(params.cursors + next.head_kv));
    if (cursor >= next.row) return;
    for (u32 i = 0; i < kMostRunsBack && rows_begin > cursor; ++i) {
      if (run == run_begin) break;
      open_run(params);
    }
    if (rows_begin > cursor) {
      run = run_end;
      open_run(params);
    } else if (cursor < next.row) {
      next.row = rows_begin + (cursor - rows_begin) / i32(kRows) * i32(kRows);
      last_run = run;
      last_row = next.row + i32(kRows);
    } else if (run + 1 < run_end) {
      last_run = run + 1;
    }
  }

  // Says what there is to know of the block at next.row.
  __device__ __forceinline__ void open_block(const AttentionBackwardArguments& params) {
    next.row_end = min(rows_end, next.row + i32(kRows));
    const bool bounded = next.bound_begin != next.bound_end || next.key_end - next.key < i32(kKeys);
    next.flags = (bounded ? kBounded : 0) | (items % 2 ? 0 : kOdd);
    if (kDeterministic) next.turn = turn_of(params, next.row, tile);
    if (last_block() && last_head(params)) next.flags |= kLast;
  }

  __device__ __forceinline__ bool last_block() const {
    return run == last_run && next.row == (last_row == kFirstRow ? rows_begin : last_row);
  }
  __device__ __forceinline__ bool last_head(const AttentionBackwardArguments& params) const {
    return next.head_q + 1 == (next.head_kv + 1) * params.group;
  }

  // Remembers the block at next.row as the one from which the other heads start too.
  __device__ __forceinline__ void open_stretch(const AttentionBackwardArguments& params) {
    next.head_q = next.head_kv * params.group;
    stretch_run = run + 1;
    stretch_row = next.row;
    stretch_left = params.stretch;
    if (!kDeterministic) store_relaxed(params.cursors + next.head_kv, u32(next.row));
  }

  __device__ __forceinline__ void open_item(const AttentionBackwardArguments& params) {
    if (ticket >= params.num_tiles * params.heads_kv) {
      next.flags = kExit;
      return;
    }
    u32 rest = ticket;
    u32 first = 0;
    u32 tiles = params.class_end[0];
    for (u32 i = 1; rest >= tiles * params.heads_kv; ++i) {
      rest -= tiles * params.heads_kv;
      first = params.class_end[i - 1];
      tiles = params.class_end[i] - first;
    }
    const Tile* item = params.tiles + first + rest % tiles;
    const int4 words = __ldg(reinterpret_cast<const int4*>(item));
    if (kDeterministic) tile = __ldg(&item->number);
    ticket = atomicAdd(params.queue, 1u);
    next.key = words.x;
    next.key_end = words.y;
    next.head_kv = rest / tiles;
    run_begin = u32(words.z);
    run = run_end = u32(words.w);
    if (run == run_begin) {
      next.flags = kFirst | kLast | kEmpty;
      return;
    }
    ++items;
    open_first_run(params);
    open_stretch(params);
    open_block(params);
    next.flags |= kFirst;
  }

  // Goes on from the step in `next`.
  __device__ __forceinline__ void advance(const AttentionBackwardArguments& params) {
    if (next.flags & kLast) {
      open_item(params);
      return;
    }
    const bool stretch_ends = --stretch_left == 0 || last_block();
    if (stretch_ends && !last_head(params)) {
      ++next.head_q;
      run = stretch_run;
      open_run(params);
      next.row = stretch_row;
      stretch_left = params.stretch;
    } else {
      if (next.row > rows_begin) {
        next.row -= kRows;
      } else {
        if (run == run_begin) run = run_end;
        open_run(params);
      }
      if (stretch_ends) open_stretch(params);
    }
    open_block(params);
  }
};

struct Storage {
  u8 k[kKeyBytes];
  u8 v[kKeyBytes];
  u8 q[kStages][kRowBytes];
  u8 dout[kStages][kRowBytes];
  u8 ds[2][kDsBytes];
  u8 dq[kDqBuffers][kPartBytes];
  float lse[kStages][kRows];
  float delta[kStages][kRows];
  Step steps[kSteps];
  Walk walk;
  u64 full_k, full_v;
  u64 full_q[kStages], full_dout[kStages], empty[kStages];
  u64 full_ds[2], empty_ds[2];
  u64 full_dq[kDqBuffers], empty_dq[kDqBuffers];
};
// The launcher asks for this much dynamic shared memory.
constexpr u32 kSharedBytes = sizeof(Storage);
static_assert(kSharedBytes <= 232448, "shared memory of a CTA");

// Aligned by declaration, so that every address in it is a constant: the key warpgroups have no register for a base.
extern __shared__ __align__(1024) u8 dynamic_shared[];
__device__ __forceinline__ Storage& storage() { return *reinterpret_cast<Storage*>(dynamic_shared); }

// The flags of an announcement. They decide the way of all lanes: the shuffle tells the compiler that the lanes agree.
__device__ __forceinline__ u32 step_flags(const Storage& shared, u32 count) {
  return __shfl_sync(0xffffffffu, shared.steps[count % kSteps].flags, 0);
}

// The first of this thread's two keys in the tile; the other is 8 further. Asked for again where it is wanted, because the
// main loop has no register to keep it.
__device__ __forceinline__ i32 own_key() {
  const u32 thread = threadIdx.x - 256;  // the key warpgroups come last
  return i32(16 * (thread / 32) + thread % 32 / 4);
}

// Which of a thread's rows are unmasked for its key `offset`: bit 8 (j % 4) + e of word j / 4 is column 8 j + 2 (lane % 4) + e.
__device__ __forceinline__ void key_rows(const AttentionBackwardArguments& params, const Step& step, i32 offset,
                                         u32 (&words)[kRows / 32]) {
  const i32 key = step.key + own_key() + offset;
  const i32 limit = step.row_end - step.row;
#pragma unroll
  for (u32 w = 0; w < kRows / 32; ++w) words[w] = 0;
  if (key >= step.key_end) return;
  if (step.bound_begin == step.bound_end) {
#pragma unroll
    for (u32 w = 0; w < kRows / 32; ++w) words[w] = 0xffffffffu;
    return;
  }
  for (u32 b = step.bound_begin; b < step.bound_end; ++b) {
    const int4* bound = reinterpret_cast<const int4*>(params.bounds + b);
    const int4 box = __ldg(bound);
    const int2 diagonals = __ldg(reinterpret_cast<const int2*>(bound + 1));
    const bool seen = key >= box.z && key < box.w;
    const i32 low = max(box.x, key - diagonals.y) - step.row;
    const i32 high = seen ? min(min(box.y, key - diagonals.x + 1) - step.row, limit) : 0;
#pragma unroll
    for (u32 w = 0; w < kRows / 32; ++w) {
      const i32 first = min(max(low - i32(32 * w), 0), 32);
      const i32 end = min(max(high - i32(32 * w), 0), 32);
      words[w] |= bit_mask(u32(first), u32(max(end - first, 0)));
    }
  }
#pragma unroll
  for (u32 w = 0; w < kRows / 32; ++w) words[w] >>= 2 * (threadIdx.x % 4);
}

// Stores 64 keys x kHeadDim accumulators of a warpgroup, times `factor`.
__device__ __forceinline__ void store_gradient(void* out, u32 head_dim, const AttentionBackwardArguments& params,
                                               const Step& step, const float (&d)[kHeadDim / 2], float factor) {
  const i32 key = step.key + own_key();
  const u32 c = threadIdx.x % 4;
  const u64 row_stride = u64(params.heads_kv) * head_dim;
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    const bool owned = row < step.key_end;
    const u64 base = u64(u32(row)) * row_stride + u64(step.head_kv) * head_dim;
    if (kOutputF32) {
      float* to = static_cast<float*>(out) + base;
#pragma unroll
      for (u32 j = 0; j < kHeadDim / 8; ++j) {
        const u32 column = 8 * j + 2 * c;
        if (owned && column < head_dim) {
          *reinterpret_cast<float2*>(to + column) =
              make_float2(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
        }
      }
    } else {
      // Neighbours swap pairs, so that a thread writes 8 bytes and four threads a whole sector.
      Element* to = static_cast<Element*>(out) + base;
      const bool odd = c & 1;
#pragma unroll
      for (u32 j = 0; j < kHeadDim / 8; j += 2) {
        const u32 even_tile = pack(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
        const u32 odd_tile = pack(d[4 * j + 4 + 2 * i] * factor, d[4 * j + 5 + 2 * i] * factor);
        const u32 other = __shfl_xor_sync(0xffffffffu, odd ? even_tile : odd_tile, 1);
        const u32 column = 8 * (j + (odd ? 1 : 0)) + 2 * (c & ~1u);
        if (owned && column < head_dim) {
          *reinterpret_cast<uint2*>(to + column) =
              make_uint2(odd ? other : even_tile, odd ? odd_tile : other);
        }
      }
    }
  }
}

// Zeros for keys that nobody sees.
__device__ __forceinline__ void store_zeros(void* out, u32 head_dim, const AttentionBackwardArguments& params,
                                            const Step& step) {
  const i32 key = step.key + own_key();
  const u32 lane = threadIdx.x % 32;
  constexpr u32 kSize = kOutputF32 ? 4 : 2;
  for (u32 i = 0; i < 2; ++i) {
    const i32 row = key + i32(8 * i);
    if (row >= step.key_end) continue;
    u8* to = static_cast<u8*>(out) + (u64(u32(row)) * params.heads_kv + step.head_kv) * head_dim * kSize;
    for (u32 x = 16 * (lane % 4); x < head_dim * kSize; x += 64) {
      *reinterpret_cast<uint4*>(to + x) = make_uint4(0, 0, 0, 0);
    }
  }
}

// S^T or dP^T of 64 keys: keys [64, head_dim] times rows [kRows, head_dim].
__device__ __forceinline__ void multiply_keys_rows(float (&d)[kRows / 2], u32 keys, u32 rows) {
  Wgmma<kRows>::template ss_first<Major::kK, Major::kK>(d, descriptor(keys, 0), descriptor(rows, 0));
#pragma unroll
  for (u32 k = 1; k < kHeadDim / 16; ++k) {
    Wgmma<kRows>::template ss<Major::kK, Major::kK>(d, descriptor(keys, (k / 4) * (kKeys * 128) + (k % 4) * 32),
                                                    descriptor(rows, (k / 4) * (kRows * 128) + (k % 4) * 32), 1);
  }
}

template <u32 kCount>
__device__ __forceinline__ void set_zero(float (&d)[kCount]) {
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) d[i] = 0.0f;
}

// Two f32 to a pair of f16 and back, whatever the elements are.
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 unpack_half(u32 pair) {
  float2 values;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}

// Where this lane's row of a stored dS^T matrix lies in a buffer: 128 bytes a key, 16-byte pieces swizzled by the key. Asked
// for again at every block, like own_key.
__device__ __forceinline__ u32 own_matrix_row(u32 buffer) {
  const u32 thread = threadIdx.x - 256;
  const u32 key = 16 * (thread / 32) + thread % 16;
  return buffer + key * 128 + (((thread % 32 / 16) ^ (key % 8)) << 4);
}

// tanh(x / (2 log2(e))), to an absolute error of 2^-22: the instruction for it is good to 2^-11 only.
__device__ __forceinline__ float tanh_of(float x) { return fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(x)), 1.0f); }

// What a row of queries has: the value of the columns 8 j + 2 (lane % 4) + {0, 1} of an accumulator.
__device__ __forceinline__ float2 column_values(const float* columns, u32 j) {
  return *reinterpret_cast<const float2*>(columns + 2 * (threadIdx.x % 4) + 8 * j);
}

// The two warpgroups that own keys.
__device__ __forceinline__ void key_role(const AttentionBackwardArguments& params, Storage& shared, u32 warpgroup) {
  const u32 keys_k = operand(shared_address(shared.k) + warpgroup * 64 * 128);
  const u32 keys_v = operand(shared_address(shared.v) + warpgroup * 64 * 128);

  u32 count = 0;
  while (true) {
    mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
    u32 flags = step_flags(shared, count);
    if (flags & (kExit | kEmpty)) {
      mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count) ^ 1);
      if (elect_one()) {
        mbarrier_arrive(&shared.full_ds[slot_of(count)]);
        mbarrier_arrive(&shared.empty[slot_of(count)]);
      }
      if (flags & kExit) break;
      const Step& step = shared.steps[count % kSteps];
      store_zeros(params.dk, params.head_dim, params, step);
      store_zeros(params.dv, params.head_dim_v, params, step);
      __syncwarp();
      ++count;
      continue;
    }
    float dk[kHeadDim / 2], dv[kHeadDim / 2];
    set_zero(dk);
    set_zero(dv);
    mbarrier_wait(&shared.full_k, flags & kOdd ? 1 : 0);
    while (true) {
      flags = step_flags(shared, count);
      u32 p[kRows / 16][4], ds[kRows / 16][4];
      // P (times the softcap's slope) for dS, in f16 whatever the elements are: it is at most one, so that f16 has it three bits
      // better than bf16, and dS is as good as if P had stayed in f32.
      u32 w[kRows / 16][4];
      {
        float s[kRows / 2];
        wgmma_fence();
        multiply_keys_rows(s, keys_k, operand(shared_address(shared.q[0]) + slot_of(count) * kRowBytes));
        wgmma_commit();
        const bool bounded = flags & kBounded;
        u32 rows[2][kRows / 32];
        if (bounded) {
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            key_rows(params, shared.steps[count % kSteps], i32(8 * i), rows[i]);
          }
        }
        __syncwarp();
        // dK of the block before is done: its rows may go.
        wgmma_wait<1>();
        if (flags & kFirst) {
          mbarrier_wait(&shared.full_v, flags & kOdd ? 1 : 0);
        } else if (elect_one()) {
          mbarrier_arrive(&shared.empty[slot_of(count - 1)]);
        }
        wgmma_wait<0>();
        pin(s);
        // The scores in powers of two, less the row's denominator; with a softcap only its tanh, as yet.
#pragma unroll
        for (u32 j = 0; j < kRows / 8; ++j) {
          const float2 lse = column_values(shared.lse[slot_of(count)], j);
#pragma unroll
          for (u32 m = 0; m < 4; ++m) {
            float& score = s[4 * j + m];
            if (kSoftcap) {
              score = tanh_of(score * params.scale_log2);
            } else {
              score = fmaf(score, params.scale_log2, m % 2 ? lse.y : lse.x);
            }
          }
        }
        if (bounded) {
#pragma unroll
          for (u32 j = 0; j < kRows / 8; ++j) {
#pragma unroll
            for (u32 m = 0; m < 4; ++m) {
              if (!(rows[m / 2][j / 4] & (1u << (8 * (j % 4) + m % 2)))) s[4 * j + m] = minus_infinity();
            }
          }
        }
#pragma unroll
        for (u32 j = 0; j < kRows / 8; ++j) {
          const float2 lse = column_values(shared.lse[slot_of(count)], j);
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            float low = s[4 * j + 2 * i];
            float high = s[4 * j + 2 * i + 1];
            const u32 at = 2 * (j % 2) + i;
            if constexpr (kSoftcap) {
              const float slope_low = fmaxf(1.0f - low * low, 0.0f);
              const float slope_high = fmaxf(1.0f - high * high, 0.0f);
              low = exp2_fast(fmaf(low, params.cap_log2, lse.x));
              high = exp2_fast(fmaf(high, params.cap_log2, lse.y));
              w[j / 2][at] = pack_half(low * slope_low, high * slope_high);
            } else {
              low = exp2_fast(low);
              high = exp2_fast(high);
              w[j / 2][at] = pack_half(low, high);
            }
            p[j / 2][at] = pack(low, high);
          }
        }
      }
      {
        float dp[kRows / 2];
        mbarrier_wait(&shared.full_dout[slot_of(count)], parity_of(count));
        wgmma_fence();
        multiply_keys_rows(dp, keys_v, operand(shared_address(shared.dout[0]) + slot_of(count) * kRowBytes));
        wgmma_commit();
      const u32 dout_rows = operand(shared_address(shared.dout[0]) + slot_of(count) * kRowBytes, kRows * 128);
#pragma unroll
      for (u32 k = 0; k < kRows / 16; ++k) {
        Wgmma<kHeadDim>::template rs<Major::kMN>(dv, p[k], descriptor(dout_rows, k * 2048), 1);
      }
      wgmma_commit();
        mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count) ^ 1);
        wgmma_wait<1>();
        pin(dp);
        const u32 ds_buffer = own_matrix_row(shared_address(shared.ds[0])) + slot_of(count) * kDsBytes;
#pragma unroll
        for (u32 k = 0; k < kRows / 16; ++k) {
#pragma unroll
          for (u32 n = 0; n < 2; ++n) {
            const float2 delta = column_values(shared.delta[slot_of(count)], 2 * k + n);
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
              const u32 at = 2 * n + i;
              const float2 weight = unpack_half(w[k][at]);
              const float low = weight.x * (dp[8 * k + 2 * at] - delta.x);
              const float high = weight.y * (dp[8 * k + 2 * at + 1] - delta.y);
              ds[k][at] = pack(low, high);
            }
          }
          store_matrix_x4((ds_buffer ^ ((k % 4) << 5)) + (k / 4) * (kKeys * 128), ds[k]);
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (elect_one()) mbarrier_arrive(&shared.full_ds[slot_of(count)]);
      wgmma_fence();
      const u32 q_rows = operand(shared_address(shared.q[0]) + slot_of(count) * kRowBytes, kRows * 128);
#pragma unroll
      for (u32 k = 0; k < kRows / 16; ++k) {
        Wgmma<kHeadDim>::template rs<Major::kMN>(dk, ds[k], descriptor(q_rows, k * 2048),
                                                 1);
      }
      wgmma_commit();
      // Asked for again, which saves a register.
      const bool last = step_flags(shared, count) & kLast;
      ++count;
      if (last) break;
      wgmma_wait<0>();
      mbarrier_wait(&shared.full_q[slot_of(count)], parity_of(count));
    }
    wgmma_wait<0>();
    if (elect_one()) mbarrier_arrive(&shared.empty[slot_of(count - 1)]);
    pin(dk);
    pin(dv);
    const Step& step = shared.steps[(count - 1) % kSteps];
    store_gradient(params.dv, params.head_dim_v, params, step, dv, 1.0f);
    store_gradient(params.dk, params.head_dim, params, step, dk, params.scale);
    __syncwarp();
  }
}

// Announces the walk's next step and fetches its rows, when the slot is free. One warp; its first lane walks.
__device__ __forceinline__ void load_rows(const AttentionBackwardArguments& params, Storage& shared, u32 lane) {
  Walk& walk = shared.walk;
  __syncwarp();
  const u32 count = walk.count;
  const u32 flags = walk.next.flags;
  if (flags & kExit && count > 0 && shared.steps[(count - 1) % kSteps].flags & kExit) return;
  const u32 slot = slot_of(count);
  const i32 row = walk.next.row;
  const u32 head = walk.next.head_q;
  u64* full_q = &shared.full_q[slot];
  u64* full_dout = &shared.full_dout[slot];
  mbarrier_wait(&shared.empty[slot], parity_of(count) ^ 1);
  __syncwarp();
  const bool rows = !(flags & (kExit | kEmpty));
  if (lane == 0) {
    shared.steps[count % kSteps] = walk.next;
    walk.count = count + 1;
    mbarrier_arrive_expect(full_q, rows ? kRowBytes : 0);
    mbarrier_arrive_expect(full_dout, rows ? kRowBytes : 0);
    if (rows) {
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        tma_load_3d(shared.q[slot] + c * kRows * 128, &params.q, full_q, 64 * c, head, row);
      }
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        tma_load_3d(shared.dout[slot] + c * kRows * 128, &params.dout, full_dout, 64 * c, head, row);
      }
    }
  }
  // The copy engine wants places that are multiples of 16 bytes; a block may begin at any row.
  const u64 first = u64(head) * params.rows_q;
  if (rows) {
#pragma unroll
    for (u32 i = 0; i < kRows; i += 32) {
      const u32 own = u32(row) + i + lane;
      cp_async_4(shared_address(&shared.lse[slot][i + lane]), params.row_lse + first + own, own < params.rows_q);
    }
  }
  cp_async_arrive(full_q);
  if (rows) {
#pragma unroll
    for (u32 i = 0; i < kRows; i += 32) {
      const u32 own = u32(row) + i + lane;
      cp_async_4(shared_address(&shared.delta[slot][i + lane]), params.row_delta + first + own, own < params.rows_q);
    }
  }
  cp_async_arrive(full_dout);
  if (lane == 0 && !(flags & kExit)) walk.advance(params);
  __syncwarp();
}

__device__ __forceinline__ void load_keys(const TensorMap* map, u8* to, u64* full, const Step& step) {
  if (step.flags & (kExit | kEmpty)) return;
  mbarrier_arrive_expect(full, kKeyBytes);
#pragma unroll
  for (u32 c = 0; c < kChunks; ++c) tma_load_3d(to + c * kKeys * 128, map, full, 64 * c, step.head_kv, step.key);
}

// The warp that loads.
__device__ __forceinline__ void load_role(const AttentionBackwardArguments& params, Storage& shared) {
  const u32 lane = threadIdx.x;
  if (lane == 0) shared.walk.begin(params);
  load_rows(params, shared, lane);
  if (lane == 0) {
    load_keys(&params.k, shared.k, &shared.full_k, shared.steps[0]);
    load_keys(&params.v, shared.v, &shared.full_v, shared.steps[0]);
  }
  for (u32 count = 0; !(shared.steps[count % kSteps].flags & kExit); ++count) {
    load_rows(params, shared, lane);
    if (shared.steps[count % kSteps].flags & kLast) {
      const Step& next = shared.steps[(count + 1) % kSteps];
      // Who has computed dS of the last block reads V no more; when dq of it is computed, nobody reads K.
      mbarrier_wait(&shared.full_ds[slot_of(count)], parity_of(count));
      if (lane == 0) load_keys(&params.v, shared.v, &shared.full_v, next);
      mbarrier_wait(&shared.empty_ds[slot_of(count)], parity_of(count));
      if (lane == 0) load_keys(&params.k, shared.k, &shared.full_k, next);
      __syncwarp();
    }
  }
}

// Polls of a turn before a CTA gives up waiting: seconds. Whoever is waited for has started, so only a fault gets there.
constexpr u32 kMostPolls = 1u << 26;

// Waits until `turn` others have added. A wait that does not end is a fault, which the host finds in `fault`.
__device__ __forceinline__ void await_turn(const u32* turns, u32 turn, u32* fault) {
  for (u32 polls = 0; load_acquire(turns) != turn; ++polls) {
    if (polls == kMostPolls) {
      *fault = 1;
      break;
    }
  }
  fence_async_proxy_all();
}

// The thread that adds to dq what the query warpgroup leaves in shared memory.
__device__ __forceinline__ void add_role(const AttentionBackwardArguments& params, Storage& shared) {
  for (u32 count = 0;; ++count) {
    const u32 slot = slot_of(count);
    mbarrier_wait(&shared.full_dq[slot * kParts], parity_of(count));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & kExit) break;
    const bool rows = !(step.flags & kEmpty);
    u32* turns = nullptr;
    if (kDeterministic && rows) {
      turns = params.turns + u64(u32(step.row) / kRows) * (params.heads_kv * params.group) + step.head_q;
      await_turn(turns, step.turn, params.fault);
    }
#pragma unroll 1
    for (u32 part = 0; part < kParts; ++part) {
      const u32 buffer = slot * kParts + part;
      if (part > 0) mbarrier_wait(&shared.full_dq[buffer], parity_of(count));
      if (rows) {
        const u32 column = 64 * (part % kChunks);
        const i32 row = step.row + i32(64 * (part / kChunks));
#pragma unroll 1
        for (u32 box = 0; box < 2; ++box) {
          tma_reduce_add_3d(&params.dq, shared.dq[buffer] + box * (64 * 128), column + 32 * box, step.head_q, row);
        }
      }
      tma_store_commit();
      // The buffer before this one has been read by now.
      tma_store_wait_read<1>();
      if (count > 0 || part > 0) {
        mbarrier_arrive(&shared.empty_dq[part > 0 ? buffer - 1 : (slot ^ 1) * kParts + kParts - 1]);
      }
    }
    if (kDeterministic && rows) {
      // The additions are done: it is the next tile's turn.
      tma_store_wait<0>();
      fence_async_proxy_all();
      add_release(turns, 1);
    }
  }
  tma_store_wait<0>();
}

// The warpgroup that owns query rows: dq.
__device__ __forceinline__ void query_role(const AttentionBackwardArguments& params, Storage& shared) {
  const u32 thread = threadIdx.x % 128;
  const u32 lane = thread % 32;
  const u32 warp = thread / 32;
  // Element (column lane / 4 + 8 i of 16 warp .., row 8 j + 2 (lane % 4) + e) of a part goes to box column / 32, swizzled.
  const u32 column = 16 * warp + lane / 4;
  const u32 row0 = 2 * (lane % 4);
  u32 offsets[2][2];
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
#pragma unroll
    for (u32 e = 0; e < 2; ++e) {
      const u32 x = column + 8 * i;
      const u32 r = row0 + e;
      offsets[i][e] = (x / 32) * (64 * 128) + r * 128 + ((((x % 32) / 4) ^ r) << 4) + (x % 4) * 4;
    }
  }

  for (u32 count = 0;; ++count) {
    const u32 slot = slot_of(count);
    // Not full_q: the rows of the step after next may be there before this warpgroup comes to look.
    mbarrier_wait(&shared.full_ds[slot], parity_of(count));
    const Step& step = shared.steps[count % kSteps];
    if (step.flags & (kExit | kEmpty)) {
      for (u32 part = 0; part < kParts; ++part) {
        const u32 buffer = slot * kParts + part;
        mbarrier_wait(&shared.empty_dq[buffer], parity_of(count) ^ 1);
        if (lane == 0) mbarrier_arrive(&shared.full_dq[buffer]);
      }
      if (step.flags & kExit) break;
      if (lane == 0) mbarrier_arrive(&shared.empty_ds[slot]);
      continue;
    }
    if (step.flags & kFirst) mbarrier_wait(&shared.full_k, step.flags & kOdd ? 1 : 0);
#pragma unroll 1  // what the compiler would keep for each part costs registers that this warpgroup has not
    for (u32 part = 0; part < kParts; ++part) {
      const u32 chunk = part % kChunks;
      const u32 half = part / kChunks;
      float dq[32];
      const u32 keys = operand(shared_address(shared.k) + chunk * kKeys * 128, kKeys * 128);
      const u32 rows = operand(shared_address(shared.ds[0]) + slot * kDsBytes + half * kKeys * 128, kKeys * 128);
      __syncwarp();
      wgmma_fence();
      Wgmma<64>::ss_first<Major::kMN, Major::kMN>(dq, descriptor(keys, 0), descriptor(rows, 0));
#pragma unroll
      for (u32 k = 1; k < kKeys / 16; ++k) {
        Wgmma<64>::ss<Major::kMN, Major::kMN>(dq, descriptor(keys, k * 2048), descriptor(rows, k * 2048), 1);
      }
      wgmma_commit();
      const u32 buffer = slot * kParts + part;
      mbarrier_wait(&shared.empty_dq[buffer], parity_of(count) ^ 1);
      wgmma_wait<0>();
      pin(dq);
      if (part + 1 == kParts && lane == 0) mbarrier_arrive(&shared.empty_ds[slot]);
      u8* to = shared.dq[buffer];
#pragma unroll
      for (u32 j = 0; j < 8; ++j) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
#pragma unroll
          for (u32 e = 0; e < 2; ++e) {
            *reinterpret_cast<float*>(to + offsets[i][e] + j * 1024) = dq[4 * j + 2 * i + e] * params.scale;
          }
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.full_dq[buffer]);
    }
  }
}

}  // namespace backward

// The body of the kernel, which is launched with kThreads threads and kSharedBytes of dynamic shared memory, one CTA a
// multiprocessor at most.
__device__ __forceinline__ void attention_backward(const AttentionBackwardArguments& params) {
  using namespace backward;
  Storage& shared = storage();
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.full_k, 1);
    mbarrier_init(&shared.full_v, 1);
    for (u32 i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full_q[i], 1 + 32);  // the copy engine's, and the loading warp's copies of lse and delta
      mbarrier_init(&shared.full_dout[i], 1 + 32);
      mbarrier_init(&shared.empty[i], 8);  // warps of the key warpgroups
    }
    for (u32 i = 0; i < 2; ++i) {
      mbarrier_init(&shared.full_ds[i], 8);
      mbarrier_init(&shared.empty_ds[i], 4);  // warps of the query warpgroup
    }
    for (u32 i = 0; i < kDqBuffers; ++i) {
      mbarrier_init(&shared.full_dq[i], 4);
      mbarrier_init(&shared.empty_dq[i], 1);
    }
    fence_mbarrier_init();
    fence_async_proxy();
  }
  __syncthreads();
  const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_decrease<kLoadRegisters>();
    if (threadIdx.x < 32) load_role(params, shared);
    if (threadIdx.x == 32) add_role(params, shared);
  } else if (warpgroup == 1) {
    registers_decrease<kQueryRegisters>();
    query_role(params, shared);
    // The last CTA to finish leaves the queue as it found it.
    if (threadIdx.x == 128 && atomicAdd(params.queue + 1, 1u) == gridDim.x - 1) {
      params.queue[0] = 0;
      params.queue[1] = 0;
    }
  } else {
    registers_increase<kKeyRegisters>();
    key_role(params, shared, warpgroup - 2);
  }
}

}  // namespace counterpoint
