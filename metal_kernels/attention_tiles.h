// Products of 8 x 8 tiles in a SIMD group, for the training attention kernels. Include after common.h.
//
// A lane holds two neighboring elements of one row of a tile as a float2. This is the layout of a simdgroup_matrix on
// Apple's GPUs, for factors and sums, so a product can be masked, exponentiated and multiplied again in registers.

// Returns the column (x) and row (y) of a lane's first element.
METAL_FUNC ushort2 tile_place(uint lane) {
  const uint quad = lane / 4;
  return ushort2((quad & 2) * 2 + (lane % 2) * 2, (quad & 4) + (lane / 2) % 4);
}

// Computes sum += left * right in float32.
METAL_FUNC void tile_multiply_add(thread float2& sum, float2 left, float2 right) {
  simdgroup_float8x8 a, b, c;
  a.thread_elements()[0] = left.x;
  a.thread_elements()[1] = left.y;
  b.thread_elements()[0] = right.x;
  b.thread_elements()[1] = right.y;
  c.thread_elements()[0] = sum.x;
  c.thread_elements()[1] = sum.y;
  simdgroup_multiply_accumulate(c, a, b, c);
  sum = float2(c.thread_elements()[0], c.thread_elements()[1]);
}

// Reduce the eight elements of the lane's row, which are in the lanes that differ in bits 0 and 3.
METAL_FUNC float tile_row_max(float2 pair) {
  float top = max(pair.x, pair.y);
  top = max(top, simd_shuffle_xor(top, ushort(1)));
  return max(top, simd_shuffle_xor(top, ushort(8)));
}

METAL_FUNC float tile_row_sum(float2 pair) {
  float sum = pair.x + pair.y;
  sum += simd_shuffle_xor(sum, ushort(1));
  return sum + simd_shuffle_xor(sum, ushort(8));
}

// Load the lane's part of the 8 x 8 tile at `corner` of a matrix with rows of LD elements, or of its transpose.
template <typename T, int LD>
METAL_FUNC float2 tile_load(const threadgroup T* corner, ushort2 place) {
  const threadgroup T* at = corner + place.y * LD + place.x;
  return float2(float(at[0]), float(at[1]));
}

template <typename T, int LD>
METAL_FUNC float2 tile_load_transposed(const threadgroup T* corner, ushort2 place) {
  const threadgroup T* at = corner + place.x * LD + place.y;
  return float2(float(at[0]), float(at[LD]));
}

// Loads a lane's part of 8 rows of D elements in their own dtype: half precision halves the registers. Zeros if the
// lane's row is not `inside`.
template <typename T, int D>
METAL_FUNC void tile_hold_row(thread T* held, const device T* row, int64_t stride, bool inside, ushort2 place) {
  UNROLL
  for (int d = 0; d < D / 8; ++d) {
    const int64_t at = (8 * d + place.x) * stride;
    held[2 * d] = inside ? row[at] : T(0);
    held[2 * d + 1] = inside ? row[at + stride] : T(0);
  }
}

// All THREADS of a threadgroup copy ROWS rows of D elements into rows of LD elements, with zeros from row `count` on. A
// thread copies runs of four; if they are contiguous in memory, a run can become one load.
template <typename T, int ROWS, int D, int LD, int THREADS>
METAL_FUNC void tile_stage_rows(
    threadgroup T* to,
    const device T* from,
    int64_t row_stride,
    int64_t stride,
    int count,
    uint thread_index) {
  for (int i = thread_index; i < ROWS * D / 4; i += THREADS) {
    const int row = i / (D / 4), d = 4 * (i % (D / 4));
    threadgroup T* run = to + row * LD + d;
    const device T* at = from + row * row_stride + d * stride;
    if (row >= count) {
      run[0] = T(0);
      run[1] = T(0);
      run[2] = T(0);
      run[3] = T(0);
    } else if (stride == 1) {
      run[0] = at[0];
      run[1] = at[1];
      run[2] = at[2];
      run[3] = at[3];
    } else {
      run[0] = at[0];
      run[1] = at[stride];
      run[2] = at[2 * stride];
      run[3] = at[3 * stride];
    }
  }
}
