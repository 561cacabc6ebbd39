// Gradient of attention_forward with respect to the queries, and each row's correction of the score gradients.
//
// Inputs (any strides): queries, keys, values, scale and ranges as for attention_forward; its outputs, output and
// lse; their cotangents, output_grad [B, H, T, D] of type T and lse_grad [B, H, T] float.
// Outputs: query_grad [B, H, T, D] of type T; delta [B, H, T] float, sum(output_grad * output) - lse_grad.
// Template: T; D, a multiple of 8; HELD, STAGED and PARTS, see attention_tiles.h.
// Grid: (ceil(T / ROWS) * THREADS, H, B) in threadgroups of (THREADS, 1, 1), where ROWS is 32 * HELD and THREADS is
// 128 * PARTS.
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 2, the gradient of the queries. Probabilities are
// recomputed: p = exp(score - lse). The gradient of the score is p * (output_grad value^T - delta). It includes
// lse_grad * p, since d lse / d score = p. It is rounded to T as a factor of the keys. attention_grad_key_value is
// separate, so that neither needs atomics. With PARTS = 2, a pair of SIMD groups has the same rows, and half of the
// registers: the first one keeps the queries and computes p, the second one keeps output_grad and computes
// output_grad value^T - delta. They exchange these, and each computes half of D of the gradient.

typedef Tiles<T, D, HELD, STAGED, PARTS> tiles;
constexpr int BLOCKS = PARTS > 1 ? STAGED / 8 : 1;  // of 8 rows at a time: more would take too many registers
constexpr int SCORES = BLOCKS * HELD, SUMS = tiles::TILES / PARTS;
constexpr int BUFFERS = 1 + PARTS;  // with PARTS = 2, one barrier per tile is both for the tile and for the exchange
constexpr int VALUES = BUFFERS * tiles::STAGE;
threadgroup vec<T, 4> tile_runs[2 * VALUES];  // of keys; from VALUES on, of values
threadgroup float2 exchange[PARTS > 1 ? 16 * SCORES * SIMD : 1];  // two buffers

const uint thread_index = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const ushort2 place = tile_place(lane);
const int part = simdgroup % PARTS;
const int query_count = queries_shape[2];
const int key_count = keys_shape[2];

// The last rows see the most keys, so they start first.
const int first = int(threadgroups_per_grid.x - 1 - threadgroup_position_in_grid.x) * tiles::ROWS;
const int last = min(first + tiles::ROWS, query_count) - 1;
const int row = first + 8 * HELD * int(simdgroup / PARTS);  // the first of the SIMD group
const int64_t batch = threadgroup_position_in_grid.z;
const uint head = threadgroup_position_in_grid.y;
const uint key_head = head / (queries_shape[1] / keys_shape[1]);
const int64_t out_row = (batch * queries_shape[1] + head) * query_count + row;
const device T* key_rows = keys + batch * keys_strides[0] + key_head * keys_strides[1];
const device T* value_rows = values + batch * values_strides[0] + key_head * values_strides[1];
const device T* grad_rows = output_grad + batch * output_grad_strides[0] + head * output_grad_strides[1] +
    row * output_grad_strides[2];

const auto visible = ranges + batch * ranges_strides[0];
const int4 bounds = tiles::bounds(visible, ranges_strides[1], ranges_strides[2], row, last);
vec<T, 2> held[2 / PARTS * HELD * tiles::TILES];  // queries, output_grad
ROLLED
for (int start = first; start < first + tiles::ROWS; start += 2 * STAGED) {
  if (start > first) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tiles::template stage<2 * STAGED>(
      tile_runs, queries + batch * queries_strides[0] + head * queries_strides[1] + start * queries_strides[2],
      queries_strides[2], queries_strides[3], last + 1 - start, thread_index);
  tiles::template stage<2 * STAGED>(
      tile_runs + VALUES, grad_rows + (start - row) * output_grad_strides[2], output_grad_strides[2],
      output_grad_strides[3], last + 1 - start, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row >= start && row < start + 2 * STAGED) {
    tiles::hold(held, tile_runs + part * VALUES + (row - start) * tiles::LD, place);
    if constexpr (PARTS == 1) {
      tiles::hold(held + HELD * tiles::TILES, tile_runs + VALUES + (row - start) * tiles::LD, place);
    }
  }
}

