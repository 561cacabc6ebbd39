// Gradients of RMSNorm. With r = 1 / sqrt(mean(x^2) + eps), over rows:
//   dx = r * (dy * weight - x * r^2 * mean(dy * weight * x)) + dh
//   dw = sum over rows of dy * x * r
//
// inputs    x, dy, dh [R, N], weight [N] of any floating type, eps float32 scalar;
//           dh is the gradient of x from the residual stream, read only with STREAM
// outputs   dx [R, N] of type T, dw [teams, N] float32: partial sums per team
// template  T       type of dx
//           CHUNKS  runs of four values of a row per thread
//           EXACT   the runs of all threads have as many values as a row, so that nothing checks its end
//           ROWS    maximum number of rows per team
//           WIDE    a team is a threadgroup; otherwise it is one SIMD group
//           STREAM  add dh
// grid      threadgroups of whole SIMD groups, in x: at least R / ROWS teams
//
// Teams are those of rms_norm.metal; a tile is the 4 * threads * CHUNKS values that a team holds. A thread accumulates dw of its columns in registers over the rows of its
// team. A row of one tile is read once. For longer rows, which need WIDE, a first pass computes the two sums of each
// row, and a second pass processes the team's rows tile by tile: everything is read twice, and dw is written once.
// With four chunks, the weight is loaded again for each row: in registers it would leave room for fewer threads.

const int rows = x_shape[0], N = x_shape[1];
const uint lane = thread_index_in_simdgroup;
const int team = WIDE ? threadgroup_position_in_grid.x
                      : threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
const int teams = WIDE ? threadgroups_per_grid.x : threadgroups_per_grid.x * simdgroups_per_threadgroup;
const int threads = WIDE ? threads_per_threadgroup.x : SIMD;
const int first = 4 * (WIDE ? thread_index_in_threadgroup : lane);
const int stride = 4 * threads;
const int tiles = (N + stride * CHUNKS - 1) / (stride * CHUNKS);
const float epsilon = eps;

threadgroup float2 scratch[SIMD];
threadgroup float2 row_sums[ROWS];
constexpr bool KEEP = !WIDE || CHUNKS < 4;  // the weight in registers
float4 values[CHUNKS], gradients[CHUNKS], weights[KEEP ? CHUNKS : 1], columns[CHUNKS];

if (tiles > 1) {
  for (int row = team, k = 0; row < rows; row += teams, k++) {
    const size_t start = size_t(row) * N;
    float2 sums = float2(0.0f);
    for (int i = first; i < N; i += stride) {
      const float4 value = load4(x + start + i, N - i);
      const float4 g = load4(dy + start + i, N - i) * load4(weight + i, N - i);
      sums += float2(dot(value, value), dot(value, g));
    }
    sums = threadgroup_sum(sums, scratch, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, lane);
    if (thread_index_in_threadgroup == 0) {
      row_sums[k] = sums;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (int tile = 0; tile < tiles; tile++) {
  const int from = first + tile * CHUNKS * stride;
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    const int i = from + c * stride;
    if (KEEP) {
      weights[KEEP ? c : 0] = load4(weight + i, EXACT ? 4 : N - i);
    }
    columns[c] = float4(0.0f);
  }
  for (int row = team, k = 0; row < rows; row += teams, k++) {
    const size_t start = size_t(row) * N;
    float2 sums = float2(0.0f);
    UNROLL for (int c = 0; c < CHUNKS; c++) {
      const int i = from + c * stride;
      values[c] = load4(x + start + i, EXACT ? 4 : N - i);
      gradients[c] = load4(dy + start + i, EXACT ? 4 : N - i);
      const float4 w = KEEP ? weights[KEEP ? c : 0] : load4(weight + i, EXACT ? 4 : N - i);
      sums += float2(dot(values[c], values[c]), dot(values[c], gradients[c] * w));
    }
    if (tiles > 1) {
      sums = row_sums[k];
    } else if (WIDE) {
      sums = threadgroup_sum(sums, scratch, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, lane);
    } else {
      sums = float2(simd_sum(sums.x), simd_sum(sums.y));
    }
    const float inverse = precise::rsqrt(sums.x / N + epsilon);
    const float mean = sums.y / N * inverse * inverse;  // in this order, since inverse^3 could overflow float32
    UNROLL for (int c = 0; c < CHUNKS; c++) {
      const int i = from + c * stride;
      const float4 w = KEEP ? weights[KEEP ? c : 0] : load4(weight + i, EXACT ? 4 : N - i);
      float4 gradient = inverse * (gradients[c] * w - values[c] * mean);
      if (STREAM) {
        gradient += load4(dh + start + i, EXACT ? 4 : N - i);
      }
      store4<T>(dx + start + i, gradient, EXACT ? 4 : N - i);
      columns[c] += gradients[c] * (values[c] * inverse);
    }
  }
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    const int i = from + c * stride;
    store4<float>(dw + size_t(team) * N + i, columns[c], EXACT ? 4 : N - i);
  }
}
