// Gradient of attention_forward with respect to the queries, and each row's correction of the score gradients.
//
// Inputs (any strides): queries, keys, values, scale and first_keys as for attention_forward; its outputs, output and
// lse; their cotangents, output_grad [B, H, T, D] of type T and lse_grad [B, H, T] float.
// Outputs: query_grad [B, H, T, D] of type T; delta [B, H, T] float, sum(output_grad * output) - lse_grad.
// Template: T; D, a multiple of 8; ROWS, a multiple of 8, the query rows of a threadgroup, 8 for each SIMD group;
// STAGED, a multiple of 8, the keys in threadgroup memory at a time.
// Grid: (ceil(T / ROWS) * 4 * ROWS, H, B) in threadgroups of (4 * ROWS, 1, 1).
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 2, the gradient of the queries. Probabilities are
// recomputed: p = exp(score - lse). The gradient of the score is p * (output_grad value^T - delta). It includes
// lse_grad * p, since d lse / d score = p. attention_grad_key_value is separate, so that neither needs atomics.

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
const device T* key_rows = keys + batch * keys_strides[0] + key_head * keys_strides[1];
const device T* value_rows = values + batch * values_strides[0] + key_head * values_strides[1];

const int simd_first = first + 8 * int(simdgroup_index_in_threadgroup);
const int row = simd_first + place.y;
const int position = offset + row;
const bool inside = row < query_count;
const int64_t visible = batch * first_keys_strides[0];
const int first_key = first_keys[visible + min(row, last) * first_keys_strides[1]];
const int simd_first_key = first_keys[visible + min(simd_first, last) * first_keys_strides[1]];
const device T* query_row =
    queries + batch * queries_strides[0] + head * queries_strides[1] + row * queries_strides[2];
const device T* output_row = output + batch * output_strides[0] + head * output_strides[1] + row * output_strides[2];
const device T* output_grad_row = output_grad + batch * output_grad_strides[0] + head * output_grad_strides[1] +
    row * output_grad_strides[2];
T query[2 * TILES];
T grad[2 * TILES];
tile_hold_row<T, D>(query, query_row, queries_strides[3], inside, place);
tile_hold_row<T, D>(grad, output_grad_row, output_grad_strides[3], inside, place);

float row_lse = 0.0f;  // in units of log 2
float correction = 0.0f;
UNROLL
for (int d = 0; d < TILES; ++d) {
  if (inside) {
    const int64_t at = (8 * d + place.x) * output_strides[3];
    correction += float(grad[2 * d]) * float(output_row[at]);
    correction += float(grad[2 * d + 1]) * float(output_row[at + output_strides[3]]);
  }
}
correction = tile_row_sum(float2(correction, 0.0f));
if (inside) {
  row_lse = M_LOG2E_F * lse[batch * lse_strides[0] + head * lse_strides[1] + row * lse_strides[2]];
  correction -=
      lse_grad[batch * lse_grad_strides[0] + head * lse_grad_strides[1] + row * lse_grad_strides[2]];
}

float2 sums[TILES];
UNROLL
for (int d = 0; d < TILES; ++d) {
  sums[d] = float2(0.0f);
}
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

  for (int j = 0; j < STAGED; j += 8) {
    const bool seen = simd_first < query_count && start + j <= offset + simd_first + 7 &&
        start + j + 8 > simd_first_key;
    if (seen) {
      float2 scores = float2(0.0f);
      float2 slopes = float2(0.0f);  // output_grad values^T
      UNROLL
      for (int d = 0; d < TILES; ++d) {
        simdgroup_barrier(mem_flags::mem_none);  // stops the compiler from hoisting all loads
        tile_multiply_add(
            scores, float2(float(query[2 * d]), float(query[2 * d + 1])),
            tile_load_transposed<T, LD>(key_tile + j * LD + 8 * d, place));
        tile_multiply_add(
            slopes, float2(float(grad[2 * d]), float(grad[2 * d + 1])),
            tile_load_transposed<T, LD>(value_tile + j * LD + 8 * d, place));
      }
      // Infinite in a row that sees no key, whose lse is -inf; all its keys are masked.
      const float2 probabilities = exp2(scores * scale_log2 - row_lse);
      const int key = start + j + place.x;
      slopes -= correction;
      scores.x = key >= first_key && key <= position ? probabilities.x * slopes.x : 0.0f;
      scores.y = key + 1 >= first_key && key + 1 <= position ? probabilities.y * slopes.y : 0.0f;
      UNROLL
      for (int d = 0; d < TILES; ++d) {
        simdgroup_barrier(mem_flags::mem_none);
        tile_multiply_add(sums[d], scores, tile_load<T, LD>(key_tile + j * LD + 8 * d, place));
      }
    }
  }
}

if (inside) {
  const int64_t out_row = (batch * queries_shape[1] + head) * query_count + row;
  UNROLL
  for (int d = 0; d < TILES; ++d) {
    query_grad[out_row * D + 8 * d + place.x] = T(sums[d].x * scale);
    query_grad[out_row * D + 8 * d + place.x + 1] = T(sums[d].y * scale);
  }
  if (place.x == 0) {
    delta[out_row] = correction;
  }
}
