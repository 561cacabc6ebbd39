// Gradients of attention_forward with respect to the keys and the values.
//
// Inputs (any strides): queries, keys, values and scale as for attention_forward; output_grad [B, H, T, D] of type T,
// the cotangent of its output; lse [B, H, T] float, its second output; delta [B, H, T] float, from
// attention_grad_query; ranges [B, S, 2] int: key s is seen by the rows from ranges[s, 0] to before ranges[s, 1].
// Neither decreases along S.
// Outputs: key_grad and value_grad [SPLITS, B, H_kv, S, D] of type U, whose sums over SPLITS are the gradients.
// Template: T; D, a multiple of 8; HELD, STAGED and PARTS, see attention_tiles.h; SPLITS, the threadgroups that share
// the rows that see a key; U, T if SPLITS is 1, else float.
// Grid: (ceil(S / ROWS) * THREADS, H_kv * SPLITS, B) in threadgroups of (THREADS, 1, 1), where ROWS is 32 * HELD and
// THREADS is 128 * PARTS.
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 2, the gradients of keys and values. A SIMD group
// keeps its keys, its values and their gradients in registers. The threadgroup copies a tile of query rows at a time to
// threadgroup memory, for each head of the group that shares the keys, and skips the tiles that see none of its keys.
// With PARTS = 2, a pair of SIMD groups has the same keys, and half of the registers: the first one keeps the keys and
// computes the probabilities and the gradient of the values; the second one keeps the values and computes the gradients
// of the scores and of the keys.

typedef Tiles<T, D, HELD, STAGED, PARTS> tiles;
constexpr int BLOCKS = PARTS > 1 ? STAGED / 8 : 1;  // of 8 rows at a time: more would take too many registers
constexpr int SCORES = BLOCKS * HELD, SUMS = HELD * tiles::TILES;
constexpr int BUFFERS = 1 + PARTS;  // with PARTS = 2, one barrier per tile is both for the tile and for the exchange
constexpr int GRADS = BUFFERS * tiles::STAGE;
threadgroup vec<T, 4> tile_runs[2 * GRADS];  // of queries; from GRADS on, of output_grad
threadgroup float2 statistics[BUFFERS * STAGED];  // of a staged row: the log-sum-exp in units of log 2, and delta
threadgroup float2 exchange[PARTS > 1 ? 8 * SCORES * SIMD : 1];  // two buffers

const uint thread_index = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const ushort2 place = tile_place(lane);
const int part = simdgroup % PARTS;
const int query_count = queries_shape[2];
const int key_count = keys_shape[2];

const int first = int(threadgroup_position_in_grid.x) * tiles::ROWS;
const int last = min(first + tiles::ROWS, key_count) - 1;
const int row = first + 8 * HELD * int(simdgroup / PARTS);  // the first key of the SIMD group
const int64_t batch = threadgroup_position_in_grid.z;
const int64_t key_head = threadgroup_position_in_grid.y / SPLITS;
const int split = threadgroup_position_in_grid.y % SPLITS;

const auto visible = ranges + batch * ranges_strides[0];
const int4 bounds = tiles::bounds(visible, ranges_strides[1], ranges_strides[2], row, last);
vec<T, 2> held[2 / PARTS * SUMS];  // keys, values
ROLLED
for (int start = first; start < first + tiles::ROWS; start += 2 * STAGED) {
  if (start > first) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tiles::template stage<2 * STAGED>(
      tile_runs,
      keys + batch * keys_strides[0] + key_head * keys_strides[1] + start * keys_strides[2],
      keys_strides[2], keys_strides[3], last + 1 - start, thread_index);
  tiles::template stage<2 * STAGED>(
      tile_runs + GRADS,
      values + batch * values_strides[0] + key_head * values_strides[1] + start * values_strides[2],
      values_strides[2], values_strides[3], last + 1 - start, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row >= start && row < start + 2 * STAGED) {
    tiles::hold(held, tile_runs + part * GRADS + (row - start) * tiles::LD, place);
    if constexpr (PARTS == 1) {
      tiles::hold(held + SUMS, tile_runs + GRADS + (row - start) * tiles::LD, place);
    }
  }
}

float2 sums[2 / PARTS * SUMS];  // gradients of the values, of the keys
UNROLL
for (int i = 0; i < 2 / PARTS * SUMS; ++i) {
  sums[i] = float2(0.0f);
}
const float scale_log2 = scale * M_LOG2E_F;

// The tiles of all heads that share the keys, of which this threadgroup has a part.
const int begin = visible[first * ranges_strides[1]];
const int end = visible[last * ranges_strides[1] + ranges_strides[2]];
const int heads = queries_shape[1] / keys_shape[1];
const int tiles_of_head = max(1, (end - begin + STAGED - 1) / STAGED);
const int tile_begin = heads * tiles_of_head * split / SPLITS;
const int tile_end = begin < end ? heads * tiles_of_head * (split + 1) / SPLITS : tile_begin;

