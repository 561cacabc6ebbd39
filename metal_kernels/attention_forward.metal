// Causal grouped-query attention in tiles: softmax(scale * queries keys^T) values, and the log-sum-exp of each row's
// scores, without the matrix of scores in memory.
//
// Inputs (any strides): queries [B, H, T, D], keys and values [B, H_kv, S, D] of type T; scale, a float; first_keys
// [B, T] int, non-decreasing along T and at least 0. Row t sees the keys from first_keys[t] to S - T + t.
// Outputs: output [B, H, T, D] of type T; lse [B, H, T] float. A row that sees no key has output 0 and lse -inf.
// Template: T; D, a multiple of 8; ROWS, a multiple of 8, the query rows of a threadgroup, 8 for each SIMD group;
// STAGED, a multiple of 8, the keys in threadgroup memory at a time.
// Grid: (ceil(T / ROWS) * 4 * ROWS, H, B) in threadgroups of (4 * ROWS, 1, 1).
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 1. A SIMD group keeps its rows of queries and of
// the output in registers. The threadgroup copies a tile of keys and values at a time to threadgroup memory, and skips
// the tiles that none of its rows sees. Scores are in units of log 2, which saves a multiplication per exponential.

constexpr int THREADS = ROWS / 8 * SIMD;
constexpr int TILES = D / 8;
constexpr int LD = D + 16 / sizeof(T);  // padding spreads the columns of a tile over the memory banks
threadgroup T key_tile[STAGED * LD];
threadgroup T value_tile[STAGED * LD];

const uint thread_index = thread_index_in_threadgroup;
const ushort2 place = tile_place(thread_index_in_simdgroup);
const int query_count = queries_shape[2];
const int key_count = keys_shape[2];
const int offset = key_count - query_count;

// The last rows see the most keys, so they start first.
const int first = int(threadgroups_per_grid.x - 1 - threadgroup_position_in_grid.x) * ROWS;
const int last = min(first + ROWS, query_count) - 1;
const int64_t batch = threadgroup_position_in_grid.z;
const int64_t head = threadgroup_position_in_grid.y;
const int64_t key_head = head / (queries_shape[1] / keys_shape[1]);
const device T* query_rows = queries + batch * queries_strides[0] + head * queries_strides[1];
const device T* key_rows = keys + batch * keys_strides[0] + key_head * keys_strides[1];
const device T* value_rows = values + batch * values_strides[0] + key_head * values_strides[1];

const int simd_first = first + 8 * int(simdgroup_index_in_threadgroup);
const int row = simd_first + place.y;
const int position = offset + row;
const bool inside = row < query_count;
const int64_t visible = batch * first_keys_strides[0];
const int first_key = first_keys[visible + min(row, last) * first_keys_strides[1]];
const int simd_first_key = first_keys[visible + min(simd_first, last) * first_keys_strides[1]];
T query[2 * TILES];
tile_hold_row<T, D>(query, query_rows + row * queries_strides[2], queries_strides[3], inside, place);

float2 sums[TILES];
UNROLL
for (int d = 0; d < TILES; ++d) {
  sums[d] = float2(0.0f);
}
float top = -INFINITY;  // the row's maximum score so far
float total = 0.0f;     // this lane's part of the sum of exp2(score - top)
const float scale_log2 = scale * M_LOG2E_F;

const int key_end = offset + last + 1;
for (int start = first_keys[visible + first * first_keys_strides[1]]; start < key_end; start += STAGED) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int count = key_count - start;
  tile_stage_rows<T, STAGED, D, LD, THREADS>(
      key_tile, key_rows + start * keys_strides[2], keys_strides[2], keys_strides[3], count, thread_index);
  tile_stage_rows<T, STAGED, D, LD, THREADS>(
      value_tile, value_rows + start * values_strides[2], values_strides[2], values_strides[3], count, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const bool seen = simd_first < query_count && start <= offset + simd_first + 7 &&
      start + STAGED > simd_first_key;
  if (seen) {
    float2 scores[STAGED / 8];
    UNROLL
    for (int j = 0; j < STAGED / 8; ++j) {
      scores[j] = float2(0.0f);
    }
    UNROLL
    for (int d = 0; d < TILES; ++d) {
      simdgroup_barrier(mem_flags::mem_none);  // stops the compiler from hoisting all loads
      const float2 left = float2(float(query[2 * d]), float(query[2 * d + 1]));
      UNROLL
      for (int j = 0; j < STAGED / 8; ++j) {
        tile_multiply_add(scores[j], left, tile_load_transposed<T, LD>(key_tile + 8 * j * LD + 8 * d, place));
      }
    }

    float2 highest = float2(-INFINITY);
    UNROLL
    for (int j = 0; j < STAGED / 8; ++j) {
      const int key = start + 8 * j + place.x;
      scores[j].x = key >= first_key && key <= position ? scores[j].x * scale_log2 : -INFINITY;
      scores[j].y = key + 1 >= first_key && key + 1 <= position ? scores[j].y * scale_log2 : -INFINITY;
      highest = max(highest, scores[j]);
    }
    const float new_top = max(top, tile_row_max(highest));
    const float shift = new_top == -INFINITY ? 0.0f : new_top;  // -inf - -inf would be NaN
    const float decay = exp2(top - shift);
    top = new_top;
    total *= decay;
    UNROLL
    for (int j = 0; j < STAGED / 8; ++j) {
      scores[j] = exp2(scores[j] - shift);
      total += scores[j].x + scores[j].y;
    }
    UNROLL
    for (int d = 0; d < TILES; ++d) {
      simdgroup_barrier(mem_flags::mem_none);
      sums[d] *= decay;
      UNROLL
      for (int j = 0; j < STAGED / 8; ++j) {
        tile_multiply_add(sums[d], scores[j], tile_load<T, LD>(value_tile + 8 * j * LD + 8 * d, place));
      }
    }
  }
}

total = tile_row_sum(float2(total, 0.0f));
if (inside) {
  const int64_t out_row = (batch * queries_shape[1] + head) * query_count + row;
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  UNROLL
  for (int d = 0; d < TILES; ++d) {
    output[out_row * D + 8 * d + place.x] = T(sums[d].x * inverse);
    output[out_row * D + 8 * d + place.x + 1] = T(sums[d].y * inverse);
  }
  if (place.x == 0) {
    lse[out_row] = total == 0.0f ? -INFINITY : (top + log2(total)) * M_LN2_F;
  }
}