float2 row_lse[HELD];  // of the lane's columns, in units of log 2
float2 correction[HELD];
UNROLL
for (int h = 0; h < HELD; ++h) {
  UNROLL
  for (int e = 0; e < 2; ++e) {
    const int column = 8 * h + place.x + e;
    const bool inside = row + column <= last;
    const device T* grad_row = grad_rows + column * output_grad_strides[2];
    const device T* output_row = output + batch * output_strides[0] + head * output_strides[1] +
        (row + column) * output_strides[2];
    float sum = 0.0f;
    for (int d = place.y; d < D && inside; d += 8) {
      sum += float(grad_row[d * output_grad_strides[3]]) * float(output_row[d * output_strides[3]]);
    }
    float value = INFINITY;
    if (inside) {
      const int64_t at = row + column;
      value = lse[batch * lse_strides[0] + head * lse_strides[1] + at * lse_strides[2]] * M_LOG2E_F;
      if (place.y == 0) {
        sum -= lse_grad[batch * lse_grad_strides[0] + head * lse_grad_strides[1] + at * lse_grad_strides[2]];
      }
    }
    row_lse[h][e] = value == -INFINITY ? INFINITY : value;  // a row that sees no key: its probabilities are 0
    correction[h][e] = sum;
  }
  correction[h] = tile_column_sum(correction[h]);
}

float2 sums[HELD * SUMS];
UNROLL
for (int i = 0; i < HELD * SUMS; ++i) {
  sums[i] = float2(0.0f);
}
const float scale_log2 = scale * M_LOG2E_F;

const int begin = visible[first * ranges_strides[1]];
const int end = visible[last * ranges_strides[1] + ranges_strides[2]];
int next_buffer = PARTS;  // with PARTS = 2, not one of the two that rows are still being held from
for (int start = begin - STAGED; start < end; start += STAGED) {
  if constexpr (PARTS == 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const int next = start + STAGED;
  if (next < end) {
    threadgroup vec<T, 4>* to = tile_runs + next_buffer * tiles::STAGE;
    tiles::template stage<STAGED>(
        to, key_rows + next * keys_strides[2], keys_strides[2], keys_strides[3], key_count - next, thread_index);
    tiles::template stage<STAGED>(
        to + VALUES, value_rows + next * values_strides[2], values_strides[2], values_strides[3], key_count - next,
        thread_index);
  }
  const int buffer = next_buffer > 0 ? next_buffer - 1 : BUFFERS - 1;
  ROLLED
  for (int block = 0; block < STAGED && (PARTS > 1 || start >= begin); block += 8 * BLOCKS) {
    const int block_start = start + block;
    const int staged = buffer * tiles::STAGE + block * tiles::LD + tiles::lane_offset(place);
    const bool seen = start >= begin && block_start < bounds.w && block_start + 8 * BLOCKS > bounds.x;
    float2 scores[2 / PARTS * SCORES];  // queries keys^T or probabilities, output_grad values^T
    UNROLL
    for (int n = 0; n < 2 / PARTS * SCORES; ++n) {
      scores[n] = float2(0.0f);
    }
    if (seen) {
      tiles::template add_scores<BLOCKS>(scores, tile_runs + part * VALUES + staged, held);
      if constexpr (PARTS == 1) {
        tiles::template add_scores<BLOCKS>(scores + SCORES, tile_runs + VALUES + staged, held + HELD * tiles::TILES);
      }
      if (part == 0) {
        if (block_start < bounds.y || block_start + 8 * BLOCKS > bounds.z) {
          tiles::template mask<BLOCKS>(
              scores, block_start + place.y, visible, ranges_strides[1], ranges_strides[2], row + place.x, last);
        }
        UNROLL
        for (int n = 0; n < SCORES; ++n) {
          scores[n] = exp2(scores[n] * scale_log2 - row_lse[n % HELD]);
        }
      }
      if (part == PARTS - 1) {
        UNROLL
        for (int n = 0; n < SCORES; ++n) {
          scores[(2 / PARTS - 1) * SCORES + n] -= correction[n % HELD];
        }
      }
    }
    threadgroup float2* shared = exchange + (PARTS > 1 ? ((start - begin) / STAGED & 1) * 8 * SCORES * SIMD + lane : 0);
    if constexpr (PARTS > 1) {
      UNROLL
      for (int n = 0; n < SCORES; ++n) {
        shared[(simdgroup * SCORES + n) * SIMD] = scores[n];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (seen) {
      vec<T, 2> factors[SCORES];
      UNROLL
      for (int n = 0; n < SCORES; ++n) {
        const float2 other = PARTS > 1 ? shared[((simdgroup ^ 1) * SCORES + n) * SIMD] : scores[SCORES + n];
        factors[n] = tile_transpose<T>(
            part == 0 ? tile_product(scores[n], other) : tile_product(other, scores[n]), lane);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);  // load the keys again: they would take too many registers
      tiles::template add_products<BLOCKS, SUMS>(sums, factors, tile_runs + part * SUMS * 2 + staged);
    }
  }
  next_buffer = next_buffer + 1 < BUFFERS ? next_buffer + 1 : 0;
}

tiles::template store<SUMS>(query_grad + out_row * D, sums, scale, last + 1 - row, part * SUMS * 8, place);
UNROLL
for (int h = 0; h < HELD; ++h) {
  UNROLL
  for (int e = 0; e < 2; ++e) {
    const int column = 8 * h + place.x + e;
    if (part == 0 && place.y == 0 && row + column <= last) {
      delta[out_row + column] = correction[h][e];
    }
  }
}
