// RMSNorm of each head of the queries and keys (as in Qwen3), and rotary position embeddings (RoPE, Su et al. 2021) of
// their first 2 * HALF dimensions, for one position per row. With x_1 and x_2 the halves of these dimensions:
//   y_1 = x_1 * cos(theta) - x_2 * sin(theta), y_2 = x_1 * sin(theta) + x_2 * cos(theta)
//
// inputs    x [B, N, 1, D]: queries, keys, and others, which are not read, of any floating type
//           query_weight, key_weight [D] of any floating type, read with NORM
//           positions [B] int32, read if HALF > 0
//           wavelengths [HALF] float32, read with WAVELENGTHS: theta_i = position / wavelengths[i]
//           base float32 scalar: otherwise theta_i = position * 2^(-base * i / HALF)
//           eps float32 scalar
// outputs   queries [B, H, 1, D] and keys [B, K, 1, D] of type T; if K is 0, keys has one head of zeros
// template  T       type of the outputs
//           D, N, H, K  head dim, number of heads of x, of query heads and of key heads
//           HALF    half of the dimensions that are rotated
//           NORM, WAVELENGTHS  see the inputs
// grid      (32, H + K, B) in threadgroups of 32: a SIMD group for each head
//
// All computation is in float32; results are rounded once. Angles, cosines and sines are those of MLX's RoPE kernel,
// which rotates the keys of the prompt.

constexpr int PAIRS = (HALF + SIMD - 1) / SIMD, OTHERS = (D - 2 * HALF + SIMD - 1) / SIMD;  // of a thread
const int lane = thread_index_in_simdgroup;
const int head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const bool is_query = head < H;
const auto from = x + (size_t(row) * N + head) * D;
const auto weight = is_query ? query_weight : key_weight;
device T* to = is_query ? queries + (size_t(row) * H + head) * D : keys + (size_t(row) * K + head - H) * D;
if (K == 0 && head == 0) {
  for (int i = lane; i < D; i += SIMD) {
    keys[size_t(row) * D + i] = T(0);
  }
}

float first[PAIRS + 1], second[PAIRS + 1], other[OTHERS + 1];  // arrays can't have no elements
float sum = 0.0f;
UNROLL for (int c = 0; c < PAIRS; c++) {
  const int i = c * SIMD + lane;
  if (HALF % SIMD == 0 || i < HALF) {
    first[c] = float(from[i]);
    second[c] = float(from[i + HALF]);
    sum += first[c] * first[c] + second[c] * second[c];
    if (NORM) {
      first[c] *= float(weight[i]);
      second[c] *= float(weight[i + HALF]);
    }
  }
}
UNROLL for (int c = 0; c < OTHERS; c++) {
  const int i = 2 * HALF + c * SIMD + lane;
  if (i < D) {
    other[c] = float(from[i]);
    sum += other[c] * other[c];
    if (NORM) {
      other[c] *= float(weight[i]);
    }
  }
}
const float inverse = NORM ? precise::rsqrt(simd_sum(sum) / D + eps) : 1.0f;
UNROLL for (int c = 0; c < PAIRS; c++) {
  const int i = c * SIMD + lane;
  if (HALF % SIMD == 0 || i < HALF) {
    const float frequency = WAVELENGTHS ? 1.0f / float(wavelengths[i]) : exp2(-(float(i) / HALF) * base);
    const float theta = float(positions[row]) * frequency;
    const float cosine = fast::cos(theta), sine = fast::sin(theta);
    to[i] = T(inverse * (first[c] * cosine - second[c] * sine));
    to[i + HALF] = T(inverse * (first[c] * sine + second[c] * cosine));
  }
}
UNROLL for (int c = 0; c < OTHERS; c++) {
  const int i = 2 * HALF + c * SIMD + lane;
  if (i < D) {
    to[i] = T(inverse * other[c]);
  }
}
