// Gradients of attention_forward with respect to the keys and the values.
//
// Inputs (any strides): queries, keys, values and scale as for attention_forward; output_grad [B, H, T, D] of type T,
// the cotangent of its output; lse [B, H, T] float, its second output; delta [B, H, T] float, from
// attention_grad_query; query_ends [B, S] int, non-decreasing along S and at most T. Key s is seen by the rows from
// s - (S - T) to query_ends[s] - 1.
// Outputs: key_grad and value_grad [B, H_kv, S, D] of type T.
// Template: T; D, a multiple of 8; ROWS, a multiple of 8, the keys of a threadgroup, 8 for each SIMD group;
// STAGED, a multiple of 8, the query rows in threadgroup memory at a time.
// Grid: (ceil(S / ROWS) * 4 * ROWS, H_kv, B) in threadgroups of (4 * ROWS, 1, 1).
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 2, the gradients of keys and values. A SIMD group
// keeps its keys, its values and their gradients in registers, and computes transposed scores, keys by queries, so that
// keys are the left factor of every product. The threadgroup copies a tile of query rows at a time to threadgroup
// memory, for each head of the group that shares the keys, and skips the tiles that see none of its keys.

constexpr int THREADS = ROWS / 8 * SIMD;
constexpr int TILES = D / 8;
constexpr int LD = D + 16 / sizeof(T);  // padding spreads the columns of a tile over the memory banks
threadgroup T query_tile[STAGED * LD];
threadgroup T grad_tile[STAGED * LD];
threadgroup float lse_tile[STAGED];  // in units of log 2
threadgroup float delta_tile[STAGED];

const uint thread_index = thread_index_in_threadgroup;
const ushort2 place = tile_place(thread_index_in_simdgroup);
const int query_count = queries_shape[2];
const int key_count = keys_shape[2];
const int offset = key_count - query_count;

const int first = int(threadgroup_position_in_grid.x) * ROWS;
const int last = min(first + ROWS, key_count) - 1;
const int64_t batch = threadgroup_position_in_grid.z;
const int64_t key_head = threadgroup_position_in_grid.y;

const int simd_first = first + 8 * int(simdgroup_index_in_threadgroup);
const int row = simd_first + place.y;
const bool inside = row < key_count;
const int64_t visible = batch * query_ends_strides[0];
const int row_end = query_ends[visible + min(row, last) * query_ends_strides[1]];
const int simd_end = query_ends[visible + min(simd_first + 7, last) * query_ends_strides[1]];
const device T* key_row = keys + batch * keys_strides[0] + key_head * keys_strides[1] + row * keys_strides[2];
const device T* value_row =
    values + batch * values_strides[0] + key_head * values_strides[1] + row * values_strides[2];
T key[2 * TILES];
T value[2 * TILES];
tile_hold_row<T, D>(key, key_row, keys_strides[3], inside, place);
tile_hold_row<T, D>(value, value_row, values_strides[3], inside, place);

float2 key_sums[TILES];
float2 value_sums[TILES];
UNROLL
for (int d = 0; d < TILES; ++d) {
  key_sums[d] = float2(0.0f);
  value_sums[d] = float2(0.0f);
}
const float scale_log2 = scale * M_LOG2E_F;

const int query_first = max(0, first - offset);
const int query_end = query_ends[visible + last * query_ends_strides[1]];
const int heads = queries_shape[1] / keys_shape[1];
for (int64_t head = key_head * heads; head < (key_head + 1) * heads; ++head) {
  const device T* query_rows = queries + batch * queries_strides[0] + head * queries_strides[1];
  const device T* grad_rows = output_grad + batch * output_grad_strides[0] + head * output_grad_strides[1];
  const int64_t lse_rows = batch * lse_strides[0] + head * lse_strides[1];
  const int64_t delta_rows = batch * delta_strides[0] + head * delta_strides[1];

  for (int start = query_first; start < query_end; start += STAGED) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int count = query_count - start;
    tile_stage_rows<T, STAGED, D, LD, THREADS>(
        query_tile, query_rows + start * queries_strides[2], queries_strides[2], queries_strides[3], count,
        thread_index);
    tile_stage_rows<T, STAGED, D, LD, THREADS>(
        grad_tile, grad_rows + start * output_grad_strides[2], output_grad_strides[2], output_grad_strides[3], count,
        thread_index);
    if (thread_index < uint(STAGED)) {
      const bool real = int(thread_index) < count;
      const int64_t query = start + int(thread_index);
      lse_tile[thread_index] = real ? lse[lse_rows + query * lse_strides[2]] * M_LOG2E_F : INFINITY;
      delta_tile[thread_index] = real ? delta[delta_rows + query * delta_strides[2]] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int j = 0; j < STAGED; j += 8) {
      const bool seen = simd_first < key_count && simd_first <= offset + start + j + 7 && start + j < simd_end;
      if (seen) {
        float2 scores = float2(0.0f);
        float2 slopes = float2(0.0f);  // values output_grad^T
        UNROLL
        for (int d = 0; d < TILES; ++d) {
          simdgroup_barrier(mem_flags::mem_none);  // stops the compiler from hoisting all loads
          tile_multiply_add(
              scores, float2(float(key[2 * d]), float(key[2 * d + 1])),
              tile_load_transposed<T, LD>(query_tile + j * LD + 8 * d, place));
          tile_multiply_add(
              slopes, float2(float(value[2 * d]), float(value[2 * d + 1])),
              tile_load_transposed<T, LD>(grad_tile + j * LD + 8 * d, place));
        }
        const int column = j + place.x;
        const int query = start + column;
        const bool first_sees = row <= offset + query && query < row_end;
        const bool second_sees = row <= offset + query + 1 && query + 1 < row_end;
        float2 probabilities = exp2(scores * scale_log2 - float2(lse_tile[column], lse_tile[column + 1]));
        // Infinite for a row that sees no key, whose lse is -inf: it is masked.
        probabilities.x = first_sees ? probabilities.x : 0.0f;
        probabilities.y = second_sees ? probabilities.y : 0.0f;
        slopes -= float2(delta_tile[column], delta_tile[column + 1]);
        scores.x = first_sees ? probabilities.x * slopes.x : 0.0f;
        scores.y = second_sees ? probabilities.y * slopes.y : 0.0f;
        UNROLL
        for (int d = 0; d < TILES; ++d) {
          simdgroup_barrier(mem_flags::mem_none);
          tile_multiply_add(value_sums[d], probabilities, tile_load<T, LD>(grad_tile + j * LD + 8 * d, place));
          tile_multiply_add(key_sums[d], scores, tile_load<T, LD>(query_tile + j * LD + 8 * d, place));
        }
      }
    }
  }
}

if (inside) {
  const int64_t out_row = ((batch * keys_shape[1] + key_head) * key_count + row) * D;
  UNROLL
  for (int d = 0; d < TILES; ++d) {
    const int64_t at = out_row + 8 * d + place.x;
    key_grad[at] = T(key_sums[d].x * scale);
    key_grad[at + 1] = T(key_sums[d].y * scale);
    value_grad[at] = T(value_sums[d].x);
    value_grad[at + 1] = T(value_sums[d].y);
  }
}
