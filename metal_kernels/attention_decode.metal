// Attention of few queries (decoding) over a long key-value cache. Threadgroups divide the keys.
//
// Inputs (any strides; neighboring keys and values less than 2^24 elements apart), T = float, half or bfloat16_t:
//   queries [B, H, QUERIES, D], keys and values [B, H_kv, S, D], H = GROUPED * H_kv
//   scale, cap: 0-d float32; window: 0-d int32, at most 2^30; slopes [H] float32 (ALiBi); sinks [H], any type
//   range [B, 2] int32: the first key of each batch entry, and the one after its last; the queries are the last before it
//   cap, window, slopes, sinks and range are read only with SOFTCAP, WINDOW, SLOPES, SINKS and RANGE; without RANGE it is
//   0 and S
// Output `out`:
//   without SPLIT, T [B, H, QUERIES, D];
//   with SPLIT, float32 [B, H, QUERIES, splits, D + 2]: the unnormalized sum, the maximum score (base 2) and the sum of
//   exp2(score - maximum) of each part of the keys, for attention_decode_combine
// Template: T; D; GROUPED; QUERIES; ROW_GROUPS and KEY_GROUPS, the groups of rows and keys in a threadgroup; TILE, the
//   keys in threadgroup memory at a time (0 with one row group); SPLIT; WINDOW; SOFTCAP; SLOPES; SINKS; RANGE
// Grid: (32 * ROW_GROUPS * KEY_GROUPS, B * H_kv, splits); threadgroup: the same with 1, 1
//
// Query t of QUERIES has position S - QUERIES + t and sees the keys up to there, with WINDOW the last `window`.
// Method: split keys and a combining pass (Flash-Decoding: Dao et al. 2023) with DecodeRows of attention_decode.h. A
// threadgroup processes all query rows of a key head, so each key and value is loaded once.

using Rows = DecodeRows<T, D, GROUPED, QUERIES, ROW_GROUPS, KEY_GROUPS, WINDOW, SOFTCAP, SLOPES>;
threadgroup float scratch[Rows::SCRATCH];
threadgroup T tile[ROW_GROUPS > 1 ? 2 * TILE * D : 1];

const int kv_heads = keys_shape[1];
const int place = threadgroup_position_in_grid.y, batch = place / kv_heads, head = place % kv_heads;
const int first = RANGE ? int(range[batch * range_strides[0]]) : 0;
const int S = RANGE ? int(range[batch * range_strides[0] + range_strides[1]]) : keys_shape[2];
const int split = threadgroup_position_in_grid.z, splits = threadgroups_per_grid.z;

Rows rows;
rows.begin(
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    first,
    S,
    WINDOW ? int(window) : 0,
    SOFTCAP ? float(cap) : 0.0f,
    split,
    splits);
if (SLOPES) {
  rows.share_slopes(rows.speaks() ? slopes[(head * GROUPED + rows.row() / QUERIES) * slopes_strides[0]] : 0.0f);
}
if (SINKS) {
  const int query_head = head * GROUPED + rows.row() / QUERIES;
  rows.begin_with_sinks(rows.speaks() ? float(sinks[query_head * sinks_strides[0]]) : 0.0f, split);
}
rows.load_queries(
    queries + batch * queries_strides[0] + head * GROUPED * queries_strides[1],
    queries_strides[1],
    queries_strides[2],
    queries_strides[3],
    SOFTCAP ? scale / cap : scale * M_LOG2E_F,
    scratch);

const device T* const own_keys = keys + batch * keys_strides[0] + head * keys_strides[1];
const device T* const own_values = values + batch * values_strides[0] + head * values_strides[1];
DecodeDense<const device T*, T, D, false> dense_keys, dense_values;
dense_keys.begin(own_keys, keys_strides[2], keys_strides[3], rows.lane);
dense_values.begin(own_values, values_strides[2], values_strides[3], rows.lane);
rows.template attend<TILE>(dense_keys, dense_values, tile);

const int64_t out_stride = SPLIT ? int64_t(splits) * (D + 2) : D;
rows.template finish<SPLIT>(
    out + place * out_stride * Rows::ROWS + (SPLIT ? split * (D + 2) : 0), out_stride, scratch);