const device T* query_rows = queries + batch * queries_strides[0];
const device T* grad_rows = output_grad + batch * output_grad_strides[0];
int head = key_head * heads + tile_begin / tiles_of_head;
int start = begin + (tile_begin % tiles_of_head - 1) * STAGED;
int next_buffer = PARTS;  // with PARTS = 2, not one of the two that rows are still being held from
for (int tile = tile_begin - 1; tile < tile_end; ++tile) {
  if constexpr (PARTS == 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  int next = start + STAGED, next_head = head;
  if (next >= end) {
    next = begin;
    ++next_head;
  }
  if (tile + 1 < tile_end) {
    threadgroup vec<T, 4>* to = tile_runs + next_buffer * tiles::STAGE;
    tiles::template stage<STAGED>(
        to, query_rows + next_head * queries_strides[1] + next * queries_strides[2], queries_strides[2],
        queries_strides[3], query_count - next, thread_index);
    tiles::template stage<STAGED>(
        to + GRADS, grad_rows + next_head * output_grad_strides[1] + next * output_grad_strides[2],
        output_grad_strides[2], output_grad_strides[3], query_count - next, thread_index);
    if (thread_index < STAGED) {
      const int64_t at = min(next + int(thread_index), query_count - 1);
      const float natural = lse[batch * lse_strides[0] + next_head * lse_strides[1] + at * lse_strides[2]];
      statistics[next_buffer * STAGED + thread_index] = float2(
          natural == -INFINITY ? INFINITY : natural * M_LOG2E_F,  // a row that sees no key has probabilities of 0
          delta[batch * delta_strides[0] + next_head * delta_strides[1] + at * delta_strides[2]]);
    }
  }
  const int buffer = next_buffer > 0 ? next_buffer - 1 : BUFFERS - 1;
  ROLLED
  for (int block = 0; block < STAGED && (PARTS > 1 || tile >= tile_begin); block += 8 * BLOCKS) {
    const int block_start = start + block;
    const bool seen = tile >= tile_begin && block_start < bounds.w && block_start + 8 * BLOCKS > bounds.x;
    const int staged = buffer * tiles::STAGE + block * tiles::LD + tiles::lane_offset(place);
    float2 scores[2 / PARTS * SCORES];  // queries keys^T or probabilities, output_grad values^T
    vec<T, 2> factors[2 / PARTS * SCORES];
    UNROLL
    for (int n = 0; n < 2 / PARTS * SCORES; ++n) {
      scores[n] = float2(0.0f);
    }
    if (seen) {
      tiles::template add_scores<BLOCKS>(scores, tile_runs + part * GRADS + staged, held);
      if constexpr (PARTS == 1) {
        tiles::template add_scores<BLOCKS>(scores + SCORES, tile_runs + GRADS + staged, held + SUMS);
      }
      if (part == 0) {
        if (block_start < bounds.y || block_start + 8 * BLOCKS > bounds.z) {
          tiles::template mask<BLOCKS>(
              scores, block_start + place.y, visible, ranges_strides[1], ranges_strides[2], row + place.x, last);
        }
        UNROLL
        for (int n = 0; n < SCORES; ++n) {
          const float row_lse = statistics[buffer * STAGED + block + 8 * (n / HELD) + place.y].x;
          scores[n] = exp2(scores[n] * scale_log2 - row_lse);
        }
      }
    }
    threadgroup float2* shared = exchange + (PARTS > 1 ? ((tile & 1) * 4 + simdgroup / 2) * SCORES * SIMD + lane : 0);
    if constexpr (PARTS > 1) {
      if (seen && part == 0) {
        UNROLL
        for (int n = 0; n < SCORES; ++n) {
          shared[n * SIMD] = scores[n];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (seen) {
      UNROLL
      for (int n = 0; n < SCORES; ++n) {
        if (PARTS == 1 || part == 0) {
          factors[n] = tile_transpose<T>(scores[n], lane);
        }
        if (part == PARTS - 1) {
          const int other = PARTS == 1 ? SCORES : 0;
          const float2 probabilities = PARTS == 1 ? scores[n] : shared[n * SIMD];
          const float correction = statistics[buffer * STAGED + block + 8 * (n / HELD) + place.y].y;
          const float2 slopes = scores[other + n] - correction;
          factors[other + n] = tile_transpose<T>(tile_product(probabilities, slopes), lane);
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);  // load the rows again: they would take too many registers
      tiles::template add_products<BLOCKS, tiles::TILES>(sums, factors, tile_runs + (1 - part) * GRADS + staged);
      if constexpr (PARTS == 1) {
        tiles::template add_products<BLOCKS, tiles::TILES>(sums + SUMS, factors + SCORES, tile_runs + staged);
      }
    }
  }
  next_buffer = next_buffer + 1 < BUFFERS ? next_buffer + 1 : 0;
  head = next_head;
  start = next;
}

const int64_t out_row =
    ((split * int64_t(threadgroups_per_grid.z) + batch) * keys_shape[1] + key_head) * key_count + row;
if (part == 0) {
  tiles::template store<tiles::TILES>(value_grad + out_row * D, sums, 1.0f, last + 1 - row, 0, place);
}
if (part == PARTS - 1) {
  tiles::template store<tiles::TILES>(
      key_grad + out_row * D, sums + (2 / PARTS - 1) * SUMS, scale, last + 1 - row, 0, place);
}
