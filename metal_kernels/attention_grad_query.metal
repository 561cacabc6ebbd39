// Gradient of attention_forward with respect to the queries, and each row's correction of the score gradients.
//
// Inputs (any strides): queries, keys, values, scale and ranges as for attention_forward; its outputs, output and
// lse; their cotangents, output_grad [B, H, T, D] of type T and lse_grad [B, H, T] float.
// Outputs: query_grad [B, H, T, D] of type T; delta [B, H, T] float, sum(output_grad * output) - lse_grad.
// Template: T; D, a multiple of 8; HELD, STAGED and PARTS, see attention_tiles.h.
// Grid: (ceil(T / ROWS) * 128, H, B) in threadgroups of (128, 1, 1), where ROWS is 32 * HELD / PARTS.
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 2, the gradient of the queries. Probabilities are
// recomputed: p = exp(score - lse). The gradient of the score is p * (output_grad value^T - delta). It includes
// lse_grad * p, since d lse / d score = p. It is rounded to T as a factor of the keys. attention_grad_key_value is
// separate, so that neither needs atomics.

typedef Tiles<T, D, HELD, STAGED, 1, PARTS> tiles;
threadgroup vec<T, 4> key_tiles[2 * tiles::STAGE];
threadgroup vec<T, 4> value_tiles[2 * tiles::STAGE];
threadgroup float2 exchange[4 * HELD * tiles::EXCHANGE];

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
const int64_t head = threadgroup_position_in_grid.y;
const int64_t key_head = head / (queries_shape[1] / keys_shape[1]);
const int64_t out_row = (batch * queries_shape[1] + head) * query_count + row;
const device T* key_rows = keys + batch * keys_strides[0] + key_head * keys_strides[1];
const device T* value_rows = values + batch * values_strides[0] + key_head * values_strides[1];
const device T* grad_rows = output_grad + batch * output_grad_strides[0] + head * output_grad_strides[1] +
    row * output_grad_strides[2];

const auto visible = ranges + batch * ranges_strides[0];
const int4 bounds = tiles::bounds(visible, ranges_strides[1], ranges_strides[2], row, last);
vec<T, 2> query[HELD * tiles::TILES];
vec<T, 2> grad[HELD * tiles::TILES];
tiles::hold(
    query, queries + batch * queries_strides[0] + head * queries_strides[1] + row * queries_strides[2],
    queries_strides[2], queries_strides[3], last + 1 - row, part, place);
tiles::hold(grad, grad_rows, output_grad_strides[2], output_grad_strides[3], last + 1 - row, part, place);

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

float2 sums[HELD * tiles::TILES];
UNROLL
for (int i = 0; i < HELD * tiles::TILES; ++i) {
  sums[i] = float2(0.0f);
}
const float scale_log2 = scale * M_LOG2E_F;

const int begin = visible[first * ranges_strides[1]];
const int end = visible[last * ranges_strides[1] + ranges_strides[2]];
int buffer = 0;
for (int start = begin - STAGED; start < end; start += STAGED) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int next = start + STAGED;
  if (next < end) {
    tiles::stage(
        key_tiles + buffer * tiles::STAGE, key_rows + next * keys_strides[2], keys_strides[2], keys_strides[3],
        key_count - next, thread_index);
    tiles::stage(
        value_tiles + buffer * tiles::STAGE, value_rows + next * values_strides[2], values_strides[2],
        values_strides[3], key_count - next, thread_index);
  }
  buffer ^= 1;
  if (start < begin) {
    continue;
  }
  // Eight keys at a time: more would take too many registers.
  ROLLED
  for (int block = 0; block < STAGED; block += 8) {
    const int block_start = start + block;
    const int staged = buffer * tiles::STAGE + block * tiles::LD + tiles::lane_offset(part, place);
    const bool seen = row <= last && block_start < bounds.w && block_start + 8 > bounds.x;
    float2 scores[2 * HELD];
    thread float2* slopes = scores + HELD;  // values output_grad^T
    UNROLL
    for (int h = 0; h < 2 * HELD; ++h) {
      scores[h] = float2(0.0f);
    }
    if (seen) {
      tiles::add_scores(scores, key_tiles + staged, query);
      tiles::add_scores(slopes, value_tiles + staged, grad);
    }
    if constexpr (PARTS > 1) {
      tile_add_other_part<2 * HELD>(
          scores, exchange + block / 8 % 2 * 2 * HELD * tiles::EXCHANGE, simdgroup, lane);
    }
    if (seen) {
      if (block_start < bounds.y || block_start + 8 > bounds.z) {
        tiles::mask(
            scores, -INFINITY, block_start + place.y, visible, ranges_strides[1], ranges_strides[2], row + place.x,
            last);
        tiles::mask(
            slopes, 0.0f, block_start + place.y, visible, ranges_strides[1], ranges_strides[2], row + place.x, last);
      }
      vec<T, 2> factors[HELD];
      UNROLL
      for (int h = 0; h < HELD; ++h) {
        const float2 probabilities = exp2(scores[h] * scale_log2 - row_lse[h]);
        factors[h] = tile_transpose<T>(probabilities * (slopes[h] - correction[h]), lane);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);  // load the keys again: they would take too many registers
      tiles::add_products(sums, factors, key_tiles + staged);
    }
  }
}

tiles::store(query_grad + out_row * D, sums, scale, last + 1 - row, part, place);
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
