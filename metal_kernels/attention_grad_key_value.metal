// Gradients of attention_forward with respect to the keys and the values.
//
// Inputs (any strides): queries, keys, values and scale as for attention_forward; output_grad [B, H, T, D] of type T,
// the cotangent of its output; lse [B, H, T] float, its second output; delta [B, H, T] float, from
// attention_grad_query; ranges [B, S, 2] int: key s is seen by the rows from ranges[s, 0] to before ranges[s, 1].
// Neither decreases along S.
// Outputs: key_grad and value_grad [SPLITS, B, H_kv, S, D] of type U, whose sums over SPLITS are the gradients.
// Template: T; D, a multiple of 8; HELD, STAGED and PARTS, see attention_tiles.h; SPLITS, the threadgroups that share
// the rows that see a key; U, T if SPLITS is 1, else float.
// Grid: (ceil(S / ROWS) * 128, H_kv * SPLITS, B) in threadgroups of (128, 1, 1), where ROWS is 32 * HELD / PARTS.
//
// Method: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 2, the gradients of keys and values. A SIMD group
// keeps its keys, its values and their gradients in registers. The threadgroup copies a tile of query rows at a time to
// threadgroup memory, for each head of the group that shares the keys, and skips the tiles that see none of its keys.

typedef Tiles<T, D, HELD, STAGED, 1, PARTS> tiles;
threadgroup vec<T, 4> query_tiles[2 * tiles::STAGE];
threadgroup vec<T, 4> grad_tiles[2 * tiles::STAGE];
threadgroup float2 exchange[4 * HELD * tiles::EXCHANGE];

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
vec<T, 2> key[HELD * tiles::TILES];
vec<T, 2> value[HELD * tiles::TILES];
tiles::hold(
    key, keys + batch * keys_strides[0] + key_head * keys_strides[1] + row * keys_strides[2], keys_strides[2],
    keys_strides[3], last + 1 - row, part, place);
tiles::hold(
    value, values + batch * values_strides[0] + key_head * values_strides[1] + row * values_strides[2],
    values_strides[2], values_strides[3], last + 1 - row, part, place);

float2 key_sums[HELD * tiles::TILES];
float2 value_sums[HELD * tiles::TILES];
UNROLL
for (int i = 0; i < HELD * tiles::TILES; ++i) {
  key_sums[i] = float2(0.0f);
  value_sums[i] = float2(0.0f);
}
const float scale_log2 = scale * M_LOG2E_F;

// The tiles of all heads that share the keys, of which this threadgroup has a part.
const int begin = visible[first * ranges_strides[1]];
const int end = visible[last * ranges_strides[1] + ranges_strides[2]];
const int heads = queries_shape[1] / keys_shape[1];
const int tiles_of_head = max(1, (end - begin + STAGED - 1) / STAGED);
const int tile_begin = heads * tiles_of_head * split / SPLITS;
const int tile_end = begin < end ? heads * tiles_of_head * (split + 1) / SPLITS : tile_begin;

int head = key_head * heads + tile_begin / tiles_of_head;
int start = begin + (tile_begin % tiles_of_head - 1) * STAGED;
for (int tile = tile_begin - 1; tile < tile_end; ++tile) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int next = start + STAGED, next_head = head;
  if (next >= end) {
    next = begin;
    ++next_head;
  }
  if (tile + 1 < tile_end) {
    const int buffer = (tile + 1) & 1;
    tiles::stage(
        query_tiles + buffer * tiles::STAGE,
        queries + batch * queries_strides[0] + next_head * queries_strides[1] + next * queries_strides[2],
        queries_strides[2], queries_strides[3], query_count - next, thread_index);
    tiles::stage(
        grad_tiles + buffer * tiles::STAGE,
        output_grad + batch * output_grad_strides[0] + next_head * output_grad_strides[1] +
            next * output_grad_strides[2],
        output_grad_strides[2], output_grad_strides[3], query_count - next, thread_index);
  }
  // Eight rows at a time: more would take too many registers.
  ROLLED
  for (int block = 0; block < (tile < tile_begin ? 0 : STAGED); block += 8) {
    const int block_start = start + block;
    const int staged = (tile & 1) * tiles::STAGE + block * tiles::LD + tiles::lane_offset(part, place);
    const bool seen = row <= last && block_start < bounds.w && block_start + 8 > bounds.x;
    float2 scores[2 * HELD];
    thread float2* slopes = scores + HELD;  // output_grad values^T
    UNROLL
    for (int h = 0; h < 2 * HELD; ++h) {
      scores[h] = float2(0.0f);
    }
    if (seen) {
      tiles::add_scores(scores, query_tiles + staged, key);
      tiles::add_scores(slopes, grad_tiles + staged, value);
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
      const int64_t at = min(block_start + place.y, query_count - 1);
      const float natural = lse[batch * lse_strides[0] + head * lse_strides[1] + at * lse_strides[2]];
      // A row that sees no key has probabilities of 0.
      const float row_lse = natural == -INFINITY ? INFINITY : natural * M_LOG2E_F;
      const float correction = delta[batch * delta_strides[0] + head * delta_strides[1] + at * delta_strides[2]];
      vec<T, 2> weights[HELD];
      vec<T, 2> factors[HELD];
      UNROLL
      for (int h = 0; h < HELD; ++h) {
        const float2 probabilities = exp2(scores[h] * scale_log2 - row_lse);
        weights[h] = tile_transpose<T>(probabilities, lane);
        factors[h] = tile_transpose<T>(probabilities * (slopes[h] - correction), lane);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);  // load the rows again: they would take too many registers
      tiles::add_products(value_sums, weights, grad_tiles + staged);
      tiles::add_products(key_sums, factors, query_tiles + staged);
    }
  }
  head = next_head;
  start = next;
}

const int64_t out_row = ((split * int64_t(threadgroups_per_grid.z) + batch) * keys_shape[1] + key_head) * key_count + row;
tiles::store(key_grad + out_row * D, key_sums, scale, last + 1 - row, part, place);
tiles::store(value_grad + out_row * D, value_sums, 1.0f, last + 1 - row, part, place);
