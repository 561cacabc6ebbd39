// attention_decode over a quantized cache. Codes are unpacked in registers.
//
// Inputs (strides as in attention_decode), T = float, half or bfloat16_t:
//   queries [B, H, QUERIES, D], H = GROUPED * H_kv
//   keys, values: uint32 [B, H_kv, S, D * BITS / 32], the codes of mx.quantize (affine), the first in the lowest bits
//   key_scales, key_biases, value_scales, value_biases: T [B, H_kv, S, D / GROUP]; value = scale * code + bias
//   (these six may have more than B batch entries, since MLX passes arrays of fewer than 8 elements in the constant
//   address space, which this kernel doesn't support)
//   scale, cap, window, slopes, sinks, range and the output as in attention_decode
// Template: as in attention_decode, and GROUP (32 or 64, a divisor of D), BITS (4 or 8)
// Grid, threadgroup and method: as in attention_decode

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

const device uint32_t* const own_keys = keys + batch * keys_strides[0] + head * keys_strides[1];
const device T* const k_scales = key_scales + batch * key_scales_strides[0] + head * key_scales_strides[1];
const device T* const k_biases = key_biases + batch * key_biases_strides[0] + head * key_biases_strides[1];
const device uint32_t* const own_values = values + batch * values_strides[0] + head * values_strides[1];
const device T* const v_scales = value_scales + batch * value_scales_strides[0] + head * value_scales_strides[1];
const device T* const v_biases = value_biases + batch * value_biases_strides[0] + head * value_biases_strides[1];
DecodePacked<T, D, GROUP, BITS> packed_keys, packed_values;
packed_keys.begin(
    own_keys, keys_strides[2], keys_strides[3], k_scales, key_scales_strides[2], key_scales_strides[3], k_biases,
    key_biases_strides[2], key_biases_strides[3], rows.lane);
packed_values.begin(
    own_values, values_strides[2], values_strides[3], v_scales, value_scales_strides[2], value_scales_strides[3],
    v_biases, value_biases_strides[2], value_biases_strides[3], rows.lane);
rows.template attend<TILE>(packed_keys, packed_values, tile);

const int64_t out_stride = SPLIT ? int64_t(splits) * (D + 2) : D;
rows.template finish<SPLIT>(
    out + place * out_stride * Rows::ROWS + (SPLIT ? split * (D + 2) : 0), out_stride, scratch);
