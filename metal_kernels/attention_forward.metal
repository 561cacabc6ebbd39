// Causal grouped-query attention in tiles: softmax(scale * queries keys^T) values, and the log-sum-exp of each row's
// scores, without the matrix of scores in memory.
//
// Inputs (any strides): queries [B, H, T, D], keys and values [B, H_kv, S, D] of type T; scale, a float; ranges
// [B, T, 2] int: row t sees the keys from ranges[t, 0] to before ranges[t, 1]. Neither decreases along T.
// Outputs: output [B, H, T, D] of type T; lse [B, H, T] float. A row that sees no key has output 0 and lse -inf.
// Template: T; D, a multiple of 8; HELD and STAGED, see attention_tiles.h; PARTS, 1.
// Grid: (ceil(T / ROWS) * 128, H, B) in threadgroups of (128, 1, 1), where ROWS is 32 * HELD.
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 1. A SIMD group keeps its rows of queries and of
// the output in registers. The threadgroup copies a tile of keys and values at a time to threadgroup memory, the next
// one while it uses the last, and skips the tiles that none of its rows sees. Scores are in units of log 2, which saves
// a multiplication per exponential. Probabilities are rounded to T as a factor of the values.

constexpr int BLOCKS = STAGED / 8;
typedef Tiles<T, D, HELD, STAGED, PARTS> tiles;
threadgroup vec<T, 4> key_tiles[2 * tiles::STAGE];
threadgroup vec<T, 4> value_tiles[2 * tiles::STAGE];

const uint thread_index = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const ushort2 place = tile_place(lane);
const int query_count = queries_shape[2];
const int key_count = keys_shape[2];

// The last rows see the most keys, so they start first.
const int first = int(threadgroups_per_grid.x - 1 - threadgroup_position_in_grid.x) * tiles::ROWS;
const int last = min(first + tiles::ROWS, query_count) - 1;
const int row = first + 8 * HELD * int(simdgroup);  // the first of the SIMD group
const int64_t batch = threadgroup_position_in_grid.z;
const uint head = threadgroup_position_in_grid.y;
const uint key_head = head / (queries_shape[1] / keys_shape[1]);
const device T* key_rows = keys + batch * keys_strides[0] + key_head * keys_strides[1];
const device T* value_rows = values + batch * values_strides[0] + key_head * values_strides[1];

const auto visible = ranges + batch * ranges_strides[0];
const int4 bounds = tiles::bounds(visible, ranges_strides[1], ranges_strides[2], row, last);
vec<T, 2> query[HELD * tiles::TILES];
ROLLED
for (int start = first; start < first + tiles::ROWS; start += 2 * STAGED) {
  if (start > first) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tiles::template stage<2 * STAGED>(
      key_tiles,
      queries + batch * queries_strides[0] + head * queries_strides[1] + start * queries_strides[2],
      queries_strides[2], queries_strides[3], last + 1 - start, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row >= start && row < start + 2 * STAGED) {
    tiles::hold(query, key_tiles + (row - start) * tiles::LD, place);
  }
}

float2 sums[HELD * tiles::TILES];
UNROLL
for (int i = 0; i < HELD * tiles::TILES; ++i) {
  sums[i] = float2(0.0f);
}
float2 top[HELD];    // the maximum score so far, of the lane's columns
float2 total[HELD];  // the lane's part of the sum of exp2(score - top)
UNROLL
for (int h = 0; h < HELD; ++h) {
  top[h] = float2(-INFINITY);
  total[h] = float2(0.0f);
}
const float scale_log2 = scale * M_LOG2E_F;

const int begin = visible[first * ranges_strides[1]];
const int end = visible[last * ranges_strides[1] + ranges_strides[2]];
int buffer = 0;
for (int start = begin - STAGED; start < end; start += STAGED) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int next = start + STAGED;
  if (next < end) {
    tiles::template stage<STAGED>(
        key_tiles + buffer * tiles::STAGE, key_rows + next * keys_strides[2], keys_strides[2], keys_strides[3],
        key_count - next, thread_index);
    tiles::template stage<STAGED>(
        value_tiles + buffer * tiles::STAGE, value_rows + next * values_strides[2], values_strides[2],
        values_strides[3], key_count - next, thread_index);
  }
  buffer ^= 1;
  if (start < begin) {
    continue;
  }
  const int staged = buffer * tiles::STAGE + tiles::lane_offset(place);
  const bool seen = start < bounds.w && next > bounds.x;
  float2 scores[BLOCKS * HELD];
  UNROLL
  for (int n = 0; n < BLOCKS * HELD; ++n) {
    scores[n] = float2(0.0f);
  }
  if (seen) {
    tiles::template add_scores<BLOCKS>(scores, key_tiles + staged, query);
  }
  if (seen) {
    UNROLL
    for (int n = 0; n < BLOCKS * HELD; ++n) {
      scores[n] *= scale_log2;
    }
    if (start < bounds.y || next > bounds.z) {
      tiles::template mask<BLOCKS>(
          scores, start + place.y, visible, ranges_strides[1], ranges_strides[2], row + place.x, last);
    }
    vec<T, 2> probabilities[BLOCKS * HELD];
    UNROLL
    for (int h = 0; h < HELD; ++h) {
      float2 highest = top[h];
      UNROLL
      for (int b = 0; b < BLOCKS; ++b) {
        highest = max(highest, scores[b * HELD + h]);
      }
      highest = tile_column_max(highest);
      // -inf - -inf would be NaN
      const float2 shift =
          float2(highest.x == -INFINITY ? 0.0f : highest.x, highest.y == -INFINITY ? 0.0f : highest.y);
      const float2 decay = exp2(top[h] - shift);
      top[h] = highest;
      total[h] *= decay;
      UNROLL
      for (int b = 0; b < BLOCKS; ++b) {
        const float2 weights = exp2(scores[b * HELD + h] - shift);
        total[h] += weights;
        probabilities[b * HELD + h] = tile_transpose<T>(weights, lane);
      }
      const float row_decay = tile_of_row(decay, lane);
      UNROLL
      for (int i = 0; i < tiles::TILES; ++i) {
        sums[h * tiles::TILES + i] *= row_decay;
      }
    }
    tiles::template add_products<BLOCKS, tiles::TILES>(sums, probabilities, value_tiles + staged);
  }
}

const int64_t out_row = (batch * queries_shape[1] + head) * query_count + row;
UNROLL
for (int h = 0; h < HELD; ++h) {
  const float2 sum = tile_column_sum(total[h]);
  const float inverse = 1.0f / tile_of_row(sum, lane);
  UNROLL
  for (int i = 0; i < tiles::TILES; ++i) {
    sums[h * tiles::TILES + i] *= inverse == INFINITY ? 0.0f : inverse;
  }
  const int column = 8 * h + place.x;
  if (place.y == 0) {
    if (row + column <= last) {
      lse[out_row + column] = sum.x == 0.0f ? -INFINITY : (top[h].x + log2(sum.x)) * M_LN2_F;
    }
    if (row + column + 1 <= last) {
      lse[out_row + column + 1] = sum.y == 0.0f ? -INFINITY : (top[h].y + log2(sum.y)) * M_LN2_F;
    }
  }
}
tiles::template store<tiles::TILES>(output + out_row * D, sums, 1.0f, last + 1 - row, 0, place);
