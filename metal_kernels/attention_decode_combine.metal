// Merges the results of attention_decode for the parts of the keys.
//
// Inputs: parts, float32 [rows, splits, D + 2], contiguous: per part of the keys an unnormalized sum of D elements, the
//   maximum score (base 2) and the sum of exp2(score - maximum)
// Output: out, T [rows, D]: softmax-weighted values; 0 for a row that sees no key
// Template: T, D
// Grid: (32, rows, 1); threadgroup: (32, 1, 1)
//
// Method: out = (sum of w * sum) / (sum of w * total) over the parts, with w = exp2(maximum - maximum of all parts):
// Flash-Decoding (Dao et al. 2023). A lane computes the weights of every 32nd part.

const int lane = thread_index_in_simdgroup, row = threadgroup_position_in_grid.y;
const int splits = parts_shape[1];
const device float* const own = parts + int64_t(row) * splits * (D + 2);

float peak = -3.4e38f;  // instead of -inf; also the maximum score of parts without keys
for (int s = lane; s < splits; s += SIMD) {
  peak = max(peak, own[s * (D + 2) + D]);
}
peak = simd_max(peak);

constexpr int EACH = (D + SIMD - 1) / SIMD;
float sum[EACH];
UNROLL
for (int i = 0; i < EACH; ++i) {
  sum[i] = 0;
}
float total = 0;
for (int first = 0; first < splits; first += SIMD) {
  float weight = 0;
  if (first + lane < splits) {
    const device float* const part = own + (first + lane) * (D + 2);
    weight = exp2(part[D] - peak);
    total += weight * part[D + 1];
  }
  for (int s = first; s < min(first + SIMD, splits); ++s) {
    const float weight_of_part = simd_shuffle(weight, ushort(s - first));
    UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int d = i * SIMD + lane;
      if (d < D) {
        sum[i] += weight_of_part * own[s * (D + 2) + d];
      }
    }
  }
}
total = simd_sum(total);
UNROLL
for (int i = 0; i < EACH; ++i) {
  const int d = i * SIMD + lane;
  if (d < D) {
    out[int64_t(row) * D + d] = T(total == 0 ? 0.0f : sum[i] / total);
  }
}
