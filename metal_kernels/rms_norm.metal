// RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight, over rows.
//
// inputs    x [R, N], weight [N] of any floating type, eps float32 scalar
// outputs   y [R, N] of type T
// template  T       type of y
//           CHUNKS  runs of four values of a row per thread
//           EXACT   the runs of all threads have as many values as a row, so that nothing checks its end
//           LONG    they have fewer: a thread processes further runs, CHUNKS is 1
//           WIDE    a team is a threadgroup; otherwise it is one SIMD group
// grid      any number of threadgroups of whole SIMD groups, in x, which divide the rows
//
// With n teams, a team processes every n-th row. Thread t of a team of L threads holds the runs t, t + L, ... in
// registers, so that neighboring threads read neighboring addresses. A row is read once from device memory, and the
// weight once per team; with LONG, both are read twice and once per row.
// All computation is in float32; y is rounded at the end.

const int rows = x_shape[0], N = x_shape[1];
const uint lane = thread_index_in_simdgroup;
const int team = WIDE ? threadgroup_position_in_grid.x
                      : threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
const int teams = WIDE ? threadgroups_per_grid.x : threadgroups_per_grid.x * simdgroups_per_threadgroup;
const int threads = WIDE ? threads_per_threadgroup.x : SIMD;
const int first = 4 * (WIDE ? thread_index_in_threadgroup : lane);
const int stride = 4 * threads;
const float epsilon = eps;

threadgroup float scratch[SIMD];
float4 values[CHUNKS], weights[CHUNKS];

if (!LONG) {
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    const int i = first + c * stride;
    weights[c] = load4(weight + i, EXACT ? 4 : N - i);
  }
}
for (int row = team; row < rows; row += teams) {
  const size_t start = size_t(row) * N;
  float sum = 0.0f;
  for (int at = first; at < (LONG ? N : first + 1); at += stride) {
    UNROLL for (int c = 0; c < CHUNKS; c++) {
      const int i = at + c * stride;
      values[c] = load4(x + start + i, EXACT ? 4 : N - i);
      sum += dot(values[c], values[c]);
    }
  }
  sum = WIDE ? threadgroup_sum(sum, scratch, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, lane)
             : simd_sum(sum);
  const float inverse = precise::rsqrt(sum / N + epsilon);
  for (int at = first; at < (LONG ? N : first + 1); at += stride) {
    UNROLL for (int c = 0; c < CHUNKS; c++) {
      const int i = at + c * stride;
      if (LONG) {
        values[c] = load4(x + start + i, N - i);
        weights[c] = load4(weight + i, N - i);
      }
      store4<T>(y + start + i, values[c] * inverse * weights[c], EXACT ? 4 : N - i);
    }
  }
}
